"""A raised threshold never makes a request later than the plan's threshold would."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from prfaas.config.deployment import PaperSection, SchedulerSection
from prfaas.scheduler.congestion import LinkHealth, LinkVerdict
from prfaas.scheduler.forecast import forecast
from prfaas.scheduler.lookup.prefixes import group_prefixes
from prfaas.scheduler.options import Option
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.short_term import adjust, route
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.scheduler.view import ClusterView, LinkId, LinkView, NodeView, View
from prfaas.types import ClusterId, NodeId
from tests.scheduler.views import COSTS, FAR, NEAR, OUT, PLAN, Hit, state, view

NOW_S = 100.0
FARTHER = ClusterId("farther")
NODES = {
    cluster: tuple(NodeId(f"{cluster}-{index}") for index in range(4))
    for cluster in (NEAR, FAR, FARTHER)
}
PREFILL_S = COSTS.prefill_s | {FARTHER: lambda new, cached: 2 * COSTS.prefill_s[FAR](new, cached)}
THRESHOLD = PLAN.threshold_tokens


def node_views(cluster: ClusterId) -> st.SearchStrategy[ClusterView]:
    """The local cluster has nodes of both roles; which of them can be used is drawn."""
    roles = ["prefill", "decode", "prefill", "decode"] if cluster == NEAR else ["prefill"] * 4
    kinds = st.tuples(
        st.sampled_from([True] * 7 + [False]),
        st.floats(NOW_S - 10, NOW_S + 20),  # when it is free
        st.integers(0, 12),  # decodes, of 4 slots
        st.sampled_from([0.0, 1e6, float("inf")]),  # decode memory
    )
    return st.lists(kinds, min_size=2, max_size=4).map(
        lambda seen: ClusterView(
            cluster,
            tuple(
                NodeView(name, role, usable, free_at_s, 0, active, 4, memory)
                for name, role, (usable, free_at_s, active, memory) in zip(
                    NODES[cluster], roles, seen, strict=False
                )
            ),
        )
    )


hits = st.builds(
    lambda blocks, more: Hit(blocks * 64, (blocks + more) * 64),
    st.integers(1, 60),
    st.integers(0, 10),
)
links = st.builds(
    LinkView,
    st.sampled_from([True] * 7 + [False]),
    st.floats(1e6, 1e10),
    st.floats(0, 0.2),
    st.none(),
    st.floats(0, 1e8),
)
link_states = st.builds(
    LinkState,
    st.sampled_from(LinkVerdict).map(LinkHealth),
    st.none() | st.floats(1e5, 1e10),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    remotes = (draw(node_views(FAR)), draw(node_views(FARTHER)))[: draw(st.integers(1, 2))]
    local = draw(node_views(NEAR))
    names = [node.node for cluster in (local, *remotes) for node in cluster.nodes]
    ways = [way for r in remotes for way in ((r.cluster, NEAR), (NEAR, r.cluster))]
    return View(
        now_s=NOW_S,
        local=local,
        remotes=remotes,
        links={way: draw(links) for way in ways},
        costs=replace(COSTS, prefill_s=PREFILL_S),
        cached=group_prefixes(draw(st.just({}) | st.dictionaries(st.sampled_from(names), hits))),
        held={},
    )


@st.composite
def states(draw: st.DrawFn) -> ShortTermState:
    known: Mapping[LinkId, LinkState] = {
        way: draw(link_states)
        for remote in (FAR, FARTHER)
        for way in ((remote, NEAR), (NEAR, remote))
        if draw(st.booleans())
    }
    hold_s = draw(st.sampled_from([0.0, 5.0]))  # whether the factor may change now
    rules = PaperSection(surge_wait_s=1.0, calm_wait_s=0.5, limit=8.0, hold_s=hold_s)
    section = SchedulerSection(policy="paper", paper=rules)
    return ShortTermState(section, known, draw(st.sampled_from([2.0, 4.0, 8.0])), NOW_S - 1)


def ttft_s(request: Request, way: Route, seen: View, how: ShortTermState) -> float:
    nodes = {n.node: n for cluster in (seen.local, *seen.remotes) for n in cluster.nodes}
    ready = [seen.now_s, nodes[way.prefill].free_at_s, *(NOW_S + c.seconds for c in way.copies)]
    option = Option(
        way.cluster, way.prefill, way.cached_tokens, max(ready), way.prefill_s, way.copies
    )
    return forecast(request, option, seen, how).ttft_s


tokens_around = st.integers(1, 10 * THRESHOLD) | st.integers(THRESHOLD + 1, 2 * THRESHOLD)


@given(tokens_around, views(), states())
def test_no_request_is_later_for_a_raised_threshold(
    tokens: int, seen: View, how: ShortTermState
) -> None:
    adjusted = adjust(how, seen, NOW_S)
    request = Request(1, tokens)
    placed = route(request, seen, PLAN, adjusted)
    alone = route(request, seen, PLAN, replace(adjusted, threshold_factor=1.0))
    if not isinstance(placed, Route):
        assert not isinstance(alone, Route)
        return
    assert isinstance(alone, Route)
    event(f"factor {adjusted.threshold_factor}, reason: {placed.reason}")
    raised_s = ttft_s(request, placed, seen, adjusted)
    assert raised_s <= ttft_s(request, alone, seen, adjusted)


def test_the_reason_explains_what_the_raised_threshold_did() -> None:
    raised = replace(state("paper"), threshold_factor=2.0)
    request = Request(1, THRESHOLD * 2)
    idle = route(request, view(), PLAN, raised)
    assert isinstance(idle, Route) and idle.offloaded
    assert idle.reason == "long: the raised threshold would keep it, but local prefill is later"
    busy_link = route(request, view(pending_bytes=1e9), PLAN, raised)
    assert isinstance(busy_link, Route) and not busy_link.offloaded
    assert "keeps it" in busy_link.reason


def test_the_comparison_uses_the_estimated_bandwidth() -> None:
    slow = LinkState(LinkHealth(LinkVerdict.CONGESTED), bps=1e6)
    raised = replace(state("paper"), threshold_factor=2.0, links={OUT: slow})
    kept = route(Request(1, THRESHOLD * 2), view(), PLAN, raised)
    assert isinstance(kept, Route) and not kept.offloaded
