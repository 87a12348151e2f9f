"""Sets of members with equal KV formats serve side by side: what a rolling upgrade needs."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kvd_api import KvdReport
from prfaas.errors import MalformedResponse
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.formats import LEAST_BLOCK_TOKENS, MOST_BLOCK_SIZES, NO_PD_MEMBER
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.fleet.membership import Membership
from prfaas.gateway.router import Router
from prfaas.types import ClusterId, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import HOME, deployment
from tests.gateway.fleets import (
    LONG,
    SHORT,
    A,
    B,
    C,
    F,
    fleet_and_router,
    member_of,
    place,
    placement,
)
from tests.gateway.reports import (
    IDLE,
    NATIVE_BLOCK,
    NODE_CARD,
    add_native,
    load,
    native_compat,
    report,
)

TIMEOUTS = DEFAULTS.timeouts


def restart(fleet: Fleet, node: NodeId, revision: str, clock: FakeClock, **more: object) -> None:
    """The node has a new process, whose engine has this revision."""
    clock.advance(0.01)
    instance = f"{node} {revision} {clock.now()}"
    upgraded = report(str(node), instance=instance, revision=revision)
    member = member_of(fleet, node)
    fleet.record_report(member, changed(upgraded, **more) if more else upgraded)
    appear_engine(fleet, member, clock)


def changed(found: KvdReport, **more: object) -> KvdReport:
    """The report with another format."""
    replace = msgspec.structs.replace
    pool = found.pool
    assert pool is not None
    size = more.get("block_tokens", pool.block_tokens)
    pool = replace(pool, compat=replace(pool.compat, **more), block_tokens=size)
    return replace(found, pool=pool)


def appear_engine(fleet: Fleet, member: Member, clock: FakeClock) -> None:
    fleet.record_card(member, NODE_CARD)
    load(fleet, member, IDLE, clock.now())


def used(fleet: Fleet) -> list[str]:
    fleet.refresh()
    return [str(m.node) for m in fleet.members if m.node and fleet.board.node(m.node).usable]


def leave(fleet: Fleet, node: NodeId, clock: FakeClock) -> None:
    """The node's engine answers that it drains."""
    fleet.record_load(member_of(fleet, node), IDLE, leaving=True, asked_s=clock.now(), own=0)


async def routes(router: Router, clock: FakeClock, count: int = 40) -> list[tuple[str, str]]:
    """Where so many requests go, short and long ones, all of them under way at the same time."""
    return [await place(router, placement(LONG if i % 2 else SHORT, clock)) for i in range(count)]


def test_an_upgraded_node_serves_beside_the_others() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    for node in (B, F, A, C):
        restart(fleet, node, "2", clock)
        if node != F:
            assert set(used(fleet)) >= {A, B, C}, f"after {node}"
    assert used(fleet) == [A, B, C, F]


async def test_hand_offs_stay_within_a_set_and_both_sets_serve() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    restart(fleet, C, "2", clock)
    taken = await routes(router, clock)
    for prefill, decode in taken:
        assert (prefill == C) == (decode == C), (prefill, decode)
    assert {decode for _, decode in taken} == {B, C}


async def test_a_decode_node_prefills_while_the_only_prefill_node_restarts() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock, policy="local")
    fleet.record_engine_failure(F)
    clock.advance(0.1)
    leave(fleet, A, clock)
    waiting = asyncio.create_task(router.place(placement(LONG, clock), 1.0))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    waiting.cancel()
    assert done and waiting.result().route.prefill == waiting.result().route.decode


# Members and formats only -------------------------------------------------------------------------


def pd_members(count: int) -> tuple[Membership, list[Member]]:
    """PD members, and a PrfaaS member at the end."""
    nodes = [{"url": f"http://n{i}:1", "kvd_url": f"http://n{i}:2"} for i in range(count)]
    subject = Membership(deployment(nodes, [{"url": "http://f:1", "kvd_url": "http://f:2"}]))
    return subject, list(subject)


def poll(subject: Membership, members: list[Member], revisions: str, now_s: float) -> list[str]:
    """Member i answers with revision `revisions[i]`, and not at all where that is '-'. A capital
    letter is another model. Returns the usable members."""
    for number, (member, revision) in enumerate(zip(members, revisions, strict=True)):
        if revision == "-":
            continue
        name = f"n{number}"
        found = report(name, instance=f"{name} {revision}", revision=revision)
        if revision.isupper():
            found = changed(found, model=revision)
        subject.record_report(member, found, now_s)
        member.card, member.engine_seen_s = NODE_CARD, now_s
        member.engine.hear(now_s)
    subject.update_formats(now_s)
    clusters = subject.clusters
    return sorted(str(n) for cluster in clusters for n in subject.usable_nodes(cluster, now_s))


def test_no_member_is_shut_out_because_of_another() -> None:
    subject, members = pd_members(5)
    steps = ("111111", "211111", "221111", "221112", "222112", "222212", "222222", "123453")
    for step, revisions in enumerate(steps):
        assert len(poll(subject, members, revisions, 10.0 + step)) == 6, revisions


def test_a_prfaas_member_needs_a_pd_member_of_its_format() -> None:
    subject, members = pd_members(2)
    far = members[-1]
    assert poll(subject, members, "112", 10.0) == ["n0", "n1"]
    assert subject.formats.problem(far) == NO_PD_MEMBER
    assert poll(subject, members, "212", 11.0) == ["n0", "n1", "n2"]
    members[0].leaving = True
    assert poll(subject, members, "212", 12.0) == ["n1"]


def test_a_member_of_another_model_is_not_used_and_says_why() -> None:
    subject, members = pd_members(3)
    assert poll(subject, members, "111B", 10.0) == ["n0", "n1", "n2"]
    assert poll(subject, members, "A11B", 11.0) == ["n1", "n2"]
    problem = subject.formats.problem(members[0])
    assert problem == (
        "it serves A (2 full, 2 linear layers), "
        "and the deployment serves m (2 full, 2 linear layers)"
    )


def test_a_model_with_other_layers_is_another_model() -> None:
    """Engines name the architecture: models of two sizes have the same name."""
    subject, members = pd_members(2)
    poll(subject, members, "11-", 10.0)
    found = report("n0", instance="second", revision="2")
    assert found.pool is not None
    (full, linear) = found.pool.groups
    groups = (msgspec.structs.replace(full, layers=(0, 1, 4)), linear)
    pool = msgspec.structs.replace(found.pool, groups=groups)
    subject.record_report(members[0], msgspec.structs.replace(found, pool=pool), 11.0)
    assert poll(subject, members, "-1-", 11.0) == ["n1"]
    assert "3 full, 2 linear layers" in str(subject.formats.problem(members[0]))


def test_the_model_in_use_stays_until_the_last_pd_member_has_left_it() -> None:
    subject, members = pd_members(3)
    poll(subject, members, "111-", 10.0)
    assert poll(subject, members, "AA1-", 11.0) == ["n2"]
    members[2].leaving = True
    assert poll(subject, members, "AA1-", 12.0) == ["n0", "n1"]


def test_the_model_of_dead_nodes_does_not_stay_in_use() -> None:
    subject, members = pd_members(3)
    poll(subject, members, "11A-", 10.0)
    now = 10.0
    while now < 10.0 + TIMEOUTS.hung_s + 2.0:
        now += 0.5
        found = poll(subject, members, "--A-", now)
        assert "n2" not in found or now >= 10.0 + TIMEOUTS.hung_s - 0.5
    assert found == ["n2"]


def test_a_pause_of_the_gateway_does_not_change_the_model_in_use() -> None:
    """After the pause the nodes answer one after the other, and that of another model first."""
    subject, members = pd_members(5)
    assert len(poll(subject, members, "1111A-", 10.0)) == 4
    later = 10.0 + 10 * TIMEOUTS.hung_s
    assert poll(subject, members, "----A-", later) == []
    assert len(poll(subject, members, "1111A-", later + 0.5)) == 4


def test_two_gateways_choose_the_same_of_equally_many_models() -> None:
    found = set()
    for revisions in ("1AB-", "1BA-"):
        subject, members = pd_members(3)
        poll(subject, members, "111-", 10.0)
        members[0].leaving = True
        (node,) = poll(subject, members, revisions, 11.0)
        found.add(revisions[int(node[1:])])
    assert found == {"A"}


def test_registered_members_do_not_outvote_those_of_the_deployment_file() -> None:
    subject, members = pd_members(2)
    strangers = []
    for number in range(5):
        stranger = subject.register(f"http://s{number}:2", members[0].cluster, 10.0)
        assert stranger is not None
        strangers.append(stranger)
    used = poll(subject, [*strangers, *members], "XXXXX11-", 10.0)
    assert used == ["n5", "n6"]


def test_a_removed_member_does_not_keep_its_model_in_use() -> None:
    subject, members = pd_members(2)
    new = subject.register("http://n:2", ClusterId(HOME), 5.0)
    assert new is not None
    assert poll(subject, [*members, new], "---1", 10.0) == ["n3"]
    later = 10.0 + 2 * TIMEOUTS.first_plan_s
    assert poll(subject, members, "AA-", later) == []
    subject.remove(new)
    assert poll(subject, members, "---", later + 0.1) == ["n0", "n1"]


def test_a_gateway_that_starts_during_an_upgrade_uses_every_node() -> None:
    subject, members = pd_members(5)
    assert poll(subject, members, "2-----", 10.0) == ["n0"]
    assert len(poll(subject, members, "211112", 10.5)) == 6


def test_the_formats_of_one_member_leave_nothing_behind() -> None:
    """A member may claim one format after the other, each with another size of blocks."""
    subject, members = pd_members(3)
    poll(subject, members, "1111", 10.0)
    for number in range(100):
        size = 1 + number
        found = report("n0", instance=f"{number}", revision=f"{number}")
        subject.record_report(members[0], changed(found, block_tokens=size), 10.0)
        assert poll(subject, members, "-111", 10.0) == ["n0", "n1", "n2", "n3"]
        expected = {64, size} if size >= LEAST_BLOCK_TOKENS else {64}
        assert subject.block_sizes() == expected
        assert subject.formats.has_indexed_blocks(members[0]) == (size in expected)
    assert len(subject.formats._served) == 2


def test_the_sizes_of_blocks_that_prompts_are_hashed_at_are_bounded() -> None:
    subject, members = pd_members(10)
    poll(subject, members, "1" * 11, 10.0)
    for number, member in enumerate(members[:8]):
        found = changed(report(f"n{number}", instance="x"), block_tokens=1000 + number)
        subject.record_report(member, found, 10.0)
    assert len(poll(subject, members, "-" * 11, 10.0)) == 11, "they serve, without prefix hits"
    assert len(subject.block_sizes()) == MOST_BLOCK_SIZES and 64 in subject.block_sizes()


def test_prompts_are_hashed_at_the_block_sizes_of_second_pools_as_well() -> None:
    subject, members = pd_members(6)
    poll(subject, members, "1" * 7, 10.0)
    subject.record_report(members[0], report("n0", native="vllm-a"), 10.0)
    poll(subject, members, "-" * 7, 10.0)
    assert subject.block_sizes() == {64, NATIVE_BLOCK}
    assert subject.formats.has_indexed_blocks(members[0], native_compat())


def test_second_pools_do_not_displace_the_block_sizes_of_first_pools() -> None:
    subject, members = pd_members(6)
    poll(subject, members, "1" * 7, 10.0)
    sizes = [1000, 1001, 1002]
    for number, member in enumerate(members):
        found = report(f"n{number}", instance="x", native="vllm-a")
        if number < len(sizes):
            found = changed(found, block_tokens=sizes[number])
        subject.record_report(member, found, 10.0)
    poll(subject, members, "-" * 7, 10.0)
    assert subject.block_sizes() == {64, *sizes}, "four are the most"


def test_a_second_form_may_appear_and_does_not_change() -> None:
    subject, members = pd_members(2)
    poll(subject, members, "11-", 10.0)
    subject.record_report(members[0], report("n0", native="vllm-a"), 10.0)
    assert [compat.form for compat in members[0].compats] == ["canonical", "native"]
    with pytest.raises(MalformedResponse, match="another format"):
        subject.record_report(members[0], report("n0", native="vllm-b"), 10.0)


def test_an_engine_with_two_forms_is_of_the_set_of_its_first() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    add_native(fleet, A, B)
    add_native(fleet, F, layout="vllm-b")
    assert fleet.sets == ({A, B, C, F},)
    names = {pool.name for pool in fleet.pools()}
    assert names == {A, B, C, F, "a/native", "b/native", "f/native"}


# Roles, copies, routes ----------------------------------------------------------------------------


async def test_every_set_gets_requests_as_it_has_capacity() -> None:
    """`c` is a set of its own, and an idle one: it may not take what the others could do sooner."""
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    restart(fleet, C, "2", clock)
    count = 60
    prefills = Counter(prefill for prefill, _ in await routes(router, clock, count))
    assert all(prefills[node] >= 5 for node in (A, C, F)), prefills
    assert prefills[C] <= count / 2, prefills


async def test_a_set_with_both_roles_hands_off_within_it() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    for node in (B, F):
        restart(fleet, node, "2", clock)
    taken = set(await routes(router, clock))
    assert taken == {(A, C), (F, B)}


async def test_a_request_that_must_stay_local_is_served_by_a_set_without_prefill_node() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    for node in (A, C):
        leave(fleet, node, clock)
    restart(fleet, B, "2", clock)
    restart(fleet, F, "2", clock)
    wanted = placement(LONG, clock)
    wanted.request = wanted.request._replace(prompt_logprobs=True)
    assert await place(router, wanted) == (B, B)


async def test_requests_held_for_a_set_that_serves_alone_are_retried() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock, policy="adaptive", adaptive={"queue_s": 0.0})
    restart(fleet, C, "2", clock)
    for node in (A, B, F):
        leave(fleet, node, clock)
    first = await router.place(placement(LONG, clock), 1.0)
    assert (first.route.prefill, first.route.decode) == (C, C)
    waiting = asyncio.create_task(router.place(placement(LONG, clock), 30.0))
    await asyncio.sleep(0)
    assert len(router.waiting_room) == 1
    clock.advance(first.route.prefill_s)
    first.landed(clock.now())
    load(fleet, member_of(fleet, C), IDLE, clock.now())
    router.adjust()
    assert (await waiting).route.prefill == C


async def test_an_attempt_may_go_to_another_set() -> None:
    clock = FakeClock()
    fleet, router = fleet_and_router(clock)
    restart(fleet, C, "2", clock)
    assert await place(router, placement(LONG, clock, A, B, F)) == (C, C)
    assert (await place(router, placement(LONG, clock, C)))[1] == B


def test_every_pool_has_its_own_format() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    restart(fleet, B, "2", clock)
    formats = {pool.name: pool.compat.revision for pool in fleet.pools()}
    assert formats == {A: "1", B: "2", C: "1", F: "1"}


def test_a_set_disappears_with_its_last_member() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    restart(fleet, B, "2", clock)
    used(fleet)
    assert list(fleet.sets) == [{A, C, F}, {B}]
    leave(fleet, B, clock)
    used(fleet)
    assert list(fleet.sets) == [{A, C, F}]


def test_a_node_that_returns_has_its_role_at_once() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    leave(fleet, A, clock)
    assert used(fleet) == [B, C, F]
    restart(fleet, A, "2", clock)
    assert used(fleet) == [A, B, C, F] and fleet.board.node(A).role == "prefill"


def test_an_engine_of_another_format_is_not_used_before_it_answers() -> None:
    """The latest answer may be of the engine before it."""
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    fleet.record_report(member_of(fleet, B), report("b", instance="second", revision="2"))
    assert used(fleet) == [A, C, F]
    appear_engine(fleet, member_of(fleet, B), clock)
    assert used(fleet) == [A, B, C, F]


def test_a_node_is_expected_back_for_a_while_after_it_has_left_on_purpose() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    now = clock.now()
    home = fleet.homes[0]
    assert fleet.members.expected_nodes(home, now) == []
    leave(fleet, A, clock)
    assert fleet.members.expected_nodes(home, now) == [A]
    assert fleet.members.expected_nodes(home, now + 0.9 * TIMEOUTS.forget_s) == [A]
    assert fleet.members.expected_nodes(home, now + TIMEOUTS.forget_s) == []
