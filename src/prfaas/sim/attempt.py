"""One attempt to serve a request: its route, its progress and what it holds. Plain data."""

from __future__ import annotations

from prfaas.cache.lease import Lease
from prfaas.scheduler.board import Dispatch
from prfaas.scheduler.request import Route
from prfaas.sim.network.links import LinkTransfer


class Attempt:
    """A lost node ends the attempt (`is_over`), and the request starts a new one. Events that are
    still scheduled for the old attempt find it over and do nothing."""

    __slots__ = (
        "copies_left",
        "dispatch",
        "hit_tokens",
        "index",
        "is_over",
        "kv_bytes",
        "landed",
        "prefill_lease",
        "prefilled_s",
        "route",
        "service_s",
        "started_s",
        "stated_s",
        "transfer",
        "transfer_tokens",
    )

    def __init__(self, index: int, route: Route, dispatch: Dispatch) -> None:
        self.index = index  # of the arrival
        self.route = route
        self.dispatch = dispatch  # as the board knows it
        self.kv_bytes = dispatch.kv_bytes  # reserved at the decode node
        self.transfer_tokens = route.transfer_tokens  # an estimate until the grant
        self.copies_left = 0
        self.is_over = False
        self.landed = False
        self.started_s = 0.0
        self.stated_s = 0.0  # duration of the prefill by the profile
        self.service_s = 0.0
        self.prefilled_s = 0.0
        self.hit_tokens = 0
        self.transfer: LinkTransfer | None = None
        self.prefill_lease: Lease | None = None
