"""A request for a prefill and a decode node, from its arrival at the router until it is placed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from prfaas.cache.hashing import PromptHashes
from prfaas.gateway.attempt_trace import MOST_WAITS, Wait
from prfaas.gateway.fleet.booking import Booking
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.request import Request
from prfaas.types import ClusterId, NodeId


@dataclass(slots=True, eq=False)
class PlacementRequest:
    """A request for a prefill and a decode node."""

    request: Request
    prompt: PromptHashes
    avoid: Collection[NodeId] = ()  # nodes where the request has failed or was refused
    booking: Booking | None = None
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    streams: bool = True  # whether its answer does
    sequences: int = 1  # choices of its answer, each of which takes a decode slot
    tenant: str = ""
    home: ClusterId = ClusterId("")  # the PD cluster at which the request has arrived
    waits_for: ClusterId | None = None  # the cluster in whose queue the request is or was last
    explains: bool = False  # its route is to be explained, whatever the rate of explanations
    waits: list[Wait] = field(default_factory=list)  # for what it was held, the latest last
    # Recorded when the request is placed: the time that its state takes on the link to the decode
    # node's cluster, at the believed rate and alone. None: its prefill is in the same cluster.
    transfer_s: float | None = None
    # Recorded when the request is placed, where the gateway has a console.
    explanation: Explanation | None = None
    stateless_tokens: int = 0  # see `RequestTrace`; recorded when the request is placed

    def record_wait(self, cluster: ClusterId | None, reason: str, now_s: float) -> None:
        """From now on the request waits for nodes of a cluster, or for any node."""
        self.waits_for = cluster
        if len(self.waits) < MOST_WAITS:  # else it counts as the latest one
            self.waits.append(Wait(now_s, reason, cluster or ""))

    @property
    def queue(self) -> str:
        """The queue in which the request waits for a cluster. Homes and tenants have queues of
        their own, so that none of them waits behind the requests of another."""
        return f"{self.home}{_SEPARATOR}{self.tenant}"


_SEPARATOR = "\x1f"  # in no name


def tenant_of(queue: str) -> str:
    return queue.partition(_SEPARATOR)[2]


def home_of(queue: str) -> ClusterId:
    return ClusterId(queue.partition(_SEPARATOR)[0])
