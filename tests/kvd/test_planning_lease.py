"""The planning lease: the decision, and the path over sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kvd_api import (
    LONGEST_LEASE_S,
    MOST_EPOCH,
    ClaimPlanning,
    PlanningLease,
    Role,
    SetRole,
)
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.http_client.client import open_client
from prfaas.kvd.planning_lease import Promise, decide, first_promise
from prfaas.security.shared_key import SharedKey
from prfaas_lab.testing.clock import FakeClock
from tests.kvd.hosts import Host, kvd

FREE = first_promise(-LONGEST_LEASE_S)  # at 0 s
HELD = Promise("a", 5, 3.0)


@pytest.mark.parametrize(
    ("promise", "claim", "now_s", "granted"),
    [
        (first_promise(0.0), ClaimPlanning("a", 1, 3.0), 2.999, False),  # just started
        (first_promise(0.0), ClaimPlanning("a", 1, 3.0), 3.0, True),
        (HELD, ClaimPlanning("a", 5, 3.0), 1.0, True),  # renewed
        (HELD, ClaimPlanning("a", 5, 3.0), 9.0, True),
        (HELD, ClaimPlanning("a", 4, 3.0), 1.0, False),
        (HELD, ClaimPlanning("a", 6, 3.0), 1.0, True),  # in place of its earlier one
        (HELD, ClaimPlanning("b", 6, 3.0), 2.999, False),
        (HELD, ClaimPlanning("b", 6, 3.0), 3.0, True),
        (HELD, ClaimPlanning("b", 5, 3.0), 9.0, False),  # promised to another gateway
        (HELD, ClaimPlanning("b", 4, 3.0), 9.0, False),
        (HELD, ClaimPlanning("b", 0, 0.0), 9.0, False),  # asks only
        (HELD, ClaimPlanning("b", 5, 0.0), 1.0, False),  # cannot give up what another one has
        (HELD, ClaimPlanning("b", 6, 0.0), 1.0, False),
        (FREE, ClaimPlanning("a", 0, 3.0), 0.0, False),
    ],
)
def test_which_claims_are_granted(
    promise: Promise, claim: ClaimPlanning, now_s: float, granted: bool
) -> None:
    after, lease = decide(promise, claim, now_s)
    assert lease.granted is granted
    if granted:
        assert after == Promise(claim.gateway, claim.epoch, now_s + claim.lease_s)
        assert lease == PlanningLease(claim.gateway, claim.epoch, True, claim.lease_s)
    else:
        left_s = max(0.0, promise.until_s - now_s)
        assert after == promise
        assert lease == PlanningLease(promise.gateway, promise.epoch, False, left_s)


def test_a_lease_that_is_given_up_is_free_at_once_and_its_epoch_ended() -> None:
    promise, lease = decide(HELD, ClaimPlanning("a", 5, 0.0), 1.0)
    assert lease == PlanningLease("a", 5, True, 0.0)
    late, refused = decide(promise, ClaimPlanning("a", 5, 3.0), 1.5)  # sent before
    assert late == promise and not refused.granted
    assert decide(promise, ClaimPlanning("a", 5, 0.0), 1.5)[1].granted  # given up twice
    assert decide(promise, ClaimPlanning("b", 6, 3.0), 1.5)[1] == PlanningLease("b", 6, True, 3.0)


def test_a_lease_is_bounded_and_no_renewal_shortens_it() -> None:
    promise, lease = decide(FREE, ClaimPlanning("a", 1, 60.0), 0.0)
    assert lease.left_s == LONGEST_LEASE_S
    promise, lease = decide(promise, ClaimPlanning("a", 1, 0.5), 1.0)
    assert promise.until_s == LONGEST_LEASE_S and lease.left_s == LONGEST_LEASE_S - 1.0


CLAIMS = st.lists(
    st.tuples(
        st.floats(0.0, 2.0),  # seconds after the previous claim
        st.builds(
            ClaimPlanning,
            st.sampled_from("abc"),
            st.integers(0, 6),
            st.sampled_from([0.0, 0.5, 3.0, 60.0]),
        ),
    ),
    max_size=40,
)


@given(CLAIMS)
def test_one_gateway_has_the_lease_and_epochs_rise(
    claims: list[tuple[float, ClaimPlanning]],
) -> None:
    now_s, promise = 0.0, first_promise(0.0)
    counted: dict[str, float] = {"": LONGEST_LEASE_S}  # until when each gateway may count on it
    owners: dict[int, str] = {}
    for wait_s, claim in claims:
        now_s += wait_s
        before = promise
        promise, lease = decide(promise, claim, now_s)
        assert promise.epoch >= before.epoch and 0 <= lease.left_s <= LONGEST_LEASE_S
        assert (lease.gateway, lease.epoch) == (promise.gateway, promise.epoch)
        if lease.granted:
            assert owners.setdefault(claim.epoch, claim.gateway) == claim.gateway
            others = {until for name, until in counted.items() if name != claim.gateway}
            assert all(until <= now_s for until in others)
            counted[claim.gateway] = now_s + min(claim.lease_s, lease.left_s)


# Over sockets ------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def host(tmp_path: Path, clock: FakeClock) -> Iterator[Host]:
    with kvd(tmp_path, clock=clock) as host:
        yield host


async def test_two_gateways_claim_the_lease_of_a_kvd(host: Host, clock: FakeClock) -> None:
    async with open_client() as http_a, open_client() as http_b:
        a, b = KvdClient(http_a, host.url), KvdClient(http_b, host.url, DEFAULTS.timeouts)
        started = await a.claim_planning(ClaimPlanning("a", 1, 3.0))
        assert started == PlanningLease("", 0, False, LONGEST_LEASE_S)
        clock.advance(LONGEST_LEASE_S)
        assert (await a.claim_planning(ClaimPlanning("a", 1, 3.0))).granted
        clock.advance(1.0)
        refused = await b.claim_planning(ClaimPlanning("b", 2, 3.0))
        assert refused == PlanningLease("a", 1, False, 2.0)
        assert await a.set_role(SetRole("prefill", 0, planning_epoch=1)) == Role("prefill", 1)
        clock.advance(2.0)
        assert (await b.claim_planning(ClaimPlanning("b", 2, 3.0))).granted
        assert not (await a.claim_planning(ClaimPlanning("a", 1, 3.0))).granted
        assert await a.set_role(SetRole("decode", 1, planning_epoch=1)) is None
        assert await b.set_role(SetRole("decode", 1, planning_epoch=2)) == Role("decode", 2)
        assert await a.set_role(SetRole("both", 2)) == Role("both", 3)  # without an election
        assert (await b.claim_planning(ClaimPlanning("b", 2, 0.0))).left_s == 0.0
        assert (await a.claim_planning(ClaimPlanning("a", 3, 3.0))).granted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gateway", ""),
        ("gateway", "x" * 257),
        ("epoch", -1),
        ("epoch", MOST_EPOCH + 1),
        ("lease_s", -0.1),
        ("lease_s", 1e9),
        ("lease_s", None),
    ],
)
def test_a_field_beyond_its_limits_is_refused(host: Host, field: str, value: Any) -> None:
    body = {"gateway": "a", "epoch": 1, "lease_s": 3.0, field: value}
    status, answer = host.post("/v1/planning", body)
    assert status == 400 and f"$.{field}" in json.loads(answer)["message"]


def test_a_claim_needs_the_member_key(tmp_path: Path) -> None:
    key = "a-member-key-of-some-length"
    with kvd(tmp_path, member_key=SharedKey([key])) as host:
        claim = ClaimPlanning("a", 1, 3.0)
        assert host.post("/v1/planning", claim)[0] == 401
        assert host.post("/v1/planning", claim, {"Authorization": f"Bearer {key}"})[0] == 200
