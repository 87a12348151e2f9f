"""Decides which limit binds on a path, and what to change. Pure: it only compares rates.

link         more connections do not help, and this host alone is clearly faster
round trip   each connection carries about one window per round trip, and more connections help
cores        the path is about as fast as this host alone
TLS          the same with TLS, and in the clear this host is clearly faster
unclear      none of these fits the measured rates
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from prfaas.measure.rates import MeasuredRate

Limit = Literal["link", "round trip", "cores", "TLS", "unclear"]
LIMITS: tuple[Limit, ...] = get_args(Limit)

_NEAR = 0.6  # a path with at least this share of the host's own rate is about as fast as the host
_FAR = 0.5  # with less than this share, the host is clearly faster
_CLEARLY_FASTER = 1.5
_HELPS = 1.3  # more connections help when twice as many carry at least this much more
# A connection carries from this to that many windows per round trip. The kernel counts its own
# bookkeeping as part of a buffer, and buffers between the ends add to the window.
_LEAST_WINDOWS, _MOST_WINDOWS = 0.25, 2.0
# A connection finds its rate in about so many round trips: slow start begins with 15 KB and doubles
# them in each one. Then the rate is measured over as many.
WARM_UP_ROUND_TRIPS = 10
_LEAST_ROUND_TRIPS = 3  # in fewer, the rate depends on when the last acknowledgements came
_SHORT_ROUND_TRIP_S = 0.001  # below this a measurement of any length has enough of them
_LOSS_ROUND_TRIP_S = 0.002  # below this a lost segment is repaired at once
_BUFFER_FACTOR = 2  # the kernel reserves about half of a buffer for its own bookkeeping
_MOST_CONNECTIONS = 64
_CARRIES_LESS = 0.8
_FEW_CONNECTIONS = 0.95  # the fewest connections with this share of the best rate are enough


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What was measured. The rates of the host are those without a network, in Gbit/s."""

    rates: tuple[MeasuredRate, ...]  # of the path, with TLS if `with_tls`
    round_trip_s: float
    window_bytes: int | None  # the most that one connection may have in flight
    with_tls: bool
    host_clear_gbps: float | None
    host_tls_gbps: float | None
    bbr: bool  # whether this host's kernel has it

    @property
    def host_gbps(self) -> float | None:
        """This host alone, in the way in which the path was measured."""
        return self.host_tls_gbps if self.with_tls else self.host_clear_gbps

    @property
    def best(self) -> MeasuredRate | None:
        found = [rate for rate in self.rates if rate.gbps > 0]
        return max(found, key=lambda rate: rate.gbps, default=None)

    @property
    def window_gbps(self) -> float | None:
        """What one connection can carry at most: one window per round trip."""
        if not self.window_bytes or self.round_trip_s <= 0:
            return None
        return self.window_bytes * 8 / self.round_trip_s / 1e9

    @property
    def gain(self) -> float | None:
        """The factor by which the rate grew when the number of connections last doubled. None when
        no two of the numbers are far enough apart."""
        most = max(self.rates, key=lambda rate: rate.connections, default=None)
        if most is None:
            return None
        fewer = [rate for rate in self.rates if 2 * rate.connections <= most.connections]
        half = max(fewer, key=lambda rate: rate.connections, default=None)
        if half is None or half.gbps <= 0:
            return None
        doublings = math.log2(most.connections / half.connections)
        return float((most.gbps / half.gbps) ** (1 / doublings))

    @property
    def lost_segments(self) -> int:
        return sum(rate.retransmitted_segments or 0 for rate in self.rates)


@dataclass(frozen=True, slots=True)
class PathLimit:
    limit: Limit
    reason: str  # one sentence with the rates that led to it
    advice: tuple[str, ...]  # one sentence each, the most useful first


def find_limit(facts: PathFacts) -> PathLimit:
    best = facts.best
    if best is None:
        return PathLimit(
            "unclear", "No bytes arrived in the measured time.", ("Measure longer with --seconds.",)
        )
    own, gain = facts.host_gbps, facts.gain
    if _too_short(facts, best):
        return _unclear(
            facts,
            best,
            f"The path carries {rate_text(best.gbps)} or more: the measurement ended after "
            f"{best.seconds:.2f} s, before TCP found the rate of the path, whose round trip is "
            f"{facts.round_trip_s * 1e3:.1f} ms.",
            *_MEASURE_LONGER,
        )
    if own is not None and best.gbps >= _NEAR * own:
        return _host_bound(facts, best, own)
    if gain is None:
        return _unclear(
            facts,
            best,
            f"The path carries {rate_text(best.gbps)}, and it is unknown whether more connections "
            "carry more.",
            "Measure several numbers of connections, for example --connections 1,2,4,8.",
        )
    if gain >= _HELPS:
        return _more_helps(facts, best, gain)
    if own is None:
        return _unclear(
            facts,
            best,
            f"More connections do not carry more than {rate_text(best.gbps)}, and what this host "
            "can do alone is unknown.",
            "Run the check without --path-only, so that it also measures this host alone.",
        )
    if best.gbps < _FAR * own:
        return _link_bound(facts, best, own)
    return _unclear(
        facts,
        best,
        f"The path carries {rate_text(best.gbps)} and this host alone {rate_text(own)}: too close "
        "to tell the link from the cores.",
        "Measure again while neither host has other work.",
    )


_MEASURE_LONGER = (
    "Measure one number of connections at a time, for example --connections 8 --seconds 10, since "
    "all numbers share the bytes that a check may send.",
)


def rate_text(gbps: float) -> str:
    return f"{digits(gbps)} Gbit/s ({digits(gbps / 8)} GB/s)"


def digits(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def enough_connections(rates: tuple[MeasuredRate, ...]) -> MeasuredRate | None:
    """The fewest connections with nearly the best rate."""
    best = max((rate.gbps for rate in rates), default=0.0)
    found = [rate for rate in rates if rate.gbps > 0 and rate.gbps >= _FEW_CONNECTIONS * best]
    return min(found, key=lambda rate: rate.connections, default=None)


def _too_short(facts: PathFacts, best: MeasuredRate) -> bool:
    if facts.round_trip_s < _SHORT_ROUND_TRIP_S:
        return False
    return not best.warmed_up or best.seconds < _LEAST_ROUND_TRIPS * facts.round_trip_s


def _host_bound(facts: PathFacts, best: MeasuredRate, own: float) -> PathLimit:
    clear = facts.host_clear_gbps
    path = f"The path carries {rate_text(best.gbps)} "
    if facts.with_tls and clear is not None and clear >= _CLEARLY_FASTER * max(own, best.gbps):
        return PathLimit(
            "TLS",
            f"{path}with TLS; this host alone reaches {rate_text(own)} with TLS and "
            f"{rate_text(clear)} in the clear.",
            (
                "Give the kvds of both hosts more cores, and a worker process for every two of "
                "them (kvd.workers), since encryption takes most of the time.",
                "Or turn TLS off in the kvds where the network between the hosts is trusted or "
                "encrypts by itself (MACsec, IPsec or WireGuard).",
                *_connections_advice(facts),
            ),
        )
    return PathLimit(
        "cores",
        f"{path}{'with TLS' if facts.with_tls else 'in the clear'}; this host alone, with both "
        f"ends on its cores, reaches {rate_text(own)}.",
        (
            "Use hosts with more or faster cores, or move other work away from them, since the "
            "network is not the limit.",
            *_connections_advice(facts),
            *_tls_outlook(facts, best),
        ),
    )


def _link_bound(facts: PathFacts, best: MeasuredRate, own: float) -> PathLimit:
    return PathLimit(
        "link",
        f"More connections do not carry more than {rate_text(best.gbps)}, and this host alone "
        f"reaches {rate_text(own)}.",
        (
            *_connections_advice(facts),
            "For a higher rate, get a faster link, or look for a limit on the way: the network "
            "card's speed, a tunnel, a firewall, the provider's quota.",
            "Run `prfaas doctor` on the other host, too: a receiver that is slower than this host "
            "looks like a slow link from here.",
            *_loss_advice(facts),
            *_tls_outlook(facts, best),
        ),
    )


def _more_helps(facts: PathFacts, best: MeasuredRate, gain: float) -> PathLimit:
    each = best.gbps / best.connections
    window_gbps = facts.window_gbps
    grows = f"twice the connections carry {gain:.1f} times as much"
    if window_gbps and _LEAST_WINDOWS * window_gbps <= each <= _MOST_WINDOWS * window_gbps:
        assert facts.window_bytes is not None
        return PathLimit(
            "round trip",
            f"Each of {best.connections} connections carries {rate_text(each)}, and one window of "
            f"{_mib(facts.window_bytes)} in a round trip of {facts.round_trip_s * 1e3:.1f} ms is "
            f"{rate_text(window_gbps)}; {grows}.",
            (
                *_more_connections_advice(facts, best),
                *_buffer_advice(facts, best),
                *_loss_advice(facts),
            ),
        )
    if facts.lost_segments and facts.round_trip_s >= _LOSS_ROUND_TRIP_S:
        return PathLimit(
            "round trip",
            f"Each of {best.connections} connections carries {rate_text(each)}, since TCP resent "
            f"{facts.lost_segments} lost segments and recovers more slowly the longer the round "
            f"trip is ({facts.round_trip_s * 1e3:.1f} ms); {grows}.",
            (*_loss_advice(facts), *_more_connections_advice(facts, best)),
        )
    return PathLimit(
        "unclear",
        f"Each of {best.connections} connections carries {rate_text(each)}, and {grows}, but "
        "neither the window nor lost segments explain the rate of one connection.",
        (
            *_more_connections_advice(facts, best),
            "Look for a limit of each connection on the way, such as a cloud provider's limit per "
            "flow.",
        ),
    )


def _unclear(facts: PathFacts, best: MeasuredRate, reason: str, *advice: str) -> PathLimit:
    more = (*_connections_advice(facts), *_loss_advice(facts), *_tls_outlook(facts, best))
    return PathLimit("unclear", reason, (*advice, *more))


def _connections_advice(facts: PathFacts) -> tuple[str, ...]:
    enough = enough_connections(facts.rates)
    if enough is None or len(facts.rates) < 2:
        return ()
    most = max(facts.rates, key=lambda rate: rate.connections)
    if most.gbps < _CARRIES_LESS * enough.gbps:
        return (
            f"Set kvd.connections = {enough.connections}, which carries {rate_text(enough.gbps)}, "
            f"since {most.connections} connections carry less.",
        )
    return (
        f"kvd.connections = {enough.connections} is enough: it carries {rate_text(enough.gbps)}, "
        "and more connections do not carry clearly more.",
    )


def _more_connections_advice(facts: PathFacts, best: MeasuredRate) -> tuple[str, ...]:
    wanted = min(2 * best.connections, _MOST_CONNECTIONS)
    advice = (
        f"Set kvd.connections = {best.connections} or more, which carries {rate_text(best.gbps)}"
    )
    if wanted > best.connections:
        advice += f"; measure further with --connections {best.connections},{wanted}"
    return (f"{advice}.",)


def _buffer_advice(facts: PathFacts, best: MeasuredRate) -> tuple[str, ...]:
    """The goal is the host's own rate, or twice the measured one where that is unknown."""
    goal = facts.host_gbps or 2 * best.gbps
    wanted = goal * 1e9 / 8 * facts.round_trip_s / best.connections * _BUFFER_FACTOR
    if not facts.window_bytes or not facts.window_bytes < wanted < math.inf:
        return ()
    nbytes = math.ceil(wanted / (1 << 20)) << 20
    return (
        f"Or raise the last value of net.ipv4.tcp_wmem and net.ipv4.tcp_rmem to {nbytes} bytes "
        f"on both hosts, with which {best.connections} connections can carry {rate_text(goal)}: "
        "rate x round trip / connections, twice for the kernel's bookkeeping.",
    )


def _loss_advice(facts: PathFacts) -> tuple[str, ...]:
    if not facts.lost_segments or facts.round_trip_s < _LOSS_ROUND_TRIP_S:
        return ()
    load = "" if facts.bbr else "load BBR (modprobe tcp_bbr) and "
    return (
        f"TCP resent {facts.lost_segments} lost segments: {load}set "
        "net.ipv4.tcp_congestion_control = bbr on both hosts, since BBR tolerates loss better.",
    )


def _tls_outlook(facts: PathFacts, best: MeasuredRate) -> tuple[str, ...]:
    """What TLS would change on a path that was measured in the clear."""
    tls = facts.host_tls_gbps
    if facts.with_tls or tls is None:
        return ()
    if tls < best.gbps:
        return (
            f"With mutual TLS, expect less: this host alone reaches {rate_text(tls)} with it, so "
            "TLS would then be the limit.",
        )
    return (
        f"Mutual TLS would not be the limit: this host alone reaches {rate_text(tls)} with it.",
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
