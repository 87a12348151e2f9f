"""Is a link clear, building up or congested? One pure step per report, with hysteresis.

The gateway and the simulator both call `judge`. Time is the report's own; the reasons for every
constant stand beside it in `CongestionRules`. Four signals, each with a ladder of borders:

    loss          retransmitted / sent segments           the path drops
    queueing      RTT above the path's own minimum        a queue stands somewhere on the path
    drain         time to drain the sender's backlog      more is offered than the link carries
    utilisation   goodput / capacity                      the next transfer will meet a full link

The worst signal counts. A verdict worsens as soon as a signal passes a border's `enter`; it
improves only after every signal has stayed below that border's `leave` for `calm_s`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from prfaas.types import LinkStats


class Verdict(enum.IntEnum):
    """Worse is greater."""

    CLEAR = 0
    BUILDING = 1  # send less now, and it stays clear
    CONGESTED = 2  # what is sent now waits or is lost


@dataclass(frozen=True, slots=True)
class Border:
    """Crossed upwards at `enter`, downwards at `leave`: noise between the two changes nothing."""

    enter: float
    leave: float


@dataclass(frozen=True, slots=True)
class Ladder:
    building: Border
    congested: Border

    def entered(self, value: float) -> Verdict:
        return self._highest(value, self.congested.enter, self.building.enter)

    def not_left(self, value: float) -> Verdict:
        return self._highest(value, self.congested.leave, self.building.leave)

    @staticmethod
    def _highest(value: float, congested: float, building: float) -> Verdict:
        if value >= congested:
            return Verdict.CONGESTED
        return Verdict.BUILDING if value >= building else Verdict.CLEAR


_NEVER = Border(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class CongestionRules:
    # Long paths lose up to 0.1% without being full, and BBR carries on: that stays clear. From 0.5%
    # on a loss-based sender is down to a few Mbit/s at WAN distances.
    loss: Ladder = Ladder(Border(0.0015, 0.0008), Border(0.005, 0.0025))
    # Queueing delay as a share of the minimum RTT. A quarter is a queue that is being built; a
    # whole RTT is a full bandwidth-delay product that stands in a buffer.
    queueing: Ladder = Ladder(Border(0.25, 0.15), Border(1.0, 0.6))
    # Short paths double their RTT by scheduling noise alone: this much is added to the minimum
    # before a share of it is taken.
    rtt_noise_s: float = 0.02
    # Half a second is a few chunks of a hand-off that wait; two seconds are felt in a request's
    # time to first token.
    drain_s: Ladder = Ladder(Border(0.5, 0.3), Border(2.0, 1.2))
    # A full link is no congestion yet, so this signal alone never says so. Above 85% the wait for
    # a shared link grows steeply (at random arrivals, as 1 / (1 - utilisation)).
    utilisation: Ladder = Ladder(Border(0.85, 0.75), _NEVER)
    # Loss and utilisation are averaged over so long: one odd report turns nothing, a real change
    # shows after two.
    smoothing_s: float = 0.5
    # The drain over longer: BBR halts for 0.2 s every 10 s to measure the empty path, which makes
    # the goodput of one report look like a stop.
    drain_smoothing_s: float = 1.0
    # A stopped link has an endless drain; capped, so that it is forgotten in a few reports.
    drain_cap_s: float = 4.0
    # A recovery takes a few round trips, and BBR probes for bandwidth every 8: calm must outlast
    # both at WAN distances.
    calm_s: float = 2.0
    # Shares are taken of no fewer segments: one lost packet on a near-idle link is no trend.
    least_segments: float = 500.0
    segment_bytes: float = 1448.0  # MTU 1500 less headers and time stamps
    # The minimum RTT creeps towards the present one, so that a longer route is accepted in time,
    # and a busy quarter of an hour is not.
    min_rtt_memory_s: float = 3600.0
    # Nothing was heard for so long: what was calm before counts for nothing.
    silence_s: float = 5.0
    # Reports may overtake each other; a clock that is further back belongs to a new sender.
    reordering_s: float = 10.0


DEFAULT_RULES = CongestionRules()


@dataclass(frozen=True, slots=True)
class LinkHealth:
    """What is remembered of a link between reports. A new link is clear."""

    verdict: Verdict = Verdict.CLEAR
    cause: str = ""  # the signal that holds the verdict; empty when clear
    changed_at_s: float | None = None
    at_s: float | None = None
    min_rtt_s: float | None = None
    loss: float | None = None  # smoothed, as the next two
    drain_s: float | None = None
    utilisation: float | None = None
    # Since when no signal has held this verdict; None while one does, and before the first report.
    below_building_since_s: float | None = None
    below_congested_since_s: float | None = None


def judge(
    state: LinkHealth,
    stats: LinkStats,
    capacity_bps: float | None,
    rules: CongestionRules = DEFAULT_RULES,
) -> LinkHealth:
    """The state after one more report. What a report does not know plays no part. A report that is
    no newer than the last one changes nothing; one from a restarted sender starts anew."""
    if state.at_s is not None and stats.at_s <= state.at_s:
        if stats.at_s > state.at_s - rules.reordering_s:
            return state
        state = LinkHealth()
    seen = _observe(state, stats, capacity_bps, rules)
    signals = _signals(seen, stats, rules)
    return _conclude(seen, signals, stats.at_s, rules, state.at_s)


def _observe(
    state: LinkHealth, stats: LinkStats, capacity_bps: float | None, rules: CongestionRules
) -> LinkHealth:
    elapsed_s = None if state.at_s is None else stats.at_s - state.at_s

    def smooth(old: float | None, new: float | None, over_s: float) -> float | None:
        if old is None or new is None or elapsed_s is None:
            return new  # the first is taken as it is
        return old + (new - old) * -math.expm1(-elapsed_s / over_s)

    loss = _loss(stats, elapsed_s, rules)
    if loss is not None:
        loss = smooth(state.loss or 0.0, loss, rules.smoothing_s)
    drain_s = smooth(state.drain_s, _drain(stats, rules), rules.drain_smoothing_s)
    utilisation = _utilisation(stats, capacity_bps)
    return replace(
        state,
        at_s=stats.at_s,
        min_rtt_s=_min_rtt(state.min_rtt_s, stats.rtt_s, elapsed_s or 0.0, rules),
        loss=loss,
        drain_s=drain_s,
        utilisation=smooth(state.utilisation, utilisation, rules.smoothing_s),
    )


def _loss(stats: LinkStats, elapsed_s: float | None, rules: CongestionRules) -> float | None:
    lost = stats.retransmitted_segments
    if lost is None or elapsed_s is None:
        return None
    arrived = stats.goodput_bps * elapsed_s / 8 / rules.segment_bytes
    return lost / (lost + max(arrived, rules.least_segments))


def _min_rtt(
    old_s: float | None, rtt_s: float | None, elapsed_s: float, rules: CongestionRules
) -> float | None:
    if rtt_s is None or old_s is None or rtt_s <= old_s:
        return old_s if rtt_s is None else rtt_s
    return old_s + (rtt_s - old_s) * -math.expm1(-elapsed_s / rules.min_rtt_memory_s)


def _drain(stats: LinkStats, rules: CongestionRules) -> float:
    # None: there is a backlog, and nothing of it was acknowledged since the last report.
    drain_s = rules.drain_cap_s if stats.drain_s is None else stats.drain_s
    if stats.delivery_bps:
        # Of several senders that share a link the slowest has its own drain; together they are
        # done when all bytes have passed.
        drain_s = min(drain_s, stats.backlog_bytes * 8 / stats.delivery_bps)
    # Even an empty path takes a round trip to acknowledge what was just sent.
    return min(max(0.0, drain_s - (stats.rtt_s or 0.0)), rules.drain_cap_s)


def _utilisation(stats: LinkStats, capacity_bps: float | None) -> float | None:
    return stats.goodput_bps / capacity_bps if capacity_bps else None


def _signals(
    seen: LinkHealth, stats: LinkStats, rules: CongestionRules
) -> list[tuple[str, float, Ladder]]:
    signals = []
    if seen.loss is not None:
        signals.append(("loss", seen.loss, rules.loss))
    # An idle connection keeps the RTT of its last packets, however long ago that was.
    idle = stats.backlog_bytes == 0 and stats.in_flight_bytes == 0
    if stats.rtt_s is not None and seen.min_rtt_s is not None and not idle:
        queueing = (stats.rtt_s - seen.min_rtt_s) / (seen.min_rtt_s + rules.rtt_noise_s)
        signals.append(("queueing", queueing, rules.queueing))
    if seen.drain_s is not None:
        signals.append(("drain", seen.drain_s, rules.drain_s))
    if seen.utilisation is not None:
        signals.append(("utilisation", seen.utilisation, rules.utilisation))
    return signals


def _conclude(
    seen: LinkHealth,
    signals: list[tuple[str, float, Ladder]],
    now_s: float,
    rules: CongestionRules,
    heard_at_s: float | None,
) -> LinkHealth:
    entered, entered_by = _worst([(ladder.entered(value), name) for name, value, ladder in signals])
    held, held_by = _worst([(ladder.not_left(value), name) for name, value, ladder in signals])
    silent = heard_at_s is not None and now_s - heard_at_s > rules.silence_s

    def below(level: Verdict, since_s: float | None) -> float | None:
        if held >= level:
            return None
        return now_s if since_s is None or silent else since_s

    def calm(since_s: float | None) -> bool:
        return since_s is not None and now_s - since_s >= rules.calm_s

    below_building_s = below(Verdict.BUILDING, seen.below_building_since_s)
    below_congested_s = below(Verdict.CONGESTED, seen.below_congested_since_s)
    if calm(below_building_s):
        best = Verdict.CLEAR
    else:
        best = Verdict.BUILDING if calm(below_congested_s) else Verdict.CONGESTED
    verdict = max(entered, min(seen.verdict, best))
    if verdict is Verdict.CLEAR:
        cause = ""
    elif entered is verdict:
        cause = entered_by
    else:
        cause = held_by if held >= verdict else seen.cause
    return replace(
        seen,
        verdict=verdict,
        cause=cause,
        changed_at_s=seen.changed_at_s if verdict is seen.verdict else now_s,
        below_building_since_s=below_building_s,
        below_congested_since_s=below_congested_s,
    )


def _worst(found: list[tuple[Verdict, str]]) -> tuple[Verdict, str]:
    return max(found, key=lambda pair: pair[0], default=(Verdict.CLEAR, ""))
