"""interim"""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.gateway.placement import PlacementRequest
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Route
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId


class FairAccess:
    def follow(self, plans: Mapping[ClusterId, Plan]) -> None: ...
    def find_hold(self, placement: PlacementRequest, found: Route, now_s: float) -> Hold | None:
        return None

    def record(self, placement: PlacementRequest, found: Route, now_s: float) -> None: ...
