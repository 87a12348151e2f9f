"""`prfaas doctor`: checks whether the path to a receiver can carry KV; advises what to change."""

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
@click.option("--tls-ca", type=click.Path(path_type=Path), help="CA certificate for mutual TLS.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate of this host.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Private key of that certificate.")
@click.option(
    "--connections",
    default="1,2,4,8",
    show_default=True,
    help="Numbers of parallel connections to measure, comma-separated.",
)
@click.option(
    "--seconds",
    default=1.0,
    show_default=True,
    help="Seconds to measure with each number of connections.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(
    address: str,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    connections: str,
    seconds: float,
    as_json: bool,
) -> None:
    """Check the network path to HOST:PORT, where a kvd listens for KV.

    Reports whether HOST:PORT is reachable, the round-trip time, the path MTU, TLS, the version of
    the receiver, and the rate with several numbers of connections. Then advises what to change. The
    exit code is 1 when KV could not be sent on this path.

    \b
      prfaas doctor decode-host:7400
      prfaas doctor decode-host:7400 --tls-ca ca.pem --tls-cert client.pem \\
                                      --tls-key client.key
    """
    given = [path for path in (tls_ca, tls_cert, tls_key) if path is not None]
    if given and len(given) < 3:
        raise InputError(
            "mutual TLS needs all three options",
            where="--tls-ca, --tls-cert, --tls-key",
            fix="give all three or none",
        )
    if not 0.05 <= seconds <= 60:
        raise InputError(
            f"{seconds:g} is out of range", where="--seconds", fix="give a number from 0.05 to 60"
        )
    try:
        counts = tuple(int(count) for count in connections.split(","))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= 64 for count in counts):
        raise InputError(
            f"{connections!r} is not a list of numbers from 1 to 64",
            where="--connections",
            fix="give numbers like 1,2,4",
        )
    tls = client_context(tls_ca, tls_cert, tls_key) if tls_ca and tls_cert and tls_key else None
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
    table = Table(title=f"path to {found.address}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("reachable", "yes" if found.reachable else "no")
    if found.problem:
        table.add_row("problem", f"[red]{found.problem}[/red]")
    for label, value in (
        ("time to open a TCP connection", _ms(found.connect_s)),
        ("round trip of a message, both programs included", _ms(found.round_trip_s)),
        ("path MTU", found.path_mtu_bytes and f"{found.path_mtu_bytes:,} bytes"),
        ("TLS", found.tls or ("none" if found.reachable else None)),
        ("software of the receiver", found.software),
        ("congestion control of this host", ", ".join(found.congestion_controls)),
    ):
        if value:
            table.add_row(label, value)
    for rate in found.rates:
        resent = rate.retransmitted_segments
        lost = f", {resent} TCP segments retransmitted" if resent else ""
        table.add_row(f"rate with {rate.connections} connections", f"{rate.gbps:.2f} Gbps{lost}")
    out.print(table)
    for line in found.advice:
        out.print(f"- {line}")


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.2f} ms"
