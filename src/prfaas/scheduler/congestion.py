"""Is a link clear, building up or congested? One pure step per report, with hysteresis.

The gateway and the simulator both call `judge`. Times are those of the reports. The reason for
every constant is beside it in `CongestionRules`. Four signals, each with two thresholds:

    loss          retransmitted / sent segments           the path drops
    queueing      RTT above the minimum RTT of the path   a queue stands somewhere on the path
    waiting       age of the oldest byte not arrived      more is offered than the link carries
    utilisation   goodput / capacity, while bytes wait    the next transfer finds a full link

Each signal is evidence about the path. A sender or a receiver that lags also makes bytes wait:
reports subtract that lag (`LinkStats.waited_s`). A delay of a few tenths of a second, or a high RTT
in a single report, is not a standing queue.

The worst signal decides. A verdict worsens as soon as a signal reaches `enter` of a threshold. It
improves only after every signal has stayed below `leave` of that threshold for `calm_s`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from prfaas.types import LinkStats


class LinkVerdict(enum.IntEnum):
    """The verdict on a link. A worse verdict is greater."""

    CLEAR = 0
    BUILDING = 1  # a queue builds up; sending less now clears it
    CONGESTED = 2  # new bytes wait or are lost


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """A threshold that is entered at `enter` and left below `leave`: noise between the two has no
    effect."""

    enter: float
    leave: float


@dataclass(frozen=True, slots=True)
class Ladder:
    """The thresholds of one signal."""

    building: Hysteresis
    congested: Hysteresis

    def entered(self, value: float) -> LinkVerdict:
        return self._highest(value, self.congested.enter, self.building.enter)

    def not_left(self, value: float) -> LinkVerdict:
        return self._highest(value, self.congested.leave, self.building.leave)

    @staticmethod
    def _highest(value: float, congested: float, building: float) -> LinkVerdict:
        if value >= congested:
            return LinkVerdict.CONGESTED
        return LinkVerdict.BUILDING if value >= building else LinkVerdict.CLEAR


_NEVER = Hysteresis(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class CongestionRules:
    # Long paths lose up to 0.1% without being full, and BBR keeps its rate: this stays clear. From
    # 0.5% on, a loss-based sender is down to a few Mbit/s at WAN distances.
    loss: Ladder = Ladder(Hysteresis(0.0015, 0.0008), Hysteresis(0.005, 0.0025))
    # Queueing delay as a share of the minimum RTT. A quarter is a queue that is being built; a
    # whole RTT is a full bandwidth-delay product that stands in a buffer.
    queueing: Ladder = Ladder(Hysteresis(0.25, 0.15), Hysteresis(1.0, 0.6))
    # Scheduling noise can double the RTT of a short path. This much is added to the minimum RTT
    # before the share is taken.
    rtt_noise_s: float = 0.02
    # The queueing delay is the minimum over this time: one late acknowledgement is not a standing
    # queue.
    standing_s: float = 0.9
    # BBR pauses for 0.2 s every 10 s to measure the empty path, and a process on the path may stop
    # for a few tenths of a second: a shorter wait is not evidence. A wait of two seconds is visible
    # in a request's time to first token.
    waiting_s: Ladder = Ladder(Hysteresis(0.75, 0.4), Hysteresis(2.0, 1.2))
    # A full link is not congested yet, so this signal never gives that verdict. Above 85% the wait
    # for a shared link grows steeply (with random arrivals, as 1 / (1 - utilisation)).
    utilisation: Ladder = Ladder(Hysteresis(0.85, 0.75), _NEVER)
    # Averaging time of loss and utilisation: one unusual report changes no verdict, a real change
    # shows after two reports.
    smoothing_s: float = 0.5
    # A loss recovery takes a few round trips, and BBR probes for bandwidth every 8 round trips. The
    # calm time must be longer than both at WAN distances.
    calm_s: float = 2.0
    # The loss is a share of at least this many segments: one lost packet on a nearly idle link is
    # not a trend.
    least_segments: float = 500.0
    segment_bytes: float = 1448.0  # MTU 1500 less headers and time stamps
    # The minimum RTT drifts towards the present RTT with this time constant, so that a longer route
    # becomes the new minimum in time, and a busy quarter of an hour does not.
    min_rtt_memory_s: float = 3600.0
    # After a gap of this length between reports, the calm time starts again.
    silence_s: float = 5.0
    # Reports may arrive out of order. A time that is further back comes from a restarted sender.
    reordering_s: float = 10.0


DEFAULT_RULES = CongestionRules()


@dataclass(frozen=True, slots=True)
class LinkHealth:
    """The state of a link between reports. A new link is clear."""

    verdict: LinkVerdict = LinkVerdict.CLEAR
    cause: str = ""  # the signal that holds the verdict; empty when clear
    changed_at_s: float | None = None
    at_s: float | None = None
    min_rtt_s: float | None = None
    rtts: tuple[tuple[float, float], ...] = ()  # time and RTT of the reports within `standing_s`
    loss: float | None = None  # smoothed, as is `utilisation`
    utilisation: float | None = None
    # Since when no signal has held this verdict. None while a signal holds it, and before the first
    # report.
    below_building_since_s: float | None = None
    below_congested_since_s: float | None = None

    @property
    def described(self) -> str:
        """The verdict and the signal that holds it, for people."""
        verdict = self.verdict.name.lower()
        return f"{verdict} ({self.cause})" if self.cause else verdict


def judge(
    state: LinkHealth,
    stats: LinkStats,
    capacity_bps: float | None,
    rules: CongestionRules = DEFAULT_RULES,
) -> LinkHealth:
    """The state after one more report. A signal that the report lacks is ignored. A report that is
    not newer than the last one changes nothing. A report of a restarted sender resets the state."""
    if state.at_s is not None and stats.at_s <= state.at_s:
        if stats.at_s > state.at_s - rules.reordering_s:
            return state
        state = LinkHealth()
    health = _observe(state, stats, capacity_bps, rules)
    signals = _signals(health, stats, rules)
    return _decide(health, signals, stats.at_s, rules, state.at_s)


def _observe(
    state: LinkHealth, stats: LinkStats, capacity_bps: float | None, rules: CongestionRules
) -> LinkHealth:
    elapsed_s = None if state.at_s is None else stats.at_s - state.at_s

    def smooth(old: float | None, new: float | None, over_s: float) -> float | None:
        if old is None or new is None or elapsed_s is None:
            return new  # the first value is not smoothed
        return old + (new - old) * -math.expm1(-elapsed_s / over_s)

    loss = _loss(stats, elapsed_s, rules)
    if loss is not None:
        loss = smooth(state.loss or 0.0, loss, rules.smoothing_s)
    utilisation = _utilisation(stats, capacity_bps)
    return replace(
        state,
        at_s=stats.at_s,
        min_rtt_s=_min_rtt(state.min_rtt_s, stats.rtt_s, elapsed_s or 0.0, rules),
        rtts=_recent_rtts(state.rtts, stats, rules),
        loss=loss,
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


def _recent_rtts(
    known: tuple[tuple[float, float], ...], stats: LinkStats, rules: CongestionRules
) -> tuple[tuple[float, float], ...]:
    # An idle connection reports the RTT of its last packets, however old they are.
    if stats.rtt_s is None or (stats.backlog_bytes == 0 and stats.in_flight_bytes == 0):
        return ()
    # The newest entry older than the window stays: it shows that the entries cover the window.
    newer = [entry for entry in known if entry[0] > stats.at_s - rules.standing_s]
    older = [entry for entry in known if entry[0] <= stats.at_s - rules.standing_s]
    return (*older[-1:], *newer, (stats.at_s, stats.rtt_s))


def _utilisation(stats: LinkStats, capacity_bps: float | None) -> float | None:
    return stats.goodput_bps / capacity_bps if capacity_bps else None


def _signals(
    health: LinkHealth, stats: LinkStats, rules: CongestionRules
) -> list[tuple[str, float, Ladder]]:
    signals = []
    if health.loss is not None:
        signals.append(("loss", health.loss, rules.loss))
    if health.rtts and health.min_rtt_s is not None:
        before, *within = health.rtts
        stands = stats.at_s - before[0] >= rules.standing_s
        standing_s = min(rtt_s for _, rtt_s in within) if stands else health.min_rtt_s
        queueing = (standing_s - health.min_rtt_s) / (health.min_rtt_s + rules.rtt_noise_s)
        signals.append(("queueing", queueing, rules.queueing))
    signals.append(("waiting", stats.waited_s, rules.waiting_s))
    if health.utilisation is not None and stats.waited_s > 0:
        signals.append(("utilisation", health.utilisation, rules.utilisation))
    return signals


def _decide(
    health: LinkHealth,
    signals: list[tuple[str, float, Ladder]],
    now_s: float,
    rules: CongestionRules,
    last_report_s: float | None,
) -> LinkHealth:
    entered, entered_by = _worst([(ladder.entered(value), name) for name, value, ladder in signals])
    held, held_by = _worst([(ladder.not_left(value), name) for name, value, ladder in signals])
    silent = last_report_s is not None and now_s - last_report_s > rules.silence_s

    def below(level: LinkVerdict, since_s: float | None) -> float | None:
        if held >= level:
            return None
        return now_s if since_s is None or silent else since_s

    def calm(since_s: float | None) -> bool:
        return since_s is not None and now_s - since_s >= rules.calm_s

    below_building_s = below(LinkVerdict.BUILDING, health.below_building_since_s)
    below_congested_s = below(LinkVerdict.CONGESTED, health.below_congested_since_s)
    if calm(below_building_s):
        best = LinkVerdict.CLEAR
    else:
        best = LinkVerdict.BUILDING if calm(below_congested_s) else LinkVerdict.CONGESTED
    verdict = max(entered, min(health.verdict, best))
    if verdict is LinkVerdict.CLEAR:
        cause = ""
    elif entered is verdict:
        cause = entered_by
    else:
        cause = held_by if held >= verdict else health.cause
    return replace(
        health,
        verdict=verdict,
        cause=cause,
        changed_at_s=health.changed_at_s if verdict is health.verdict else now_s,
        below_building_since_s=below_building_s,
        below_congested_since_s=below_congested_s,
    )


def _worst(found: list[tuple[LinkVerdict, str]]) -> tuple[LinkVerdict, str]:
    return max(found, key=lambda pair: pair[0], default=(LinkVerdict.CLEAR, ""))
