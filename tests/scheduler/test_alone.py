"""Decode nodes that serve requests alone: wherever there is no other way, and otherwise where that
costs least and the requests that decode there do not notice it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prfaas.config.deployment import AloneSection
from prfaas.scheduler.adaptive import ALONE_IS_CHEAPEST, option_cost_s
from prfaas.scheduler.board import Board
from prfaas.scheduler.options import alone_option
from prfaas.scheduler.request import ONLY_LOGPROBS, ONLY_TOKEN, Request, Route
from prfaas.scheduler.sets import Choice, predict_ttft_s
from prfaas.scheduler.short_term import ALONE, QUEUES_ARE_LONG, has_room, route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import View
from prfaas.scheduler.waiting import HeldWork, Hold
from prfaas.types import NodeId
from tests.scheduler.views import (
    COSTS,
    FAR,
    LOCAL,
    NEAR,
    PLAN,
    REMOTE,
    Hit,
    explain_at,
    policies,
    requests,
    state,
    view,
    views,
)

DECODE = LOCAL[2]
SHORT = Request(1, 2000)  # of which the decode node has 1,920 tokens
HELD = {DECODE: Hit(1920, 1920)}
NO_PREFILL = frozenset([*LOCAL[:2], *REMOTE])
POLICIES = ("paper", "adaptive", "local", "remote")


def rules(policy: str = "adaptive", **alone: float) -> ShortTermState:
    known = state(policy)
    changed = msgspec.structs.replace(known.rules, alone=AloneSection(**{"margin_s": 0.0, **alone}))
    return ShortTermState(changed, known.links)


def with_node(seen: View, name: NodeId, **changes: float) -> View:
    nodes = tuple(n._replace(**changes) if n.node == name else n for n in seen.local.nodes)
    return seen._replace(local=seen.local.with_nodes(nodes))


def taken(request: Request, seen: View, known: ShortTermState) -> Route:
    found = route(request, seen, PLAN, known)
    assert isinstance(found, Route)
    return found


# No other way ------------------------------------------------------------------------------------


@given(requests, views, policies)
def test_every_request_is_served_while_a_node_of_its_home_lives(
    request: Request, seen: View, policy: str
) -> None:
    """Or it waits for a prefill queue: of a node that lives."""
    found = route(request, seen, PLAN, rules(policy))
    live = [node.node for node in seen.local.nodes if node.usable]
    if not live:
        assert isinstance(found, Hold) and found.cluster is None
    elif isinstance(found, Hold):
        assert policy == "adaptive" and found.cluster is not None
        waited_for = [node for node in seen.cluster(found.cluster).nodes if node.usable]
        assert waited_for and any(node.free_at_s > seen.now_s for node in waited_for)
    else:
        assert found.decode in live


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_prefill_node_a_decode_node_serves_alone(policy: str) -> None:
    for seen in (view(dead=NO_PREFILL), view(dead=frozenset(LOCAL[:2]), up=False)):
        found = taken(SHORT, seen, rules(policy))
        assert found.alone and found.is_last_resort and found.decode in LOCAL[2:]
        assert (found.cluster, found.transfer_tokens, found.nbytes) == (NEAR, 0, 0)
        assert found.reason == ALONE and not found.offloaded


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_decode_node_a_prefill_node_serves_alone(policy: str) -> None:
    found = taken(SHORT, view(dead=frozenset(LOCAL[2:])), rules(policy))
    assert found.alone and found.decode in LOCAL[:2]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefill_node_that_lives_is_preferred(policy: str) -> None:
    """Also by `remote` without a remote node. `local` never offloads."""
    near = taken(SHORT, view(dead=frozenset(REMOTE)), rules(policy, margin_s=1.0))
    assert not near.alone and near.prefill in LOCAL[:2]
    far = taken(SHORT, view(dead=frozenset(LOCAL[:2])), rules(policy, margin_s=1.0))
    assert far.offloaded if policy != "local" else far.alone


def test_the_node_with_the_earliest_first_token_is_chosen() -> None:
    busy = with_node(view(dead=NO_PREFILL), DECODE, free_at_s=101.0)
    assert taken(SHORT, busy, rules("paper")).decode == LOCAL[3]
    full = with_node(view(dead=NO_PREFILL), DECODE, active=4)
    assert taken(SHORT, full, rules("paper")).decode == LOCAL[3]
    both = with_node(with_node(view(HELD, dead=NO_PREFILL), DECODE, active=1), LOCAL[3], active=1)
    assert taken(SHORT, both, rules("paper")).decode == DECODE, "it has most of the prompt"
    slow = with_node(view(dead=NO_PREFILL), DECODE, pace=20.0)
    assert taken(SHORT, slow, rules("paper")).decode == LOCAL[3]


def test_requests_wait_in_order_where_all_nodes_are_busy() -> None:
    busy = view(dead=NO_PREFILL, free_at_s={LOCAL[2]: 103.0, LOCAL[3]: 104.0})
    found = route(SHORT, busy, PLAN, rules())
    assert isinstance(found, Hold) and (found.cluster, found.reason) == (NEAR, QUEUES_ARE_LONG)
    assert not has_room(NEAR, busy, rules())
    free = view(dead=NO_PREFILL, free_at_s={LOCAL[2]: 103.0, LOCAL[3]: 100.4})
    assert has_room(NEAR, free, rules())
    assert taken(SHORT, free, rules()).decode == LOCAL[3]
    waits = free._replace(held={NEAR: HeldWork((0.1,) * 8, 50.0)})
    late = route(SHORT._replace(arrived_s=100.0), waits, PLAN, rules())
    assert isinstance(late, Hold), "others have waited longer"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"prompt_logprobs": True}, ONLY_LOGPROBS), ({"prompt_tokens": 1}, ONLY_TOKEN)],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_some_requests_are_always_served_alone(
    policy: str, changes: Mapping[str, int], reason: str
) -> None:
    found = taken(SHORT._replace(**changes), view(), rules(policy))
    assert found.alone and found.reason == reason
    # They take no prefill node, so that they do not wait for one.
    busy = view(free_at_s=dict.fromkeys([*LOCAL[:2], *REMOTE], 200.0))
    assert taken(SHORT._replace(**changes), busy, rules(policy)).alone


# By choice ---------------------------------------------------------------------------------------


def test_the_node_that_has_the_rest_prefills_and_decodes() -> None:
    found = taken(SHORT, view(HELD), rules())
    assert (found.prefill, found.decode, found.cluster) == (DECODE, DECODE, NEAR)
    assert (found.cached_tokens, found.transfer_tokens, found.nbytes) == (1920, 0, 0)
    assert found.alone and not found.is_last_resort and not found.offloaded and not found.copies
    assert found.reason == ALONE_IS_CHEAPEST


REFUSED = {
    "gains too little": (view(HELD), rules(margin_s=1e3)),
    "others would wait": (with_node(view(HELD), DECODE, active=3), rules()),
    "not a decode node": (view({LOCAL[0]: Hit(1920, 1920)}), rules()),
    "dead": (view(HELD, dead=frozenset([DECODE])), rules()),
    "no slot": (with_node(view(HELD), DECODE, active=4), rules()),
    "no memory": (with_node(view(HELD), DECODE, free_kv_bytes=1.0), rules()),
    "busy": (view(HELD, free_at_s={DECODE: 100.1}), rules()),
    "spent": (with_node(view(HELD), DECODE, active=1, next_alone_s=100.1), rules()),
    "attention only": (view({DECODE: Hit(0, 1920)}), rules()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_not_for_every_node(case: str) -> None:
    seen, known = REFUSED[case]
    found = taken(SHORT, seen, known)
    assert not found.alone or found.decode != DECODE or found.cached_tokens == 0


@pytest.mark.parametrize("policy", ["paper", "local", "remote"])
def test_other_policies_do_not_choose_it(policy: str) -> None:
    assert not taken(SHORT, view(HELD), rules(policy)).alone


def test_not_after_a_node_has_refused() -> None:
    assert not taken(SHORT._replace(no_alone=True), view(HELD), rules()).alone
    last = view(HELD, dead=NO_PREFILL)
    assert taken(SHORT._replace(no_alone=True), last, rules()).alone, "there is no other way"


def test_nothing_decodes_beside_it_so_nothing_is_limited() -> None:
    spent = with_node(view(HELD), DECODE, active=0, next_alone_s=1e6)
    assert taken(SHORT, spent, rules()).alone


def test_explain_has_it_among_the_alternatives() -> None:
    found = explain_at(SHORT, view(HELD), rules())
    (own,) = [a for a in found.alternatives if a.alone]
    assert (own.node, own.cluster, own.cached_tokens) == (DECODE, NEAR, 1920)
    assert own.forecast.transfer_s == 0 and not own.declined
    assert own.cost_s is not None
    assert own.cost_s <= min(a.cost_s for a in found.alternatives if a.cost_s is not None)
    assert isinstance(found.chosen, Route)
    step_s = 0.0  # no request runs there
    predicted_s = predict_ttft_s(SHORT, Choice(found.chosen, view(HELD)), rules())
    assert predicted_s == own.forecast.ttft_s + step_s


def test_explain_says_why_it_is_declined() -> None:
    full = view(HELD)
    for name in LOCAL[2:]:
        full = with_node(full, name, active=4)
    (own,) = [a for a in explain_at(SHORT, full, rules()).alternatives if a.alone]
    assert "slow down by more than 4%" in own.declined
    (own,) = [a for a in explain_at(SHORT, view(), rules("paper")).alternatives if a.alone]
    assert "policy paper" in own.declined
    (own,) = explain_at(SHORT, view(dead=NO_PREFILL), rules("paper")).alternatives
    assert own.alone and not own.declined


nodes = st.fixed_dictionaries({"active": st.integers(0, 4), "next_alone_s": st.floats(0, 200)})


@given(requests, views, nodes, nodes, st.integers(1, 512))
def test_by_choice_only_within_its_limits_and_where_it_costs_least(
    request: Request,
    seen: View,
    one: Mapping[str, float],
    other: Mapping[str, float],
    uncached: int,
) -> None:
    seen = with_node(with_node(seen, LOCAL[2], **one), LOCAL[3], **other)
    if DECODE in seen.cached:
        request = request._replace(prompt_tokens=seen.cached[DECODE].tokens + uncached)
    known = rules()
    found = route(request, seen, PLAN, known)
    assume(isinstance(found, Route) and found.alone and not found.is_last_resort)
    assert isinstance(found, Route)
    (node,) = [n for n in seen.local.nodes if n.node == found.decode]
    assert node.usable and node.role == "decode" and node.active < node.slots
    assert node.active == 0 or node.next_alone_s <= seen.now_s
    option = alone_option(request, seen, known, by_choice=True)
    assert option is not None
    cost_s = option_cost_s(request, option, seen, PLAN, known)
    explained = explain_at(request, seen, known)
    for alternative in explained.alternatives:
        assert alternative.cost_s is None or cost_s <= alternative.cost_s + 1e-9


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=40))
def test_decodes_keep_their_share_of_the_time(pauses_s: list[float]) -> None:
    """A request decodes all the time, and others come at any times: between two that the node
    serves alone lies so much time that the first takes at most its share."""
    known = rules(slowdown=0.05)
    seen = view(HELD, free_at_s=dict.fromkeys([*LOCAL[:2], *REMOTE], 1e6))
    board = Board(COSTS, [(NEAR, LOCAL), (FAR, REMOTE)], seen.links, slots=4)
    for name in LOCAL[2:]:
        board.assign(name, "decode", usable=name == DECODE)
    for name in (*LOCAL[:2], *REMOTE):
        busy = Route(NEAR, name, NEAR, DECODE, False, 0, 0, 0, 1e6, (), "busy for ever")
        board.record_dispatch(busy, 0.0, 0.0)
    for _ in range(3):  # of the four requests that are booked there, one stays
        board.record_failure(board.record_dispatch(busy, 0.0, 0.0), 0.0)
    now_s, begun = 0.0, list[tuple[float, float]]()
    for pause_s in pauses_s:
        now_s += pause_s
        found = alone_option(SHORT, board.view(now_s, HELD, {}), known, by_choice=True)
        if found is None:
            continue
        begun.append((now_s, found.prefill_s))
        way = Route(
            NEAR, DECODE, NEAR, DECODE, False, 1920, 0, 0, found.prefill_s, (), "",
            now_s + found.prefill_s * 21,
        )  # fmt: skip
        job = board.record_dispatch(way, 0.0, now_s)
        board.record_handoff(job, now_s + found.prefill_s, found.prefill_s)
        board.record_end(job)
    for (before_s, prefill_s), (after_s, _) in zip(begun, begun[1:], strict=False):
        decoding_s = after_s - before_s - prefill_s
        assert prefill_s <= 0.05 * decoding_s + 1e-9


def test_a_prefill_that_takes_longer_delays_the_next_one() -> None:
    board = Board(COSTS, [(NEAR, LOCAL), (FAR, REMOTE)], view().links, slots=4)
    board.assign(DECODE, "decode", usable=True)
    found = taken(SHORT, board.view(10.0, HELD, {}), rules(slowdown=0.05))
    job = board.record_dispatch(found, 0.0, 10.0)
    planned_s = board.node(DECODE).next_alone_s
    assert planned_s == pytest.approx(10.0 + 21 * found.prefill_s)
    board.record_handoff(job, 10.0 + 0.5 * found.prefill_s, 0.5 * found.prefill_s)
    assert board.node(DECODE).next_alone_s == planned_s
    job = board.record_dispatch(found, 0.0, 10.0)
    board.record_handoff(job, 10.0 + 3 * found.prefill_s, 3 * found.prefill_s)
    assert board.node(DECODE).next_alone_s == pytest.approx(10.0 + 63 * found.prefill_s)
