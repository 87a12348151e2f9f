"""`prfaas wan`: a relay that emulates a WAN on a TCP link."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import click
import msgspec

from prfaas.config.address import parse_address
from prfaas.contracts.readiness import RelayedAddress, RelayReady, readiness_line
from prfaas.errors import InputError
from prfaas.service.allocator import limit_heap_growth
from prfaas.wan.path import Conditions, Recurring
from prfaas.wan.relay import Relay, describe

_STDIN = 0


@click.command()
@click.option(
    "--listen",
    required=True,
    multiple=True,
    metavar="HOST:PORT",
    help="Address to accept connections on; port 0 chooses a free one.",
)
@click.option(
    "--to",
    "targets",
    required=True,
    multiple=True,
    metavar="HOST:PORT",
    help="Address to forward the connections of the --listen at the same position to.",
)
@click.option("--gbps", type=float, help="Rate of each direction, shared by all connections.")
@click.option(
    "--rtt-ms", default=0.0, show_default=True, help="Round-trip time; each direction gets half."
)
@click.option("--jitter-ms", default=0.0, show_default=True, help="Largest random extra delay.")
@click.option("--stall", metavar="EVERY_S,FOR_S", help="Hold all data back for FOR_S seconds.")
@click.option(
    "--outage", metavar="EVERY_S,FOR_S", help="Stall, and refuse new connections meanwhile."
)
@click.option("--cut-every", type=float, metavar="S", help="Reset all connections every S seconds.")
@click.option("--control", is_flag=True, help="Read commands from standard input (see above).")
def wan(
    listen: tuple[str, ...],
    targets: tuple[str, ...],
    gbps: float | None,
    rtt_ms: float,
    jitter_ms: float,
    stall: str | None,
    outage: str | None,
    cut_every: float | None,
    control: bool,
) -> None:
    """Relay TCP connections through an emulated wide-area link. The relay needs no root.

    \b
      prfaas wan --listen 127.0.0.1:7001 --to 127.0.0.1:7000 --gbps 1 --rtt-ms 60
      prfaas wan --listen 0.0.0.0:7001 --to kv1:7000 --gbps 0.5 --rtt-ms 80 --outage 60,5

    Rate and delay apply to each direction. A sender that is faster than the link waits. The relay
    loses no packet; packet loss needs root, and a checkout (prfaas_lab.testing.lossy_net). Give one
    --to for each --listen, in the same order; all of them share the rate. The first line on
    standard output is JSON and announces the addresses.

    With --control, lines on standard input change the conditions:

    \b
      gbps 0.5 | rtt-ms 120 | jitter-ms 3   change one value ("gbps none": no limit)
      stall | outage | restore              begin a stall or an outage; end it
      cut                                   reset all connections now
      damage 5                              flip a bit in each of the next 5 large chunks
      stats                                 print counters, as one line of JSON
    """
    conditions = Conditions(
        rate_bps=None if gbps is None else gbps * 1e9,
        rtt_s=rtt_ms / 1e3,
        jitter_s=jitter_ms / 1e3,
        stall=_recurring(stall, "--stall"),
        outage=_recurring(outage, "--outage"),
        cut_every_s=cut_every,
    )
    if len(listen) != len(targets):
        raise InputError(
            f"there are {len(listen)} --listen and {len(targets)} --to",
            where="--listen, --to",
            fix="give one --to for each --listen",
        )
    listening = [parse_address(text, "--listen", any_port=True) for text in listen]
    forwarded_to = [parse_address(text, "--to") for text in targets]
    first, *more = zip(listening, forwarded_to, strict=True)
    limit_heap_growth()
    relay = Relay(*first, conditions, also=more)
    # From here on SIGINT and SIGTERM both end the relay cleanly and print the counters.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: relay.stop())
    addresses = [
        RelayedAddress(str(address), str(to))
        for address, to in zip(relay.addresses, forwarded_to, strict=True)
    ]
    click.echo(readiness_line(RelayReady(addresses, describe(conditions))))
    if control:
        threading.Thread(target=_read_commands, args=(relay,), daemon=True).start()
    try:
        relay.run()
    finally:
        relay.close()
        click.echo(_stats_line(relay))


def _recurring(text: str | None, where: str) -> Recurring | None:
    if text is None:
        return None
    every, comma, duration = text.partition(",")
    try:
        if not comma:
            raise ValueError
        return Recurring(float(every), float(duration))
    except ValueError:
        fix = "give EVERY_S,FOR_S: --stall 10,1 is one second of every ten"
        raise InputError(f"{text!r}", where=where, fix=fix) from None
    except InputError as error:
        raise InputError(error.problem, where=where, fix=error.fix) from None


def _read_commands(relay: Relay) -> None:
    for line in _input_lines():
        try:
            execute(relay, line)
        except InputError as error:
            click.echo(f"error: {error}", err=True)


def _input_lines() -> Iterator[str]:
    # This reads the descriptor, not sys.stdin: a thread that waits inside sys.stdin holds its lock,
    # and then the interpreter cannot exit.
    pending = b""
    while data := os.read(_STDIN, 4096):
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        if len(pending) > 4096:
            pending = b""  # no command is that long


def execute(relay: Relay, line: str) -> None:
    """Executes one line of control. Returns when it is in force."""
    actions: dict[str, Callable[[], None]] = {
        "stall": relay.stall,
        "outage": relay.outage,
        "restore": relay.restore,
        "cut": relay.cut,
        "stats": lambda: click.echo(_stats_line(relay)),
    }
    match line.split():
        case []:
            return
        case [word] if word in actions:
            actions[word]()
        case ["gbps", "none"]:
            relay.change(replace(relay.conditions, rate_bps=None))
        case ["gbps", value]:
            relay.change(replace(relay.conditions, rate_bps=_number(value) * 1e9))
        case ["rtt-ms", value]:
            relay.change(replace(relay.conditions, rtt_s=_number(value) / 1e3))
        case ["jitter-ms", value]:
            relay.change(replace(relay.conditions, jitter_s=_number(value) / 1e3))
        case ["damage", value]:
            relay.damage(int(_number(value)))
        case _:
            known = "gbps X, rtt-ms X, jitter-ms X, stall, outage, restore, cut, damage N, stats"
            raise InputError(f"unknown command {line.strip()!r}", fix=f"commands are: {known}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a number") from None


def _stats_line(relay: Relay) -> str:
    return msgspec.json.encode(relay.stats).decode()
