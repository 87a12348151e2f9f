"""Planning records at kvds in memory, and gateways that have them kept there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import msgspec

from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kvd_api import PlanningRecord, PutRecord, RecordPut, RecordVersion
from prfaas.errors import PeerHttpError, Unreachable
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.planning.candidacy import has_majority
from prfaas.gateway.planning.electors import Electors
from prfaas.gateway.planning.kept_plans import PLAN, KeptPlans
from prfaas.gateway.planning.record_keeping import RecordKeeping
from prfaas.kvd.planning_records import PlanningRecords
from prfaas.planner.network.problem import NetworkProblem
from prfaas.types import ClusterId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.reports import report


async def nothing_kept(
    deployment: Deployment, network: NetworkProblem, fleet: Fleet, clock: Clock
) -> KeptPlans:
    """The kvds of this fleet keep no records yet, and that is known."""

    def call(url: str) -> KvdClient:
        raise AssertionError("a kvd that keeps no records is not asked")

    records = RecordKeeping(Electors(deployment, fleet.members), (PLAN,), call, clock)
    await records.step()
    return KeptPlans(records, deployment, network, clock)


class MemoryKvd:
    """As a gateway sees it, with what it keeps."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.url = url
        self.kept = PlanningRecords()
        self.promised_epoch = 0
        self.down = False
        # What it says instead of the truth, when asked which versions it keeps.
        self.lie: Callable[[], tuple[RecordVersion, ...]] | None = None
        self._clock = clock

    @property
    def versions(self) -> tuple[RecordVersion, ...]:
        return tuple(self.kept) if self.lie is None else self.lie()

    async def put_record(self, put: PutRecord) -> RecordPut:
        self._answer()
        accepted = self.kept.put(put, self.promised_epoch, self._clock.now())
        if self.lie is not None:
            said = [one for one in self.versions if one.name == put.name]
            return RecordPut(True, said[0] if said else None)
        return RecordPut(accepted, self.kept.version(put.name))

    async def record(self, name: str) -> PlanningRecord:
        self._answer()
        found = self.kept.record(name, self._clock.now())
        if found is None:
            raise PeerHttpError(404, "unknown", name)
        return found

    def restart(self) -> None:
        self.kept = PlanningRecords()

    def _answer(self) -> None:
        if self.down:
            raise Unreachable(self.url)


class Site:
    """Kvds, and gateways that poll them when a test says so."""

    def __init__(self, kvds: int) -> None:
        self.clock = FakeClock()
        self.kvds = {f"http://{n}": MemoryKvd(f"http://{n}", self.clock) for n in range(kvds)}

    def gateway(self, names: Sequence[str], *, leased: str = "") -> Gateway:
        return Gateway(self, names, leased)


class Gateway:
    def __init__(self, site: Site, names: Sequence[str], leased: str) -> None:
        self._site = site
        self.cut: set[str] = set()  # URLs that it does not reach
        self._members = {
            url: Member(url, ClusterId("pd"), True, DEFAULTS.timeouts, "http://engine")
            for url in site.kvds
        }
        self.records = RecordKeeping(
            cast(Electors, _Electors(list(self._members.values()))),
            names,
            self._call,
            site.clock,
            leased=leased,
        )

    def poll(self) -> None:
        """Takes a report of every kvd that it reaches."""
        now_s = self._site.clock.now()
        for url, kvd in self._site.kvds.items():
            member = self._members[url]
            if kvd.down or url in self.cut:
                member.kvd_failed_s = now_s
                continue
            member.report = msgspec.structs.replace(report(url), records=kvd.versions)
            member.kvd.hear(now_s)
            member.kvd_seen_s = now_s
            member.kvd_failed_s = now_s - 1.0

    async def step(self) -> None:
        self.poll()
        await self.records.step()

    def _call(self, url: str) -> KvdClient:
        kvd = self._site.kvds[url]
        return cast(KvdClient, _Cut(url) if url in self.cut else kvd)


class _Cut:
    def __init__(self, url: str) -> None:
        self._url = url

    async def put_record(self, put: PutRecord) -> RecordPut:
        raise Unreachable(self._url)

    async def record(self, name: str) -> PlanningRecord:
        raise Unreachable(self._url)


class _Electors:
    stated = 0

    def __init__(self, members: list[Member]) -> None:
        self._members = members

    def members(self) -> list[Member]:
        return self._members

    def are_enough(self, urls: Collection[str], of: Collection[str]) -> bool:
        return has_majority(urls, of, self.stated)


def kept_at(site: Site, name: str) -> Mapping[str, RecordVersion | None]:
    return {url: kvd.kept.version(name) for url, kvd in site.kvds.items()}
