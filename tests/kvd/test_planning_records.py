"""Planning records: which are kept, and the path over sockets."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.kvd_api import (
    LONGEST_LEASE_S,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    MAX_RECORDS_BYTES,
    MOST_EPOCH,
    ClaimPlanning,
    PlanningRecord,
    PutRecord,
    RecordPut,
)
from prfaas.errors import PeerHttpError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.http_client.client import open_client
from prfaas.kvd.planning_records import PlanningRecords, version_of
from prfaas.security.shared_key import SharedKey
from prfaas_lab.testing.clock import FakeClock
from tests.kvd.hosts import Host, kvd


@pytest.mark.parametrize(
    ("put", "promised", "accepted"),
    [
        (PutRecord("plan", 5, 2, b"new"), 0, True),
        (PutRecord("plan", 6, 1, b"new"), 0, True),
        (PutRecord("plan", 5, 1, b"new"), 0, False),  # of the same version
        (PutRecord("plan", 4, 9, b"new"), 0, False),
        (PutRecord("plan", 5, 1, b"old"), 0, True),  # kept already
        (PutRecord("plan", 6, 1, b"new", planning_epoch=6), 6, True),
        (PutRecord("plan", 6, 1, b"new", planning_epoch=6), 5, True),  # this kvd was cut off
        (PutRecord("plan", 6, 1, b"new", planning_epoch=6), 7, False),  # another one plans since
        (PutRecord("plan", 6, 1, b"new"), 7, True),  # the only gateway
        (PutRecord("plan", 5, 1, b"old", planning_epoch=5), 7, True),  # kept already
        (PutRecord("drain/west", 0, 1, b"new"), 7, True),
    ],
)
def test_the_higher_version_is_kept(put: PutRecord, promised: int, accepted: bool) -> None:
    records = PlanningRecords()
    assert records.put(PutRecord("plan", 5, 1, b"old"), 0, 0.0)
    before = records.version("plan")
    assert records.put(put, promised, 1.0) is accepted
    if put.name == "plan":
        assert records.version("plan") == (version_of(put) if accepted else before)


def test_a_record_ages_and_a_copy_of_it_does_not_make_it_younger() -> None:
    records = PlanningRecords()
    assert records.put(PutRecord("plan", 1, 1, b"x", age_s=5.0), 0, 10.0)
    assert records.record("plan", 12.0) == PlanningRecord("plan", 1, 1, b"x", 7.0)
    assert records.put(PutRecord("plan", 1, 1, b"x", age_s=0.5), 0, 12.0)
    assert records.record("plan", 13.0) == PlanningRecord("plan", 1, 1, b"x", 8.0)
    assert records.record("other", 13.0) is None


def test_the_number_of_records_and_their_bytes_are_bounded() -> None:
    records = PlanningRecords()
    for number in range(MAX_RECORDS):
        assert records.put(PutRecord(f"{number}", 0, 1, b""), 0, 0.0)
    assert not records.put(PutRecord("one more", 0, 1, b""), 0, 0.0)
    largest = bytes(MAX_RECORD_BYTES)
    fitting = MAX_RECORDS_BYTES // MAX_RECORD_BYTES
    kept = [records.put(PutRecord(f"{n}", 0, 2, largest), 0, 0.0) for n in range(fitting + 1)]
    assert kept == [True] * fitting + [False]
    assert records.put(PutRecord("0", 0, 3, b"x"), 0, 0.0), "it replaces a larger one"
    assert records.put(PutRecord(f"{fitting}", 0, 2, largest[1:]), 0, 0.0)


PUTS = st.lists(
    st.builds(
        PutRecord,
        st.sampled_from(["plan", "drain/west"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from([b"a", b"b"]),
        age_s=st.sampled_from([0.0, 2.0]),
        planning_epoch=st.integers(0, 3),
    ),
    max_size=30,
)


@given(PUTS, st.integers(0, 3))
def test_versions_rise_and_what_is_accepted_is_kept(puts: list[PutRecord], promised: int) -> None:
    records = PlanningRecords()
    highest: dict[str, tuple[int, int]] = {}
    for put in puts:
        accepted = records.put(put, promised, 0.0)
        kept = records.version(put.name)
        if accepted:
            assert kept == version_of(put)
        if kept is not None:
            version = kept.epoch, kept.number
            assert version >= highest.get(put.name, (0, 0))
            highest[put.name] = version
    assert {version.name for version in records} == set(highest)


# Over sockets ------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def host(tmp_path: Path, clock: FakeClock) -> Iterator[Host]:
    with kvd(tmp_path, clock=clock) as host:
        yield host


async def test_a_gateway_keeps_a_record_at_a_kvd(host: Host, clock: FakeClock) -> None:
    async with open_client() as http:
        gateway = KvdClient(http, host.url)
        with pytest.raises(PeerHttpError) as unknown:
            await gateway.record("drain/a b&c")
        assert unknown.value.status == 404
        assert (await gateway.stats()).records == ()
        put = PutRecord("drain/a b&c", 0, 3, b"\x00order", age_s=1.0)
        answer = await gateway.put_record(put)
        assert answer == RecordPut(True, version_of(put))
        clock.advance(2.0)
        kept = await gateway.record("drain/a b&c")
        assert kept == PlanningRecord("drain/a b&c", 0, 3, b"\x00order", 3.0)
        assert (await gateway.stats()).records == (version_of(put),)
        earlier = PutRecord("drain/a b&c", 0, 2, b"another")
        assert await gateway.put_record(earlier) == RecordPut(False, version_of(put))


async def test_a_planner_whose_lease_has_passed_on_is_refused(host: Host, clock: FakeClock) -> None:
    async with open_client() as http:
        gateway = KvdClient(http, host.url)
        clock.advance(LONGEST_LEASE_S)
        assert (await gateway.claim_planning(ClaimPlanning("a", 1, 3.0))).granted
        assert (await gateway.put_record(PutRecord("plan", 1, 1, b"x", planning_epoch=1))).accepted
        clock.advance(LONGEST_LEASE_S)
        assert (await gateway.claim_planning(ClaimPlanning("b", 2, 3.0))).granted
        late = PutRecord("plan", 1, 2, b"y", planning_epoch=1)
        assert not (await gateway.put_record(late)).accepted
        assert (await gateway.put_record(PutRecord("plan", 2, 1, b"z", planning_epoch=2))).accepted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "x" * 301),
        ("name", "two\nlines"),
        ("epoch", -1),
        ("epoch", MOST_EPOCH + 1),
        ("number", MOST_EPOCH + 1),
        ("data", "no base64"),
        ("data", b64encode(bytes(MAX_RECORD_BYTES + 1)).decode()),
        ("age_s", -1.0),
        ("age_s", 1e10),
        ("planning_epoch", -1),
    ],
)
def test_a_field_beyond_its_limits_is_refused(host: Host, field: str, value: Any) -> None:
    body = {"name": "plan", "epoch": 1, "number": 1, "data": "", field: value}
    status, answer = host.post("/v1/records", body)
    assert status == 400 and f"$.{field}" in json.loads(answer)["message"]


def test_records_need_the_member_key(tmp_path: Path) -> None:
    key = "a-member-key-of-some-length"
    with kvd(tmp_path, member_key=SharedKey([key])) as host:
        put, bearer = PutRecord("plan", 1, 1, b"x"), {"Authorization": f"Bearer {key}"}
        assert host.post("/v1/records", put)[0] == 401
        assert host.post("/v1/records", put, bearer)[0] == 200
        assert host.get("/v1/records?name=plan")[0] == 401
        assert host.get("/v1/records?name=plan", bearer)[0] == 200
