"""The plan of several clusters: a threshold and a split per PD cluster, and a flow per pair.

Plain data, the result of `solve.NetworkPlanner`. Requests whose uncached length is above the
threshold of their home (the PD cluster where they arrive) are offloaded; `Flow.share` says which
part of them each PrfaaS cluster receives, whatever their length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from prfaas.planner.curves import Reading

Stage: TypeAlias = Literal["PD-D decode", "PD-P prefill", "PrfaaS prefill", "PrfaaS egress"]
_STAGE_WORDS: dict[Stage, str] = {
    "PD-D decode": "decode",
    "PD-P prefill": "local prefill",
    "PrfaaS prefill": "prefill",
    "PrfaaS egress": "egress",
}


@dataclass(frozen=True, slots=True)
class HomePlan:
    """A PD cluster in the plan."""

    cluster: str
    share: float  # of the requests of all PD clusters
    rate_rps: float  # arrivals at the planned total rate
    threshold_tokens: int | None  # None: there is no choice, one side prefills everything
    n_prefill: int
    n_decode: int
    offload_fraction: float
    prefill_utilisation: float  # 0 where no request stays local
    decode_utilisation: float


@dataclass(frozen=True, slots=True)
class PrfaasPlan:
    """A PrfaaS cluster in the plan."""

    cluster: str
    instances: int
    rate_rps: float  # prefills for all PD clusters together
    utilisation: float


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests that one PrfaaS cluster prefills for one PD cluster. Every path has a flow, also one
    that no request takes."""

    source: str  # PrfaaS cluster
    target: str  # PD cluster
    rps: float
    share: float  # of the offloaded requests of the PD cluster
    bps: float  # KV on the path
    link_bps: float

    @property
    def utilisation(self) -> float:
        return self.bps / self.link_bps


@dataclass(frozen=True, slots=True)
class Binding:
    """A resource that the plan uses completely. Without more of at least one of these, or other
    shares of traffic, the total rate cannot rise."""

    stage: Stage
    cluster: str  # of an egress: the sender
    target: str | None = None  # of an egress: the receiver

    @property
    def in_words(self) -> str:
        if self.target is not None:
            return f"the link {self.cluster} -> {self.target}"
        return f"{_STAGE_WORDS[self.stage]} at {self.cluster}"


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The largest total rate for the given shares of traffic, and how it is reached."""

    reading: Reading
    rate_rps: float  # of all PD clusters together
    gap: float  # no plan has a rate above rate_rps * (1 + gap)
    homes: tuple[HomePlan, ...]
    prfaas: tuple[PrfaasPlan, ...]
    flows: tuple[Flow, ...]
    binding: tuple[Binding, ...]

    def home(self, cluster: str) -> HomePlan:
        return next(home for home in self.homes if home.cluster == cluster)

    def flows_to(self, cluster: str) -> tuple[Flow, ...]:
        """The flows of one PD cluster, in the order of `Problem.remotes`."""
        return tuple(flow for flow in self.flows if flow.target == cluster)
