from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.deployment import ReplanSection
from prfaas.contracts.gateway_api import MAX_REASON_CHARS, HomePlan, SharedPlan
from prfaas.errors import InputError
from prfaas.gateway.planning.plan_codec import MOST_INSTANCES, decode_plans, encode_plans
from prfaas.planner.problem import Problem
from prfaas.scheduler.homes.plans import home_name
from prfaas.scheduler.plan import Plan, Role, with_instances
from prfaas.types import ClusterId, NodeId
from tests.scheduler.homes.networks import EAST, NETWORK, NODES, NORTH, PLANS, SOUTH, WEST

BASE = {home_name(home): home.problem for home in NETWORK.homes}
RULES = ReplanSection(every_s=7.0)
AGES = st.floats(0, 1e8)


def sent(shared: SharedPlan) -> SharedPlan:
    return msgspec.json.decode(msgspec.json.encode(shared), type=SharedPlan)


@st.composite
def plans_of(draw: st.DrawFn, name: ClusterId, now_s: float) -> Plan:
    live = [draw(st.integers(0, 9)) for _ in BASE[name].remotes]
    first = draw(st.floats(0, 1))
    nodes = draw(st.lists(st.sampled_from(NODES[name]), unique=True, min_size=1))
    role: st.SearchStrategy[Role] = st.sampled_from(("prefill", "decode"))
    roles = {node: draw(role) for node in nodes}
    return Plan(
        rules=RULES,
        problem=with_instances(BASE[name], live, draw(st.integers(0, 9))),
        threshold_tokens=draw(st.integers(0, 10**6)),
        roles=roles,
        shares=(first, 1 - first),
        capacity_rps=draw(st.floats(0, 1e6)),
        made_s=now_s - draw(AGES),
        converted_s={node: now_s - draw(AGES) for node in draw(st.lists(st.sampled_from(nodes)))},
        reason=draw(st.text(max_size=50)),
    )


@given(st.data(), st.floats(0, 1e7), st.floats(0, 1e7))
def test_a_plan_arrives_as_it_was_sent(
    data: st.DataObject, sender_s: float, receiver_s: float
) -> None:
    plans = {name: data.draw(plans_of(name, sender_s)) for name in (EAST, WEST)}
    draining = (NodeId("east-0"),)
    shared = sent(encode_plans(plans, 3, 5, draining, sender_s))
    assert (shared.epoch, shared.number, shared.draining) == (3, 5, draining)
    received = decode_plans(shared, BASE, RULES, receiver_s)
    assert received.keys() == plans.keys()
    later_s = receiver_s - sender_s
    for name, plan in plans.items():
        found = received[name]
        times = {"made_s": 0.0, "converted_s": {}}
        assert replace(found, **times) == replace(plan, **times)  # type: ignore[arg-type]
        assert math.isclose(found.made_s, plan.made_s + later_s, abs_tol=1e-3)
        assert found.converted_s.keys() == plan.converted_s.keys()
        for node, at_s in plan.converted_s.items():
            assert math.isclose(found.converted_s[node], at_s + later_s, abs_tol=1e-3)


def test_planned_plans_arrive_as_they_were_sent() -> None:
    shared = sent(encode_plans(PLANS, 1, 1, (), 0.0))
    rules = next(iter(PLANS.values())).rules
    assert decode_plans(shared, BASE, rules, 0.0) == PLANS


def shared_plan(**fields: Any) -> SharedPlan:
    given = encode_plans(PLANS, 1, 1, (), 0.0)
    return msgspec.structs.replace(
        given, homes={EAST: msgspec.structs.replace(given.homes[EAST], **fields)}
    )


def test_homes_and_clusters_that_the_receiver_does_not_have_are_ignored() -> None:
    shared = encode_plans(PLANS, 1, 1, (), 0.0)
    assert decode_plans(shared, {WEST: BASE[WEST]}, RULES, 0.0).keys() == {WEST}
    north, *_ = BASE[EAST].remotes
    base: Problem = replace(BASE[EAST], remotes=(north,))
    found = decode_plans(shared_plan(shares={NORTH: 0.25, SOUTH: 0.75}), {EAST: base}, RULES, 0.0)
    assert found[EAST].shares == (0.25,)


def test_a_cluster_that_the_sender_does_not_have_gets_nothing() -> None:
    shared = shared_plan(shares={SOUTH: 1.0}, instances={EAST: 4, SOUTH: 2})
    found = decode_plans(shared, BASE, RULES, 0.0)[EAST]
    assert found.shares == (0.0, 1.0)
    assert [remote.pool.instances for remote in found.problem.remotes] == [0, 2]


def test_a_home_without_live_instances_has_a_plan_only_with_roles() -> None:
    assert not decode_plans(shared_plan(instances={EAST: 0}, roles={}), BASE, RULES, 0.0)
    kept = decode_plans(shared_plan(instances={EAST: 0}), BASE, RULES, 0.0)
    assert kept[EAST].roles == PLANS[EAST].roles
    new = decode_plans(shared_plan(instances={EAST: 4}, roles={}), BASE, RULES, 0.0)
    assert new[EAST].problem.local.pool.instances == 4


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"shares": {NORTH: 0.7, SOUTH: 0.7}}, "homes.east.shares"),
        ({"shares": {NORTH: math.nan}}, "homes.east.shares.north"),
        ({"shares": {NORTH: -0.1}}, "homes.east.shares.north"),
        ({"capacity_rps": math.inf}, "homes.east.capacity_rps"),
        ({"age_s": math.nan}, "homes.east.age_s"),
        ({"age_s": -1.0}, "homes.east.age_s"),
        ({"converted_age_s": {"east-0": 1e30}}, "homes.east.converted_age_s"),
        ({"threshold_tokens": -1}, "homes.east.threshold_tokens"),
        ({"instances": {NORTH: MOST_INSTANCES + 1}}, "homes.east.instances.north"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as refused:
        decode_plans(shared_plan(**fields), BASE, RULES, 0.0)
    assert refused.value.where == where


def test_values_that_a_message_cannot_have_are_brought_within_its_limits() -> None:
    odd = replace(
        PLANS[EAST],
        shares=(1 + 1e-12, 0.0),
        capacity_rps=math.inf,
        made_s=10.0,  # after `now_s`
        reason="x" * (MAX_REASON_CHARS + 1),
    )
    home: HomePlan = sent(encode_plans({EAST: odd}, 1, 1, (), 0.0)).homes[EAST]
    assert home.shares[NORTH] == 1 and home.age_s == 0 and len(home.reason) == MAX_REASON_CHARS
