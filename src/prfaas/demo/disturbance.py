"""How much a busy machine disturbed an emulated deployment, as one number. Pure.

An emulation is correct only while engines end their steps on time, the relay forwards bytes on
time, and the load generator sends requests on time. On a busy machine all of them are late, and so
is every computation of the gateway and the kvds. The number adds their mean delays and divides the
sum by the length of a step:

    disturbance = (late step + late relay + late request + late work) / wanted step

`late step`     mean time by which an emulated prefill chunk or decode step ended after its time
`late relay`    mean time by which the relay forwarded bytes, or woke up, after its time
`late request`  mean time by which the load generator sent a request after its time
`late work`     mean time by which a computation of 20 ms ended after its time (`demo.cpu_probe`)
`wanted step`   mean time that a step takes by the profile

Delays of the gateway and the kvds are not included: they are the product, and a slow product must
not be taken for a busy machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.engine.api import StepTiming
from prfaas.wan.stats import RelayStats

# Above this share a throughput is not compared. On two cores, live ratios were within 3% of the
# simulated ones below this limit, and up to 20% off in both directions above it.
LIMIT = 0.3


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of the engines and the relay at one moment."""

    engines: StepTiming
    relay: RelayStats


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Mean delays during one load."""

    wanted_step_s: float
    late_step_s: float
    late_relay_s: float
    late_request_s: float
    late_work_s: float

    @property
    def share(self) -> float:
        """The disturbance; infinite where no step was emulated."""
        if not self.wanted_step_s:
            return float("inf")
        late_s = self.late_step_s + self.late_relay_s + self.late_request_s + self.late_work_s
        return late_s / self.wanted_step_s

    def describe(self) -> str:
        return (
            f"{self.share:.1%} of a step of {self.wanted_step_s * 1e3:.0f} ms (mean delays: "
            f"steps {self.late_step_s * 1e3:.1f} ms, relay {self.late_relay_s * 1e3:.1f} ms, "
            f"requests {self.late_request_s * 1e3:.1f} ms, work {self.late_work_s * 1e3:.1f} ms)"
        )


def disturbance(
    before: Counters, after: Counters, late_request_s: float, late_work_s: float
) -> Disturbance:
    """The disturbance of the load between two moments."""
    steps = after.engines.steps - before.engines.steps
    events = _relay_events(after.relay) - _relay_events(before.relay)
    late_relay_s = _relay_late_s(after.relay) - _relay_late_s(before.relay)
    return Disturbance(
        wanted_step_s=(after.engines.wanted_s - before.engines.wanted_s) / max(1, steps),
        late_step_s=(after.engines.late_s - before.engines.late_s) / max(1, steps),
        late_relay_s=late_relay_s / max(1, events),
        late_request_s=late_request_s,
        late_work_s=late_work_s,
    )


def _relay_events(stats: RelayStats) -> int:
    return stats.forwards + stats.wakeups


def _relay_late_s(stats: RelayStats) -> float:
    return stats.forward_late_s + stats.wakeup_late_s
