"""The orders of the scheduler's side to the workers for each step of the engine. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from prfaas.integrations.vllm.caches.groups import Move
from prfaas.kvd.engine_socket.messages import LeaseTicket
from prfaas.types import Form


@dataclass(frozen=True, slots=True)
class SaveOrder:
    request_id: str
    ticket: LeaseTicket | None  # with the first save of a request
    moves: tuple[Move, ...]
    last: bool
    form: Form


@dataclass(frozen=True, slots=True)
class LoadOrder:
    request_id: str
    ticket: LeaseTicket
    moves: tuple[Move, ...]
    form: Form


@dataclass(frozen=True, slots=True)
class BoundaryOrder:
    """The request is at a boundary when the step ends: copy the blocks of these states and windows
    to its slot."""

    slot: int
    moves: tuple[Move, ...]
    form: Form


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """The request has ended: write its answer to the lease. vLLM holds the blocks of `moves` until
    every worker has confirmed the end. The blocks of `copied` are in the slot."""

    request_id: str
    ticket: LeaseTicket
    moves: tuple[Move, ...]
    slot: int | None
    copied: tuple[Move, ...]
    form: Form


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):
    saves: list[SaveOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # requests whose transfer is lost
    ended: list[str] = field(default_factory=list)  # requests that save nothing more
    boundaries: list[BoundaryOrder] = field(default_factory=list)
    keeps: list[KeepOrder] = field(default_factory=list)
    computes: bool = True  # False: the step has no token of any request

    def in_form(self, form: Form) -> StepOrders:
        """The copies to make in this form."""
        return StepOrders(
            saves=[order for order in self.saves if order.form == form],
            loads=[order for order in self.loads if order.form == form],
            boundaries=[order for order in self.boundaries if order.form == form],
            keeps=[order for order in self.keeps if order.form == form],
        )
