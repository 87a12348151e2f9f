"""Which process holds which lease, so that nobody's pages are given away under it. Pure.

A lease has an owner; processes that joined touch its pages too. The owner's word (commit, abort,
release) ends it for all. An owner that dies says nothing: the lease then lasts until the last
process that joined has gone as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

ProcessId: TypeAlias = int  # a connection's number
Kind: TypeAlias = Literal["write", "read"]


class Lost(NamedTuple):
    """What a process that has gone leaves behind."""

    ended: tuple[tuple[int, Kind], ...]  # leases nobody touches any more
    maimed: tuple[int, ...]  # leases being written that lost one of their writers


@dataclass(slots=True)
class _Hold:
    kind: Kind
    owner: ProcessId | None  # None: it has gone
    joined: set[ProcessId] = field(default_factory=set)


class Holds:
    def __init__(self) -> None:
        self._holds: dict[int, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def take(self, lease_id: int, kind: Kind, owner: ProcessId) -> None:
        assert lease_id not in self._holds, lease_id
        self._holds[lease_id] = _Hold(kind, owner)

    def join(self, lease_id: int, process: ProcessId) -> bool:
        """False when the lease has ended, or its owner has."""
        hold = self._holds.get(lease_id)
        if hold is None or hold.owner is None:
            return False
        if process != hold.owner:
            hold.joined.add(process)
        return True

    def touches(self, lease_id: int, process: ProcessId) -> bool:
        hold = self._holds.get(lease_id)
        return hold is not None and (process == hold.owner or process in hold.joined)

    def end(self, lease_id: int, process: ProcessId) -> Kind | None:
        """The owner's word; None when it is not this process's to end (any more)."""
        hold = self._holds.get(lease_id)
        if hold is None or hold.owner != process:
            return None
        del self._holds[lease_id]
        return hold.kind

    def gone(self, process: ProcessId) -> Lost:
        ended: list[tuple[int, Kind]] = []
        maimed: list[int] = []
        for lease_id, hold in list(self._holds.items()):
            if process != hold.owner and process not in hold.joined:
                continue
            hold.joined.discard(process)
            if process == hold.owner:
                hold.owner = None
            if hold.owner is None and not hold.joined:
                del self._holds[lease_id]
                ended.append((lease_id, hold.kind))
            elif hold.kind == "write":
                maimed.append(lease_id)
        return Lost(tuple(ended), tuple(maimed))
