"""One attempt to serve a request: where it is, and what it holds. Plain data."""

from __future__ import annotations

from prfaas.cache.lease import Lease
from prfaas.scheduler.request import Route
from prfaas.sim.links import Flow


class Job:
    """A lost node ends the attempt (`over`), and a new one begins: events that still come for the
    old one find it over."""

    __slots__ = (
        "copies_left",
        "flow",
        "hit_tokens",
        "index",
        "kv_bytes",
        "landed",
        "over",
        "prefill_lease",
        "prefilled_s",
        "route",
        "service_s",
        "started_s",
        "transfer_tokens",
    )

    def __init__(self, index: int, route: Route, kv_bytes: float) -> None:
        self.index = index  # of the arrival
        self.route = route
        self.kv_bytes = kv_bytes  # at the decode node
        self.transfer_tokens = route.transfer_tokens  # until the grant says what is really there
        self.copies_left = 0
        self.over = False
        self.landed = False
        self.started_s = 0.0
        self.service_s = 0.0
        self.prefilled_s = 0.0
        self.hit_tokens = 0
        self.flow: Flow | None = None
        self.prefill_lease: Lease | None = None
