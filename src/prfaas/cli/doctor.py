"""`prfaas doctor`: is the path to a receiver fit for KV, and if not, what is to be mended?"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click
from rich.table import Table

from prfaas.clock import MonotonicClock
from prfaas.config.address import parse_address
from prfaas.display.console import console, print_json
from prfaas.errors import InputError
from prfaas.measure.path_check import PathReport, check_path
from prfaas.security.tls import client_context


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--ca", type=click.Path(path_type=Path), help="CA certificate, for mutual TLS.")
@click.option("--cert", type=click.Path(path_type=Path), help="This side's certificate.")
@click.option("--key", type=click.Path(path_type=Path), help="Its key.")
@click.option("--connections", default="1,2,4,8", show_default=True, help="How many to try.")
@click.option("--seconds", default=1.0, show_default=True, help="For each number of connections.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    address: str,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    connections: str,
    seconds: float,
    as_json: bool,
) -> None:
    """Examine the way to HOST:PORT, where a prfaas receiver listens.

    Reachability, round trip, path MTU, TLS, version, and the rate with several numbers of
    connections; then what to change. Exit code 1 when KV could not be sent there.

    \b
      prfaas doctor decode-host:7400
      prfaas doctor decode-host:7400 --ca ca.pem --cert client.pem --key client.key
    """
    given = [path for path in (ca, cert, key) if path is not None]
    if given and len(given) < 3:
        raise InputError("mutual TLS needs all three", where="--ca, --cert, --key", fix="give all")
    if not 0.05 <= seconds <= 60:
        raise InputError(f"{seconds:g} s", where="--seconds", fix="give 0.05 to 60")
    try:
        counts = tuple(int(count) for count in connections.split(","))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= 64 for count in counts):
        raise InputError(f"{connections!r}", where="--connections", fix="give numbers like 1,2,4")
    tls = client_context(ca, cert, key) if ca and cert and key else None
    found = check_path(
        parse_address(address, "HOST:PORT"),
        tls=tls,
        connections=counts,
        seconds=seconds,
        clock=MonotonicClock(),
    )
    if as_json:
        print_json({**dataclasses.asdict(found), "healthy": found.healthy})
    else:
        _show(found)
    sys.exit(0 if found.healthy else 1)


def _show(found: PathReport) -> None:
    out = console()
    table = Table(title=f"the way to {found.address}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("reachable", "yes" if found.reachable else "no")
    if found.problem:
        table.add_row("problem", f"[red]{found.problem}[/red]")
    for label, value in (
        ("TCP connection made in", _ms(found.connect_s)),
        ("round trip, through both programs", _ms(found.round_trip_s)),
        ("path MTU", found.path_mtu_bytes and f"{found.path_mtu_bytes:,} bytes"),
        ("TLS", found.tls or ("none" if found.reachable else None)),
        ("software there", found.software),
        ("congestion control here", ", ".join(found.congestion_controls)),
    ):
        if value:
            table.add_row(label, value)
    for rate in found.rates:
        lost = "" if not rate.retransmitted_segments else f", {rate.retransmitted_segments} resent"
        table.add_row(f"rate with {rate.connections} connections", f"{rate.gbps:.2f} Gbps{lost}")
    out.print(table)
    for line in found.advice:
        out.print(f"- {line}")


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.2f} ms"
