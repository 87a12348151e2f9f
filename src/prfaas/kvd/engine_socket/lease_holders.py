"""The engine processes that use each lease, so that pages in use are never given away. Pure.

A lease has an owner; processes that joined use its pages too. The owner's commit, abort or release
ends the lease for all of them. When the owner exits without one of these, the lease lasts until the
last process that joined has exited as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

ProcessId: TypeAlias = int  # the number of a connection
LeaseKind: TypeAlias = Literal["write", "read"]


class LeasesAfterExit(NamedTuple):
    """What the exit of a process means for the leases that it used."""

    ended: tuple[tuple[int, LeaseKind], ...]  # no process uses them any more
    incomplete: tuple[int, ...]  # still written to, but one of the writers has exited


@dataclass(slots=True)
class _Holders:
    kind: LeaseKind
    owner: ProcessId | None  # None: the owner has exited
    joined: set[ProcessId] = field(default_factory=set)


class LeaseHolders:
    def __init__(self) -> None:
        self._holders: dict[int, _Holders] = {}  # by lease

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, lease_id: int, kind: LeaseKind, owner: ProcessId) -> None:
        assert lease_id not in self._holders, lease_id
        self._holders[lease_id] = _Holders(kind, owner)

    def join(self, lease_id: int, process: ProcessId) -> bool:
        """False when the lease has ended, or its owner has exited."""
        holders = self._holders.get(lease_id)
        if holders is None or holders.owner is None:
            return False
        if process != holders.owner:
            holders.joined.add(process)
        return True

    def owner(self, lease_id: int) -> ProcessId | None:
        """None when the lease has ended, or its owner has exited."""
        holders = self._holders.get(lease_id)
        return holders.owner if holders is not None else None

    def uses(self, lease_id: int, process: ProcessId) -> bool:
        holders = self._holders.get(lease_id)
        return holders is not None and (process == holders.owner or process in holders.joined)

    def end(self, lease_id: int, process: ProcessId, kind: LeaseKind) -> bool:
        """Ends the lease for all processes. False, and nothing changes, when `process` does not own
        a lease of this kind by that id."""
        holders = self._holders.get(lease_id)
        if holders is None or holders.owner != process or holders.kind != kind:
            return False
        del self._holders[lease_id]
        return True

    def process_exited(self, process: ProcessId) -> LeasesAfterExit:
        ended: list[tuple[int, LeaseKind]] = []
        incomplete: list[int] = []
        for lease_id, holders in list(self._holders.items()):
            if process != holders.owner and process not in holders.joined:
                continue
            holders.joined.discard(process)
            if process == holders.owner:
                holders.owner = None
            if holders.owner is None and not holders.joined:
                del self._holders[lease_id]
                ended.append((lease_id, holders.kind))
            elif holders.kind == "write":
                incomplete.append(lease_id)
        return LeasesAfterExit(tuple(ended), tuple(incomplete))
