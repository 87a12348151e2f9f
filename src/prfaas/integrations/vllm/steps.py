"""What the scheduler's side tells the workers with each step of the engine. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from prfaas.integrations.vllm.layout import Move
from prfaas.kvd.engine_socket.messages import LeaseTicket


@dataclass(frozen=True, slots=True)
class Save:
    request_id: str
    ticket: LeaseTicket | None  # with the first save of a request
    moves: tuple[Move, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Load:
    request_id: str
    ticket: LeaseTicket
    moves: tuple[Move, ...]


@dataclass(slots=True)
class Steps(KVConnectorMetadata):
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # requests whose transfer is lost
    ended: list[str] = field(default_factory=list)  # requests that save nothing more
