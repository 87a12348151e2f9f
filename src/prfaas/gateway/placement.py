"""A request for a prefill and a decode node, from its arrival at the router until it is placed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from prfaas.cache.hashing import PromptHashes
from prfaas.gateway.fleet.booking import Booking
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
    tenant: str = ""
    waits_for: ClusterId | None = None  # the cluster in whose queue the request is or was last
