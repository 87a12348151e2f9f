"""The state of the short-term loop: verdicts on links, a raised threshold. `adjust` updates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas.config.deployment import SchedulerSection
from prfaas.scheduler.congestion import LinkHealth
from prfaas.scheduler.view import LinkId


@dataclass(frozen=True, slots=True)
class LinkState:
    health: LinkHealth = LinkHealth()
    # Bandwidth that the link delivered while bytes waited. None: there is no evidence against the
    # configured bandwidth.
    bps: float | None = None
    bps_at_s: float | None = None  # time of the report that `bps` comes from


@dataclass(frozen=True, slots=True)
class ShortTermState:
    """`rules` names the policy and holds its constants."""

    rules: SchedulerSection
    links: Mapping[LinkId, LinkState] = field(default_factory=dict)
    threshold_factor: float = 1.0  # the effective threshold is the plan's times this
    changed_s: float = float("-inf")  # when the factor last changed
    cause: str = ""  # why the factor last changed
