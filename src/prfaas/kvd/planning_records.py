"""Planning records: what gateways have kept at the kvds beside the planning lease: the plan, and
the orders to drain clusters.

A record is opaque here. It has a name and a version, and a kvd keeps the highest version of each
name, in memory. Gateways believe what a majority of the kvds keeps, so that neither the end of one
kvd nor its lies count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from prfaas.contracts.kvd_api import (
    MAX_RECORDS,
    MAX_RECORDS_BYTES,
    PlanningRecord,
    PutRecord,
    RecordVersion,
)


@dataclass(frozen=True, slots=True)
class Kept:
    version: RecordVersion
    data: bytes
    made_s: float  # on this kvd's clock


def accept(
    kept: Mapping[str, Kept], put: PutRecord, promised_epoch: int, now_s: float
) -> Kept | None:
    """What is kept under this name from now on; None when the record is refused. `promised_epoch`
    is that of the planning lease: a later planner may have it."""
    current = kept.get(put.name)
    version = version_of(put)
    if current is not None and current.version == version:
        return replace(current, made_s=min(current.made_s, now_s - put.age_s))
    if 0 < put.planning_epoch < promised_epoch:
        return None
    if current is None:
        if len(kept) >= MAX_RECORDS:
            return None
    elif (put.epoch, put.number) <= (current.version.epoch, current.version.number):
        return None
    others = sum(len(one.data) for name, one in kept.items() if name != put.name)
    if others + len(put.data) > MAX_RECORDS_BYTES:
        return None
    return Kept(version, put.data, now_s - put.age_s)


def version_of(put: PutRecord | PlanningRecord) -> RecordVersion:
    digest = hashlib.sha256(put.data).hexdigest()
    return RecordVersion(put.name, put.epoch, put.number, digest)


class PlanningRecords:
    """The records of one kvd."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def put(self, put: PutRecord, promised_epoch: int, now_s: float) -> bool:
        """Whether the record is kept now."""
        found = accept(self._kept, put, promised_epoch, now_s)
        if found is None:
            return False
        self._kept[put.name] = found
        return True

    def version(self, name: str) -> RecordVersion | None:
        found = self._kept.get(name)
        return None if found is None else found.version

    def record(self, name: str, now_s: float) -> PlanningRecord | None:
        found = self._kept.get(name)
        if found is None:
            return None
        version = found.version
        age_s = max(now_s - found.made_s, 0.0)
        return PlanningRecord(name, version.epoch, version.number, found.data, age_s)

    def __iter__(self) -> Iterator[RecordVersion]:
        return (kept.version for kept in self._kept.values())
