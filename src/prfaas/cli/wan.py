"""`prfaas wan`: a relay that imposes a WAN on a TCP link."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import click
import msgspec

from prfaas.config.address import parse_address
from prfaas.errors import InputError
from prfaas.launch.allocator import steady_heap
from prfaas.wan.path import Conditions, Recurring
from prfaas.wan.relay import Relay, describe

_STDIN = 0


@click.command()
@click.option(
    "--listen", required=True, multiple=True, metavar="HOST:PORT", help="Port 0: any free one."
)
@click.option(
    "--to", "targets", required=True, multiple=True, metavar="HOST:PORT", help="Where that leads."
)
@click.option("--gbps", type=float, help="Each direction, shared by all connections.")
@click.option("--rtt-ms", default=0.0, show_default=True, help="Half of it in each direction.")
@click.option("--jitter-ms", default=0.0, show_default=True, help="Up to so much more.")
@click.option("--stall", metavar="EVERY_S,FOR_S", help="Nothing moves; connections stay.")
@click.option("--outage", metavar="EVERY_S,FOR_S", help="A stall that refuses new connections.")
@click.option("--cut-every", type=float, metavar="S", help="Reset all connections every S seconds.")
@click.option("--control", is_flag=True, help="Obey lines on standard input (see above).")
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
    """Relay TCP connections through a wide-area link made of software. Needs no root.

    \b
      prfaas wan --listen 127.0.0.1:7001 --to 127.0.0.1:7000 --gbps 1 --rtt-ms 60
      prfaas wan --listen 0.0.0.0:7001 --to kv1:7000 --gbps 0.5 --rtt-ms 80 --outage 60,5

    Rate and delay hold in each direction. A sender that is faster than the link has to wait; no
    packet is lost (that needs real packets, hence root: prfaas.testing.lossy_net). Several --listen
    lead to as many --to, in their order, and share the rate.

    With --control, conditions change while it runs, by lines on standard input:

    \b
      gbps 0.5 | rtt-ms 120 | jitter-ms 3   change one value ("gbps none": no limit)
      stall | outage | restore              until told otherwise
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
            f"{len(listen)} addresses lead to {len(targets)}",
            where="--listen, --to",
            fix="give as many of the one as of the other",
        )
    doors = [parse_address(text, "--listen", any_port=True) for text in listen]
    leads_to = [parse_address(text, "--to") for text in targets]
    first, *more = zip(doors, leads_to, strict=True)
    steady_heap()
    relay = Relay(*first, conditions, also=more)
    # From here on Ctrl-C and a service manager's SIGTERM end it alike: cleanly, with the counters.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: relay.stop())
    pairs = zip(relay.addresses, leads_to, strict=True)
    ways = ", ".join(f"{address} to {to}" for address, to in pairs)
    click.echo(f"relaying {ways}: {describe(conditions)}; Ctrl-C ends it")
    if control:
        threading.Thread(target=_obey_input, args=(relay,), daemon=True).start()
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


def _obey_input(relay: Relay) -> None:
    for line in _input_lines():
        try:
            obey(relay, line)
        except InputError as error:
            click.echo(f"error: {error}", err=True)


def _input_lines() -> Iterator[str]:
    # Straight from the descriptor: a thread that waits inside sys.stdin holds its lock, and the
    # interpreter cannot end.
    pending = b""
    while data := os.read(_STDIN, 4096):
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        if len(pending) > 4096:
            pending = b""  # no order is that long


def obey(relay: Relay, line: str) -> None:
    """One line of control. Returns when it is in force."""
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
            raise InputError(f"unknown order {line.strip()!r}", fix=f"there are: {known}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{text!r} is no number") from None


def _stats_line(relay: Relay) -> str:
    return msgspec.json.encode(relay.stats).decode()
