"""Short remainders that decode nodes prefill: never beyond their bound or their share of time."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.deployment import RemaindersSection
from prfaas.scheduler.board import Board
from prfaas.scheduler.forecast import forecast
from prfaas.scheduler.options import remainder_option
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.sets import Choice, predict_ttft_s
from prfaas.scheduler.short_term import route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import View
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
BOUND = 256
SHORT = Request(1, 2000)  # of which the decode node has 1,920 tokens
HELD = {DECODE: Hit(1920, 1920)}


def rules(policy: str = "adaptive", **remainders: float) -> ShortTermState:
    known = state(policy)
    changed = msgspec.structs.replace(
        known.rules,
        remainders=RemaindersSection(**{"tokens": BOUND, "margin_s": 0.0, **remainders}),
    )
    return ShortTermState(changed, known.links)


def with_node(seen: View, name: NodeId, **changes: float) -> View:
    nodes = tuple(n._replace(**changes) if n.node == name else n for n in seen.local.nodes)
    return seen._replace(local=seen.local.with_nodes(nodes))


def taken(request: Request, seen: View, known: ShortTermState) -> Route:
    found = route(request, seen, PLAN, known)
    assert isinstance(found, Route)
    return found


def test_the_node_that_has_the_rest_prefills_and_decodes() -> None:
    found = taken(SHORT, view(HELD), rules())
    assert (found.prefill, found.decode, found.cluster) == (DECODE, DECODE, NEAR)
    assert (found.cached_tokens, found.transfer_tokens, found.nbytes) == (1920, 0, 0)
    assert found.is_remainder and not found.offloaded and not found.copies
    assert "remainder" in found.reason


REFUSED = {
    "off": (view(HELD), rules(tokens=0)),
    "gains too little": (view(HELD), rules(margin_s=1e3)),
    "too long": (view(HELD), rules(tokens=79)),
    "not a decode node": (view({LOCAL[0]: Hit(1920, 1920)}), rules()),
    "dead": (view(HELD, dead=frozenset([DECODE])), rules()),
    "no slot": (with_node(view(HELD), DECODE, active=4), rules()),
    "no memory": (with_node(view(HELD), DECODE, free_kv_bytes=1.0), rules()),
    "busy": (view(HELD, free_at_s={DECODE: 101.0}), rules()),
    "spent": (with_node(view(HELD), DECODE, active=1, next_remainder_s=100.1), rules()),
    "attention only": (view({DECODE: Hit(0, 1920)}), rules()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_not_for_every_node(case: str) -> None:
    seen, known = REFUSED[case]
    assert not taken(SHORT, seen, known).is_remainder


@pytest.mark.parametrize("policy", ["paper", "local", "remote"])
def test_other_policies_have_none(policy: str) -> None:
    assert not taken(SHORT, view(HELD), rules(policy)).is_remainder


@pytest.mark.parametrize(
    "changes", [{"no_remainder": True}, {"prompt_logprobs": True}, {"decode_only": True}]
)
def test_it_is_not_for_every_request(changes: Mapping[str, bool]) -> None:
    assert not taken(SHORT._replace(**changes), view(HELD), rules()).is_remainder


def test_nothing_decodes_beside_it_so_nothing_is_limited() -> None:
    spent = with_node(view(HELD), DECODE, active=0, next_remainder_s=1e6)
    assert taken(SHORT, spent, rules()).is_remainder


def test_it_goes_where_no_node_prefills() -> None:
    """The policy would hold the request otherwise."""
    prefills = frozenset([*LOCAL[:2], *REMOTE])
    assert taken(SHORT, view(HELD, dead=prefills), rules()).is_remainder


def test_explain_has_it_among_the_alternatives() -> None:
    found = explain_at(SHORT, view(HELD), rules())
    (own,) = [a for a in found.alternatives if a.decodes]
    assert (own.node, own.cluster, own.cached_tokens) == (DECODE, NEAR, 1920)
    assert own.forecast.transfer_s == 0
    assert own.forecast.ttft_s <= min(a.forecast.ttft_s for a in found.alternatives)
    chosen = Choice(found.chosen, view(HELD), False)
    step_s = 0.0  # no request runs there
    assert predict_ttft_s(SHORT, chosen, rules()) == own.forecast.ttft_s + step_s


nodes = st.fixed_dictionaries({"active": st.integers(0, 4), "next_remainder_s": st.floats(0, 200)})


@given(requests, views, policies, nodes, nodes, st.integers(1, 2 * BOUND))
def test_never_beyond_the_bound_or_the_share(
    request: Request,
    seen: View,
    policy: str,
    one: Mapping[str, float],
    other: Mapping[str, float],
    uncached: int,
) -> None:
    seen = with_node(with_node(seen, LOCAL[2], **one), LOCAL[3], **other)
    if DECODE in seen.cached:
        request = request._replace(prompt_tokens=seen.cached[DECODE].tokens + uncached)
    known = rules(policy)
    found = route(request, seen, PLAN, known)
    if not isinstance(found, Route) or not found.is_remainder:
        return
    (node,) = [n for n in seen.local.nodes if n.node == found.decode]
    assert found.prefill == found.decode and node.usable and node.role == "decode"
    assert 0 < request.prompt_tokens - found.cached_tokens <= BOUND
    assert found.cached_tokens <= seen.cached[found.decode].tokens
    assert node.active < node.slots
    assert node.active == 0 or node.next_remainder_s <= seen.now_s
    without = route(request._replace(no_remainder=True), seen, PLAN, known)
    if isinstance(without, Route):
        # The first token does not come later than on the route that it replaces.
        own = remainder_option(request, seen, known)
        assert own is not None
        replaced = predict_ttft_s(request, Choice(without, seen, False), known)
        assert forecast(request, own, seen, known).ttft_s <= replaced + 1e-9 or seen.held


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=40))
def test_decodes_keep_their_share_of_the_time(pauses_s: list[float]) -> None:
    """A request decodes all the time, and remainders come at any times: between two of them lies
    so much time that the first takes at most its share."""
    known = rules(slowdown=0.05)
    links = view().links
    board = Board(COSTS, [(NEAR, LOCAL), (FAR, REMOTE)], links, slots=4)
    for name in LOCAL[2:]:
        board.assign(name, "decode", usable=True)
    neighbour = Route(NEAR, LOCAL[0], NEAR, DECODE, False, 0, 0, 0, 0.0, (), "decodes for ever")
    board.record_dispatch(neighbour, 0.0, 0.0)
    board.record_handoff(neighbour)
    now_s, begun = 0.0, list[tuple[float, float]]()
    for pause_s in pauses_s:
        now_s += pause_s
        found = taken(SHORT, board.view(now_s, HELD, {}), known)
        if found.is_remainder:
            begun.append((now_s, found.prefill_s))
            board.record_dispatch(found, 0.0, now_s)
            board.record_handoff(found)
            board.record_end(found, 0.0)
    assert begun, "the first one is free"
    for (before_s, prefill_s), (after_s, _) in zip(begun, begun[1:], strict=False):
        decoding_s = after_s - before_s - prefill_s
        assert prefill_s <= 0.05 * decoding_s + 1e-9


def test_a_remainder_that_takes_longer_delays_the_next_one() -> None:
    board = Board(COSTS, [(NEAR, LOCAL), (FAR, REMOTE)], view().links, slots=4)
    board.assign(DECODE, "decode", usable=True)
    found = taken(SHORT, board.view(10.0, HELD, {}), rules(slowdown=0.05))
    board.record_dispatch(found, 0.0, 10.0)
    planned_s = board.node(DECODE).next_remainder_s
    assert planned_s == pytest.approx(10.0 + 21 * found.prefill_s)
    board.record_handoff(found, 10.0, 0.5 * found.prefill_s)
    assert board.node(DECODE).next_remainder_s == planned_s
    board.record_dispatch(found, 0.0, 10.0)
    board.record_handoff(found, 10.0, 3 * found.prefill_s)
    assert board.node(DECODE).next_remainder_s == pytest.approx(10.0 + 63 * found.prefill_s)
