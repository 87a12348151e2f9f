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
    # What the link delivered while bytes stood waiting; None: there is no reason to doubt the
    # configured bandwidth.
    bps: float | None = None
    bps_at_s: float | None = None  # when that was last seen


@dataclass(frozen=True, slots=True)
class ShortTermState:
    """`SchedulerSection` names the policy and holds its constants."""

    rules: SchedulerSection
    links: Mapping[LinkId, LinkState] = field(default_factory=dict)
    threshold_factor: float = 1.0  # the plan's threshold times this counts
    changed_s: float = float("-inf")  # when the factor last changed
    cause: str = ""  # why it changed then
