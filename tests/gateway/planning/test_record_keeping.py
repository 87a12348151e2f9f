"""What a majority of the kvds keeps is what gateways know."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from prfaas.contracts.kvd_api import MOST_EPOCH, PutRecord, RecordVersion
from prfaas.gateway.planning.candidacy import MOST_AHEAD, has_majority
from prfaas.gateway.planning.record_keeping import Record, majority_version, next_number, rank
from prfaas.kvd.planning_records import version_of
from tests.gateway.planning.kept import Gateway, Site, kept_at

NAME = "plan"
FAR = RecordVersion(NAME, MOST_EPOCH, MOST_EPOCH, "0" * 64)


def record(epoch: int, number: int, data: bytes = b"x", made_s: float = 0.0) -> Record:
    return Record(NAME, epoch, number, data, made_s)


async def test_a_record_is_kept_and_found_after_a_restart() -> None:
    site = Site(3)
    one = site.gateway([NAME])
    assert not one.records.is_informed
    await one.step()
    assert one.records.is_informed and one.records.found(NAME) is None
    one.records.want(record(0, 1, b"first", site.clock.now()))
    assert not one.records.is_kept(NAME)
    await one.step()
    assert one.records.is_kept(NAME)
    site.clock.advance(5.0)
    started = site.gateway([NAME])
    started.poll()
    assert not started.records.is_informed, "it has not read what they keep"
    await started.step()
    assert started.records.is_informed
    assert started.records.found(NAME) == record(0, 1, b"first", site.clock.now() - 5.0)


async def test_one_kvd_alone_neither_invents_nor_loses_a_record() -> None:
    site = Site(3)
    first = site.kvds["http://0"]
    first.kept.put(PutRecord(NAME, 9, 9, b"invented"), 0, 0.0)
    one = site.gateway([NAME])
    await one.step()
    assert one.records.found(NAME) is None and one.records.is_informed
    one.records.want(record(1, 1, b"true"))
    await one.step()
    await one.step()
    assert one.records.is_kept(NAME)
    first.restart()
    started = site.gateway([NAME])
    await started.step()
    found = started.records.found(NAME)
    assert found is not None and found.data == b"true"
    assert first.kept.version(NAME) is not None, "it is kept again where it was lost"


async def test_what_a_gateway_knows_outlives_the_kvds() -> None:
    site = Site(3)
    one = site.gateway([NAME])
    await one.step()
    one.records.want(record(1, 1))
    await one.step()
    await one.step()
    for kvd in site.kvds.values():
        kvd.down = True
        kvd.restart()
    await one.step()
    assert one.records.found(NAME) is not None and not one.records.is_kept(NAME)
    for kvd in site.kvds.values():
        kvd.down = False
    await one.step()
    assert one.records.is_kept(NAME)


async def test_a_planner_that_comes_too_late_is_refused_and_learns_the_later_plan() -> None:
    site = Site(3)
    stale, newer = site.gateway([NAME], leased=NAME), site.gateway([NAME], leased=NAME)
    await stale.step()
    await newer.step()
    for kvd in site.kvds.values():
        kvd.promised_epoch = 2
    newer.records.want(record(2, 1, b"newer"))
    await newer.step()
    stale.records.want(record(1, 7, b"stale"))
    await stale.records.step()
    assert {v.epoch for v in kept_at(site, NAME).values() if v is not None} == {2}
    await stale.step()
    found = stale.records.found(NAME)
    assert found is not None and found.data == b"newer" and stale.records.wanted(NAME) is None


async def test_a_stale_plan_is_refused_also_where_the_newer_one_has_not_come() -> None:
    site = Site(3)
    stale = site.gateway([NAME], leased=NAME)
    await stale.step()
    for kvd in site.kvds.values():
        kvd.promised_epoch = 2
    stale.records.want(record(1, 7, b"stale"))
    await stale.step()
    assert set(kept_at(site, NAME).values()) == {None}


async def test_data_that_the_digest_does_not_vouch_for_are_not_taken() -> None:
    site = Site(3)
    for url, kvd in site.kvds.items():
        kvd.kept.put(PutRecord(NAME, 1, 1, b"true" if url != "http://0" else b"lie"), 0, 0.0)
    said = site.kvds["http://1"].versions
    site.kvds["http://0"].lie = lambda: said
    one = site.gateway([NAME])
    await one.step()
    found = one.records.found(NAME)
    assert found is not None and found.data == b"true"


def test_a_number_follows_what_is_kept_and_no_far_number() -> None:
    assert next_number(0, []) == 1
    assert next_number(4, [2, 5]) == 6
    assert next_number(4, [2]) == 5
    assert next_number(4, [MOST_EPOCH]) == 5 + MOST_AHEAD


VERSIONS = st.builds(
    RecordVersion, st.just(NAME), st.integers(0, 2), st.integers(0, 2), st.sampled_from("ab")
)


@given(st.lists(st.none() | VERSIONS, min_size=1, max_size=6))
def test_at_most_one_version_has_a_majority(kept: list[RecordVersion | None]) -> None:
    urls = [f"http://{number}" for number in range(len(kept))]
    versions = {url: one for url, one in zip(urls, kept, strict=True) if one is not None}
    found = majority_version(versions, lambda some: has_majority(some, urls))
    for version in set(versions.values()):
        holders = [url for url, one in versions.items() if one == version]
        assert has_majority(holders, urls) == (version == found)


class Keeping(RuleBasedStateMachine):
    """Gateways that write, kvds that restart, networks that are cut, and one kvd that lies."""

    KVDS = 5

    def __init__(self) -> None:
        super().__init__()
        self.site = Site(self.KVDS)
        self.gateways: list[Gateway] = []
        self.written: set[RecordVersion] = set()
        self.highest: dict[int, tuple[int, int]] = {}  # by gateway
        self.number = 0
        for _ in range(2):
            self.gateways.append(self.site.gateway([NAME]))
        self.site.kvds["http://4"].lie = lambda: (FAR,)

    @rule(gateway=st.integers(0, 1), data=st.binary(max_size=2))
    def write(self, gateway: int, data: bytes) -> None:
        records = self.gateways[gateway].records
        made = record(0, records.next_number(NAME, 0), data, self.site.clock.now())
        self.written.add(made.version)
        records.want(made)

    @rule(gateway=st.integers(0, 1))
    def step(self, gateway: int) -> None:
        self.site.clock.advance(0.5)
        asyncio.run(self.gateways[gateway].step())

    @rule(gateway=st.integers(0, 1), kvd=st.integers(0, KVDS - 1))
    def cut(self, gateway: int, kvd: int) -> None:
        self.gateways[gateway].cut.symmetric_difference_update({f"http://{kvd}"})

    @rule(kvd=st.integers(0, KVDS - 1))
    def restart_kvd(self, kvd: int) -> None:
        self.site.kvds[f"http://{kvd}"].restart()

    @rule(gateway=st.integers(0, 1))
    def restart_gateway(self, gateway: int) -> None:
        self.gateways[gateway] = self.site.gateway([NAME])
        self.highest.pop(gateway, None)

    @invariant()
    def only_what_a_gateway_wrote_is_found(self) -> None:
        for number, gateway in enumerate(self.gateways):
            found = gateway.records.found(NAME)
            if found is not None:
                assert found.version in self.written
                assert rank(found) >= self.highest.get(number, (0, 0))
                self.highest[number] = rank(found)

    def teardown(self) -> None:
        """Calm, with one that writes: all agree soon, whatever one kvd says."""
        for gateway in self.gateways:
            gateway.cut.clear()
        for _ in range(4):
            for number in range(2):
                self.step(number)
        self.write(0, b"the last")
        for _ in range(3):
            for number in range(2):
                self.step(number)
        for gateway in self.gateways:
            found = gateway.records.found(NAME)
            assert found is not None and found.data == b"the last"
            assert gateway.records.is_kept(NAME)


def test_gateways_agree_on_what_kvds_keep() -> None:
    run_state_machine_as_test(
        Keeping, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


def test_the_version_of_a_record_is_that_of_its_message() -> None:
    put = PutRecord(NAME, 1, 2, b"data")
    assert record(1, 2, b"data").version == version_of(put)
