"""Has planning records kept by the kvds, and reads what they keep (`kvd/planning_records.py`).

A record counts when a majority of the kvds keeps it: the same rule as for the planning lease. So
one host alone can neither invent a record nor lose one. The reports of the kvds, which every
gateway polls anyway, say which versions they keep; a gateway reads the data of a version that it
does not have from one of them, and the digest in the others' reports vouches for it.

Every gateway has the records that it knows kept by kvds that have an earlier version or none, such
as one that was restarted. Where no majority can be reached, gateways go on with what they know.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas.clock import Clock
from prfaas.contracts.kvd_api import KvdReport, PutRecord, RecordVersion
from prfaas.errors import PeerError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.planning.candidacy import MOST_AHEAD
from prfaas.gateway.planning.electors import Electors

CALL_S = 1.0  # in which a kvd answers
_MOST_CALLS = 32  # at once


class Record(NamedTuple):
    name: str
    epoch: int
    number: int
    data: bytes
    made_s: float

    @property
    def version(self) -> RecordVersion:
        digest = hashlib.sha256(self.data).hexdigest()
        return RecordVersion(self.name, self.epoch, self.number, digest)


def rank(version: RecordVersion | Record) -> tuple[int, int]:
    """The higher one replaces the lower one."""
    return version.epoch, version.number


def majority_version(
    kept: Mapping[str, RecordVersion], is_majority: Callable[[Collection[str]], bool]
) -> RecordVersion | None:
    """The version that a majority keeps. `kept`: by the URLs of kvds, of one record."""
    holders: dict[RecordVersion, list[str]] = {}
    for url, version in kept.items():
        holders.setdefault(version, []).append(url)
    return next((version for version, urls in holders.items() if is_majority(urls)), None)


def next_number(known: int, kept: Iterable[int]) -> int:
    """For a new version. `known`: the number of a version that counts; `kept`: those that kvds say
    they keep, of which one may name any number."""
    return max(known, min(max(kept, default=0), known + MOST_AHEAD)) + 1


@dataclass(slots=True)
class _Seen:
    """A kvd, as of its latest report and its answers since."""

    report: KvdReport
    versions: dict[str, RecordVersion]
    sent: set[RecordVersion] = field(default_factory=set)  # since that report


class RecordKeeping:
    def __init__(
        self,
        electors: Electors,
        names: Sequence[str],
        kvd: Callable[[str], KvdClient],
        clock: Clock,
        *,
        leased: str = "",
    ) -> None:
        """`names`: of all records. `leased`: the one whose epoch is that of a planning lease."""
        self._electors = electors
        self._names = names
        self._kvd = kvd
        self._clock = clock
        self._leased = leased
        self._seen: dict[str, _Seen] = {}  # by URL, of the kvds that answer
        self._urls: Sequence[str] = ()  # of all of them
        self._answered: set[str] = set()  # URLs of kvds that have reported since the start
        self._found: dict[str, Record] = {}  # what a majority keeps, or has kept
        self._wanted: dict[str, Record] = {}  # of this gateway, until a majority keeps them
        self._calls = asyncio.Semaphore(_MOST_CALLS)
        self._stepping = asyncio.Lock()

    def found(self, name: str) -> Record | None:
        """The latest record that a majority has kept."""
        return self._found.get(name)

    def wanted(self, name: str) -> Record | None:
        """A record of this gateway that a majority does not keep yet."""
        return self._wanted.get(name)

    def want(self, record: Record) -> None:
        """Has the record kept from now on."""
        self._wanted[record.name] = record

    def next_number(self, name: str, epoch: int) -> int:
        """For a new version in this epoch."""
        mine = [self._found.get(name), self._wanted.get(name)]
        known = [one.number for one in mine if one is not None and one.epoch == epoch]
        kept = [one.number for one in self._kept(name).values() if one.epoch == epoch]
        return next_number(max(known, default=0), kept)

    def is_kept(self, name: str) -> bool:
        """Whether a majority of the kvds keeps what this gateway follows, as far as it knows."""
        record = self._wanted.get(name) or self._found.get(name)
        return record is None or self._majority(name) == record.version

    def is_contested(self, name: str) -> bool:
        """Whether a kvd keeps another version, which is not lower, than this gateway wants."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return False
        mine = wanted.version
        return any(rank(v) >= rank(mine) and v != mine for v in self._kept(name).values())

    @property
    def is_informed(self) -> bool:
        """Whether this gateway knows what a majority of the kvds keeps."""
        if not self._electors.are_enough(self._answered, self._urls):
            return False
        return all(self._has_read(name) for name in self._names)

    async def step(self) -> None:
        """Reads what is new, and sends what is missing. Comes several times a second."""
        async with self._stepping:
            self._look()
            for name in self._names:
                await self._read(name)
            await self._send_all()

    def _look(self) -> None:
        """Takes what the kvds have reported."""
        now_s = self._clock.now()
        members = self._electors.members()
        self._urls = [member.kvd_url for member in members]
        for member in members:
            self._look_at(member, now_s)
        known = set(self._urls)
        self._answered &= known
        for url in self._seen.keys() - known:
            del self._seen[url]

    def _look_at(self, member: Member, now_s: float) -> None:
        url, report = member.kvd_url, member.report
        if report is None or not member.is_kvd_alive(now_s):
            self._seen.pop(url, None)
            return
        self._answered.add(url)
        if url not in self._seen or self._seen[url].report is not report:
            self._seen[url] = _Seen(report, {one.name: one for one in report.records})

    def _has_read(self, name: str) -> bool:
        valid, found = self._majority(name), self._found.get(name)
        return valid is None or (found is not None and rank(found) >= rank(valid))

    def _kept(self, name: str) -> dict[str, RecordVersion]:
        seen = self._seen.items()
        return {url: kvd.versions[name] for url, kvd in seen if name in kvd.versions}

    def _majority(self, name: str) -> RecordVersion | None:
        return majority_version(
            self._kept(name), lambda urls: self._electors.are_enough(urls, self._urls)
        )

    async def _read(self, name: str) -> None:
        """Takes a version that a majority keeps, and that is not lower than the one before."""
        valid = self._majority(name)
        if valid is None:
            return
        found, wanted = self._found.get(name), self._wanted.get(name)
        if wanted is not None and wanted.version == valid:
            self._found[name] = self._wanted.pop(name)
            return
        if found is not None and (rank(found) > rank(valid) or found.version == valid):
            return
        for url in [url for url, version in self._kept(name).items() if version == valid]:
            record = await self._fetch(url, valid)
            if record is not None:
                self._found[name] = record
                if wanted is not None and rank(wanted) <= rank(record):
                    self._wanted.pop(name, None)  # it has come too late
                return

    async def _fetch(self, url: str, version: RecordVersion) -> Record | None:
        try:
            async with asyncio.timeout(CALL_S):
                got = await self._kvd(url).record(version.name)
        except (PeerError, TimeoutError):
            return None
        made_s = self._clock.now() - got.age_s
        record = Record(version.name, version.epoch, version.number, got.data, made_s)
        return record if record.version == version else None

    async def _send_all(self) -> None:
        """To every kvd the records of which it keeps an earlier version or none."""
        calls = []
        for name in self._names:
            record = self._wanted.get(name) or self._found.get(name)
            if record is None:
                continue
            version = record.version
            for url, kvd in self._seen.items():
                kept = kvd.versions.get(name)
                behind = kept is None or rank(kept) < rank(version)
                if behind and version not in kvd.sent:
                    kvd.sent.add(version)
                    calls.append(self._send(url, kvd, record))
        await asyncio.gather(*calls)

    async def _send(self, url: str, kvd: _Seen, record: Record) -> None:
        name, epoch, number, data, made_s = record
        age_s = max(self._clock.now() - made_s, 0.0)
        # A planner whose lease has passed on is refused, and so is a copy of its plan.
        put = PutRecord(name, epoch, number, data, age_s, epoch if name == self._leased else 0)
        try:
            async with self._calls, asyncio.timeout(CALL_S):
                answer = await self._kvd(url).put_record(put)
        except (PeerError, TimeoutError):
            return  # its next report says whether it keeps the record
        if answer.kept is not None and answer.kept.name == name:
            kvd.versions[name] = answer.kept
