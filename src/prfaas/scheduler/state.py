"""The short-term loop's memory: verdicts on links, a raised threshold. `adjust` makes the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas.config.deployment import SchedulerSection
from prfaas.scheduler.congestion import LinkHealth
from prfaas.scheduler.view import LinkId


@dataclass(frozen=True, slots=True)
class LinkState:
    health: LinkHealth = LinkHealth()
    bps: float | None = None  # what it carried while work was waiting; None: no reason for doubt


@dataclass(frozen=True, slots=True)
class State:
    """`SchedulerSection` names the policy and holds its constants."""

    rules: SchedulerSection
    links: Mapping[LinkId, LinkState] = field(default_factory=dict)
    threshold_factor: float = 1.0  # the plan's threshold times this counts
    changed_s: float = float("-inf")  # when the factor last changed
