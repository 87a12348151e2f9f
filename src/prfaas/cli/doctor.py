"""`prfaas doctor`: checks a path to a receiver, or a pair of engines; advises what to change."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from prfaas.cli.shared_options import F, as_input_error, read_key
from prfaas.clock import MonotonicClock
from prfaas.config.address import parse_address
from prfaas.config.tls import TlsSection
from prfaas.display.console import console, print_json, progress_bar, rounded
from prfaas.errors import InputError, PeerError
from prfaas.measure.path_check import PathReport, check_path, steps
from prfaas.measure.path_limit import digits
from prfaas.security.tls import TlsIdentity, load_identity
from prfaas.studies.pair_check import EnginePair, PairReport, check_pair
from prfaas.studies.pair_verdict import EngineSide, PairLink, PairVerdict
from prfaas.studies.single_handoff import HandoffReport, HandoffRequest, run_handoff

DEFAULT_TOKENS = 8_000
DEFAULT_GBPS = 10.0
MOST_TOKENS = 1 << 31
ANSWER_TOKENS = 16
# Generated prompts use ids that every vocabulary has, and that are text in a byte-level one.
_GENERATED_IDS = range(32, 127)
_HELP = ("-h", "--help")


def _tls_options(command: F) -> F:
    for name, what in (
        ("--tls-key", "Private key of the certificate."),
        ("--tls-cert", "Certificate of this host."),
        ("--tls-ca", "CA certificate of the deployment."),
    ):
        command = click.option(name, metavar="FILE", help=what)(command)
    return command


def _identity(ca: str | None, cert: str | None, key: str | None) -> TlsIdentity | None:
    return load_identity(TlsSection(ca, cert, key), "--tls")


class _PathFirst(click.Group):
    """A group whose first argument may also be HOST:PORT, as before it had subcommands. No
    address is the name of a subcommand, because an address has a port."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in _HELP):
            args = ["path", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_PathFirst)
def doctor() -> None:
    """Check a path that is to carry KV, or a pair of engines that are to hand over.

    \b
      prfaas doctor HOST:PORT          can this path carry KV, how fast, and what limits it?
      prfaas doctor pair A B           can these two engines hand over, and in which form?
      prfaas doctor pair A B --try     hand one prompt over from A to B, and compare the answers
    """


@doctor.command()
@click.argument("address", metavar="HOST:PORT")
@_tls_options
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
    help="Seconds to measure with each number of connections; at least 20 round trips.",
)
@click.option(
    "--path-only",
    is_flag=True,
    help="Do not measure this host alone. Then the check takes less time and fewer cores, but it "
    "cannot tell the link from the cores and TLS.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def path(
    address: str,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    connections: str,
    seconds: float,
    path_only: bool,
    as_json: bool,
) -> None:
    """Check the network path to HOST:PORT, where a kvd listens for KV.

    The command reports whether HOST:PORT is reachable, the round-trip time, the path MTU, TLS, the
    version of the receiver, and the rate with several numbers of connections. It also measures what
    this host can do alone, over loopback, in the clear and with mutual TLS. The exit code is 1 when
    KV could not be sent on this path.

    \b
      prfaas doctor decode-host:7400
      prfaas doctor decode-host:7400 --tls-ca ca.pem --tls-cert client.pem \\
                                      --tls-key client.key

    From these rates the command names the limit of the path, and what to change:

    \b
      link         more connections do not help, and this host alone is clearly faster
      round trip   a connection carries one window per round trip, and more connections help
      cores        the path is about as fast as this host alone
      TLS          the same with TLS, and in the clear this host is clearly faster
      unclear      none of these fits; the advice says what to measure next

    The check sends at most 896 MiB to HOST:PORT, which discards them. A kvd accepts 2 GiB per
    minute of such checks. Run the check while the hosts have no other work, and on both hosts: it
    measures the direction from this host to HOST:PORT, and it sees only this host's cores.
    """
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
    tls = _identity(tls_ca, tls_cert, tls_key)
    done = itertools.count(1)
    with progress_bar("checking the path", steps(counts, host_alone=not path_only)) as show:
        found = check_path(
            parse_address(address, "HOST:PORT"),
            tls=tls,
            connections=counts,
            seconds=seconds,
            clock=MonotonicClock(),
            host_alone=not path_only,
            step=lambda: show(next(done)),
        )
    if as_json:
        print_json({**dataclasses.asdict(found), "healthy": found.healthy})
    else:
        _show(found)
    sys.exit(0 if found.healthy else 1)


@doctor.command()
@click.argument("url_a", metavar="A")
@click.argument("url_b", metavar="B")
@click.option(
    "--try",
    "is_tried",
    is_flag=True,
    help="Prefill one prompt at A, transfer its state, decode it at B, and compare the answer with "
    "A's own.",
)
@click.option(
    "--tokens",
    default=DEFAULT_TOKENS,
    show_default=True,
    help="Tokens of one hand-off; with --try also of the prompt.",
)
@click.option("--kvd-a", metavar="URL", help="A's kvd.  [default: as a prfaas node reports it]")
@click.option("--kvd-b", metavar="URL", help="B's kvd.  [default: as a prfaas node reports it]")
@click.option(
    "--gbps",
    default=DEFAULT_GBPS,
    show_default=True,
    help="Rate of the link between the two, in 10^9 bits per second.",
)
@click.option(
    "--rtt-ms", default=0.0, show_default=True, help="Round-trip time of the link in milliseconds."
)
@click.option(
    "--convert-gbytes",
    type=float,
    help="Rate at which the engines convert, in 10^9 bytes per second.  [default: not counted]",
)
@click.option(
    "--native-block-tokens",
    type=int,
    help="Block size of the native form where neither engine reports one.  [default: as reported]",
)
@click.option(
    "--member-key-file",
    type=click.Path(path_type=Path),
    help="File with the key that nodes and kvds of the deployment require.",
)
@_tls_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def pair(
    url_a: str,
    url_b: str,
    is_tried: bool,
    tokens: int,
    kvd_a: str | None,
    kvd_b: str | None,
    gbps: float,
    rtt_ms: float,
    convert_gbytes: float | None,
    native_block_tokens: int | None,
    member_key_file: Path | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    as_json: bool,
) -> None:
    """Check whether the engines of A and B can hand over to each other.

    A and B are the URLs of the engines' kvds. The URL of a `prfaas node` works, too, because a node
    reports its kvd. The command shows the form in which KV travels (canonical, or the engines'
    native blocks), the bytes and the time of one hand-off in both forms, and for a pair that cannot
    hand over each difference with its fix. The exit code is 1 when a hand-off would be refused now.

    With --try the command makes one hand-off, without a gateway, and shows the time and the bytes
    of each step. A and B are then the URLs of servers: `prfaas node`s, or vLLM servers whose kvds
    --kvd-a and --kvd-b name. A also computes the whole answer. The exit code is 1 when the hand-off
    has changed the answer.

    \b
      prfaas doctor pair http://p1:7401 http://d1:7401 --gbps 100 --rtt-ms 20
      prfaas doctor pair http://node:8000 http://d1:7401 --tokens 32000 --json
      prfaas doctor pair http://p1:8000 http://d1:8000 --try --tokens 4000
    """
    _require(1 <= tokens <= MOST_TOKENS, "--tokens", tokens, f"a number from 1 to {MOST_TOKENS}")
    _require(_positive(gbps), "--gbps", gbps, "a number above 0")
    _require(0 <= rtt_ms <= 60_000, "--rtt-ms", rtt_ms, "a number from 0 to 60000")
    if convert_gbytes is not None:
        _require(_positive(convert_gbytes), "--convert-gbytes", convert_gbytes, "a number above 0")
    if native_block_tokens is not None:
        in_range = 1 <= native_block_tokens <= MOST_TOKENS
        _require(in_range, "--native-block-tokens", native_block_tokens, "1 or more")
    convert = None if convert_gbytes is None else convert_gbytes * 1e9
    engines = EnginePair(
        url_a.rstrip("/"),
        url_b.rstrip("/"),
        kvd_a,
        kvd_b,
        read_key(member_key_file),
        _identity(tls_ca, tls_cert, tls_key),
    )
    tried = None
    try:
        report = asyncio.run(
            check_pair(
                engines,
                tokens=tokens,
                link=PairLink(gbps, rtt_ms / 1e3, convert),
                native_block_tokens=native_block_tokens,
            )
        )
        if is_tried and report.verdict.form is not None:
            request = HandoffRequest(_generated_prompt(tokens), ANSWER_TOKENS, compare=True)
            tried = asyncio.run(run_handoff(engines, request, MonotonicClock()))
    except PeerError as error:
        raise as_input_error(error) from None
    if as_json:
        tried_json = None if tried is None else tried.as_dict()
        print_json({**_pair_json(report, tokens, gbps, rtt_ms), "tried": tried_json})
    else:
        _show_pair(report, tokens, gbps, rtt_ms)
        if tried is not None:
            _show_handoff(tried)
    changed = tried is not None and tried.comparison is not None and not tried.comparison.same
    if changed:
        raise click.ClickException("the hand-off changed the answer")
    sys.exit(0 if report.verdict.form is not None else 1)


def _generated_prompt(tokens: int) -> list[int]:
    """The same one in every run: the hand-off has an unused salt, so that nothing is cached."""
    return random.Random(0).choices(_GENERATED_IDS, k=tokens)


def _positive(number: float) -> bool:
    return 0 < number < math.inf


def _require(holds: bool, where: str, value: float, wanted: str) -> None:
    if not holds:
        raise InputError(f"{value:g} is out of range", where=where, fix=f"give {wanted}")


def _pair_json(report: PairReport, tokens: int, gbps: float, rtt_ms: float) -> dict[str, Any]:
    verdict = report.verdict
    return {
        "a": _side_json(report.a),
        "b": _side_json(report.b),
        "can_hand_over": verdict.form is not None,
        "form": verdict.form,
        "possible_form": verdict.possible_form,
        "differences": [dataclasses.asdict(one) for one in verdict.differences],
        "fixes": list(verdict.fixes),
        "tokens": tokens,
        "link": {"gbps": gbps, "rtt_ms": rtt_ms},
        "costs": [rounded(dataclasses.asdict(cost), 6) for cost in verdict.costs],
        "warnings": list(verdict.warnings),
    }


def _side_json(side: EngineSide) -> dict[str, Any]:
    """`form` and `compat` are those that count for routing; `forms` has all that the engine has."""
    return {
        "url": side.name,
        "form": side.form,
        "compat": msgspec.to_builtins(side.compat),
        "forms": {one.form: msgspec.to_builtins(one.compat) for one in side.forms},
    }


def _show_pair(report: PairReport, tokens: int, gbps: float, rtt_ms: float) -> None:
    out, verdict = console(), report.verdict
    for label, side in (("A", report.a), ("B", report.b)):
        compat = side.compat
        line = f"{label}  {side.name}: {compat.model} {compat.revision}, {compat.kv_dtype}"
        layouts = [
            f"blocks of {one.compat.block_tokens} tokens, layout {one.compat.layout}"
            for one in side.forms
        ]
        out.print(f"{line}, {' or '.join(layouts)}", markup=False)
    out.print(_summary(verdict), markup=False)
    if verdict.differences:
        table = Table(title="differences", title_justify="left")
        for column in ("field", "A", "B"):
            table.add_column(column)
        for one in verdict.differences:
            table.add_row(one.field, one.a, one.b)
        out.print(table)
        for fix in verdict.fixes:
            out.print(f"- {fix}", markup=False)
    title = f"one hand-off of {tokens:,} tokens over {gbps:g} Gbps, {rtt_ms:g} ms"
    table = Table(title=title, title_justify="left")
    table.add_column("form")
    for column in ("blocks of (tokens)", "bytes", "transfer (ms)", "converting (ms)"):
        table.add_column(column, justify="right")
    table.add_column("")
    for cost in verdict.costs:
        converting = "" if cost.convert_s is None else f"{cost.convert_s * 1e3:,.1f}"
        table.add_row(
            cost.form,
            f"{cost.block_tokens:,}",
            f"{cost.nbytes:,}",
            f"{cost.link_s * 1e3:,.1f}",
            converting,
            "used" if cost.form == verdict.form else "" if cost.exact else "estimated",
        )
    out.print(table)
    for warning in verdict.warnings:
        out.print(f"- {warning}", markup=False)


def _show_handoff(report: HandoffReport) -> None:
    out = console()
    title = f"prompt of {report.prompt_tokens:,} tokens, {report.handoff_tokens:,} handed off"
    if report.form is not None:
        title += f" in the {report.form} form"
    table = Table(title=title, title_justify="left")
    table.add_column("step")
    for column in ("began (ms)", "took (ms)", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("")
    for step in report.steps:
        nbytes = "" if step.nbytes is None else f"{step.nbytes:,}"
        table.add_row(
            step.name, f"{step.began_s * 1e3:,.1f}", f"{step.took_s * 1e3:,.1f}", nbytes, step.note
        )
    out.print(table)
    out.print(f"answer: {report.text!r}", markup=False)
    if report.comparison is not None:
        out.print(str(report.comparison), markup=False)


def _summary(verdict: PairVerdict) -> str:
    if verdict.form is not None:
        return f"They can hand over to each other, in the {verdict.form} form."
    if verdict.possible_form is not None:
        return (
            "They cannot hand over to each other as they are. "
            f"After the changes below they can, in the {verdict.possible_form} form."
        )
    return "They cannot hand over to each other: their states mean different things."


def _show(found: PathReport) -> None:
    out = console()
    table = Table(title=f"path to {found.address}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("reachable", "yes" if found.reachable else "no")
    if found.problem:
        table.add_row("problem", Text(found.problem, style="red"))
    for label, value in (
        ("time to open a TCP connection", _ms(found.connect_s)),
        ("round trip of a message, both programs included", _ms(found.round_trip_s)),
        ("path MTU", found.path_mtu_bytes and f"{found.path_mtu_bytes:,} bytes"),
        ("TLS", found.tls or ("none" if found.reachable else None)),
        ("software of the receiver", found.software),
        ("congestion control of this host", ", ".join(found.congestion_controls)),
        (
            "largest TCP buffers of this host",
            found.window_bytes
            and f"{found.send_buffer_bytes or 0:,} bytes to send, "
            f"{found.receive_buffer_bytes or 0:,} to receive",
        ),
        ("cores that this process may use", found.host and f"{found.host.cores:g}"),
    ):
        if value:
            table.add_row(label, value)
    out.print(table)
    if found.rates:
        out.print(_rate_table(found))
    if found.host is not None and found.host.problem:
        out.print(f"This host alone could not be measured: {found.host.problem}", markup=False)
    if found.limit is not None:
        out.print(f"limit: {found.limit.limit}", style="bold")
        out.print(found.limit.reason, markup=False)
    for line in found.advice:
        out.print(f"- {line}", markup=False)


def _rate_table(found: PathReport) -> Table:
    """The path's rates and the host's own, each with the way in which it was measured."""
    table = Table(title="measured rates", title_justify="left", caption_justify="left")
    if found.host is not None:
        table.caption = (
            "This host alone: measured on this host only, over loopback, with both ends on its "
            "cores. Per core: what one core sends / receives."
        )
    table.add_column("")
    for column in ("connections", "Gbit/s", "GB/s", "retransmitted", "GB/s per core"):
        table.add_column(column, justify="right")
    path = f"path, {'with mutual TLS' if found.tls else 'in the clear'}"
    for rate in found.rates:
        resent = rate.retransmitted_segments
        table.add_row(
            path,
            str(rate.connections),
            digits(rate.gbps),
            digits(rate.gbps / 8),
            "unknown" if resent is None else f"{resent:,}",
            "",
        )
    if found.host is not None:
        table.add_section()
        for way, own in (("in the clear", found.host.clear), ("with mutual TLS", found.host.tls)):
            if own is not None:
                table.add_row(
                    f"this host alone, {way}",
                    str(own.connections),
                    digits(own.gbps),
                    digits(own.gbps / 8),
                    "",
                    f"{_gbytes(own.sender_gbps_per_core)} / {_gbytes(own.receiver_gbps_per_core)}",
                )
    return table


def _gbytes(gbps: float | None) -> str:
    return "unknown" if gbps is None else digits(gbps / 8)


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.2f} ms"
