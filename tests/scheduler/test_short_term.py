from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.deployment import AdaptiveSection, PaperSection, SchedulerSection
from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.request import Request, Route, is_offloadable
from prfaas.scheduler.short_term import adjust, has_room, route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, View
from prfaas.scheduler.waiting import HeldWork, Hold, length_class
from prfaas.sim.network.links import STANDING_S
from prfaas.types import ClusterId, LinkStats
from tests.scheduler.views import (
    FAR,
    LOCAL,
    NEAR,
    OUT,
    PLAN,
    REMOTE,
    Hit,
    free_times,
    policies,
    requests,
    state,
    view,
    views,
)

THRESHOLD = PLAN.threshold_tokens


def routed(request: Request, seen: View, how: ShortTermState, threshold: int = THRESHOLD) -> Route:
    way = route(request, seen, replace(PLAN, threshold_tokens=threshold), how)
    assert isinstance(way, Route), way
    return way


# What holds whatever the state of the world -------------------------------------------------------


@given(requests, views, policies, st.sampled_from(LinkVerdict))
def test_no_route_uses_a_lost_node_or_a_link_that_is_down(
    request: Request, seen: View, policy: str, verdict: LinkVerdict
) -> None:
    way = route(request, seen, PLAN, state(policy, verdict))
    clusters = {c.cluster: {n.node: n for n in c.nodes} for c in (seen.local, *seen.remotes)}
    usable = {n for nodes in clusters.values() for n, v in nodes.items() if v.usable}
    prefills = [n for c in clusters.values() for n, v in c.items() if v.role == "prefill"]
    if isinstance(way, Hold):
        far = seen.links[OUT].up and is_offloadable(request)
        reach = [n for n in prefills if n in usable and (n in LOCAL or far)]
        if way.cluster is None:
            assert not usable & set(LOCAL), "no node could take it"
        elif reach and usable & set(LOCAL[2:]):
            assert policy == "adaptive", "others bind at once"
            free = [clusters[way.cluster][n].free_at_s for n in reach if n in clusters[way.cluster]]
            assert min(free) > seen.now_s
        return
    assert way.prefill in usable and way.decode in usable
    assert way.alone or way.prefill in prefills and way.decode in LOCAL[2:]
    assert way.offloaded == (way.cluster == FAR) == (way.prefill in REMOTE)
    assert seen.links[OUT].up or not way.offloaded
    for copy in way.copies:
        assert copy.source in usable and copy.target == way.prefill
        near = (copy.source in LOCAL) == (copy.target in LOCAL)
        assert near or seen.links[OUT].up
        found = seen.cached[copy.source]
        within = found.tokens if found.pool_tokens is None else found.pool_tokens
        across = within if found.remote_pool_tokens is None else found.remote_pool_tokens
        assert copy.tokens == (within if near else across), "what the engine itself has stays there"
    assert 0 <= way.cached_tokens < request.prompt_tokens
    assert 0 <= way.transfer_tokens <= request.prompt_tokens


@given(requests, views, policies, st.sampled_from([LinkVerdict.BUILDING, LinkVerdict.CONGESTED]))
def test_no_copy_crosses_a_scarce_link(
    request: Request, seen: View, policy: str, verdict: LinkVerdict
) -> None:
    way = route(request, seen, PLAN, state(policy, verdict))
    for copy in () if isinstance(way, Hold) else way.copies:
        assert (copy.source in LOCAL) == (copy.target in LOCAL)


@given(requests, views, st.integers(0, 5000), st.integers(0, 5000))
def test_a_higher_threshold_never_offloads_more(
    request: Request, seen: View, one: int, other: int
) -> None:
    low, high = sorted((one, other))
    lower = route(request, seen, replace(PLAN, threshold_tokens=low), state("paper"))
    higher = route(request, seen, replace(PLAN, threshold_tokens=high), state("paper"))
    if isinstance(lower, Hold) or isinstance(higher, Hold):
        assert isinstance(lower, Hold) and isinstance(higher, Hold)
    elif higher.offloaded:
        local = [n for n in seen.local.nodes if n.role == "prefill" and n.usable]
        assert lower.offloaded or not local


@given(st.integers(1, 4000), st.integers(0, 15), st.sampled_from(LinkVerdict), free_times)
def test_the_uncached_length_decides(
    uncached: int, blocks: int, verdict: LinkVerdict, free: dict
) -> None:
    """However long the prompt: what the PD cluster has of it does not count."""
    held = blocks * 64
    cached = {LOCAL[0]: Hit(held, held)} if held else {}
    seen = view(cached, free_at_s=free)
    way = routed(Request(1, uncached + held), seen, state("paper", verdict))
    assert way.offloaded == (uncached > THRESHOLD)


@given(requests, views, policies, st.sampled_from(LinkVerdict))
def test_the_same_input_gives_the_same_route(
    request: Request, seen: View, policy: str, verdict: LinkVerdict
) -> None:
    how = state(policy, verdict)
    assert route(request, seen, PLAN, how) == route(request, seen, PLAN, how)


# Paper --------------------------------------------------------------------------------------------


def test_a_remote_prefix_counts_only_while_bandwidth_is_abundant() -> None:
    tokens = THRESHOLD + 640
    seen = view({REMOTE[0]: Hit(640, 640)})
    near = routed(Request(1, tokens), seen, state("paper"))
    assert not near.offloaded and near.cached_tokens == 640
    assert [(c.source, c.target) for c in near.copies] == [(REMOTE[0], near.prefill)]
    far = routed(Request(1, tokens), seen, state("paper", LinkVerdict.BUILDING))
    assert far.offloaded and far.prefill == REMOTE[0] and not far.copies


def test_a_local_prefix_is_copied_for_a_long_request_while_bandwidth_is_abundant() -> None:
    seen = view({LOCAL[0]: Hit(1280, 1280)})
    request = Request(1, 1280 + THRESHOLD + 1)
    way = routed(request, seen, state("paper"))
    assert way.offloaded and way.cached_tokens == 1280
    assert [c.source for c in way.copies] == [LOCAL[0]]
    alone = routed(request, seen, state("paper", LinkVerdict.CONGESTED))
    assert alone.offloaded and alone.cached_tokens == 0


def test_a_prefix_is_copied_from_a_busy_node_to_a_free_one() -> None:
    seen = view({LOCAL[0]: Hit(640, 640)}, free_at_s={LOCAL[0]: 130.0})
    way = routed(Request(1, 700), seen, state("paper"))
    assert way.prefill == LOCAL[1] and way.cached_tokens == 640
    assert way.copies[0].source == LOCAL[0]


def test_an_engines_own_cache_is_used_where_it_is_and_not_copied() -> None:
    """The engine has 1280 tokens; its pool has 640 for its cluster, and none for others."""
    seen = view({LOCAL[0]: Hit(1280, 640, 640, 0)}, free_at_s={LOCAL[0]: 130.0})
    way = routed(Request(1, 1300), seen, state("paper"))
    assert way.prefill == LOCAL[1] and way.cached_tokens == 640
    assert [(copy.source, copy.tokens) for copy in way.copies] == [(LOCAL[0], 640)]
    free = routed(Request(1, 1300), view(seen.cached), state("paper"))
    assert free.prefill == LOCAL[0] and free.cached_tokens == 1280 and not free.copies
    far = routed(Request(1, 1280 + THRESHOLD + 1), seen, state("paper"))
    assert far.offloaded and far.cached_tokens == 0 and not far.copies


def test_what_a_prefill_node_of_the_pd_cluster_has_itself_counts_against_the_threshold() -> None:
    request = Request(1, 640 + THRESHOLD)
    prefills, decodes = LOCAL[0], LOCAL[3]
    assert not routed(request, view({prefills: Hit(640, 0, 0)}), state("paper")).offloaded
    assert routed(request, view({decodes: Hit(640, 0, 0)}), state("paper")).offloaded


def test_the_holder_is_preferred_while_it_is_free() -> None:
    seen = view({LOCAL[1]: Hit(640, 640)})
    way = routed(Request(1, 700), seen, state("paper"))
    assert way.prefill == LOCAL[1] and not way.copies


def test_tokens_that_the_decode_node_holds_are_not_transferred() -> None:
    seen = view({LOCAL[3]: Hit(0, 640)})
    way = routed(Request(1, THRESHOLD + 641), seen, state("paper"))
    assert way.decode == LOCAL[3] and way.offloaded
    assert way.transfer_tokens == THRESHOLD + 1
    assert way.nbytes == way.transfer_tokens * 1000 + 50_000


@pytest.mark.parametrize(
    "request_",
    [
        Request(1, 5000, prompt_logprobs=True),
        Request(1, 5000, adapter="lora"),
        Request(1, 5000, multimodal=True),
    ],
)
@pytest.mark.parametrize("policy", ["paper", "adaptive", "remote"])
def test_requests_that_must_stay_local_stay_local(request_: Request, policy: str) -> None:
    assert routed(request_, view(), state(policy)).cluster == NEAR


def test_policies_local_and_remote() -> None:
    assert not routed(Request(1, 5000), view(), state("local")).offloaded
    assert routed(Request(1, 2), view(), state("remote")).offloaded
    fallback = routed(Request(1, 5000), view(dead=frozenset(LOCAL[:2])), state("local"))
    assert fallback.alone, "never remote"


# Adjustment ---------------------------------------------------------------------------------------


def stats(at_s: float, *, goodput_bps: float, backlog_bytes: int = 0) -> LinkStats:
    waited_s = min(1.0, backlog_bytes * 8 / goodput_bps)
    delivery_bps = goodput_bps if waited_s > STANDING_S else None
    return LinkStats(
        "near",
        at_s,
        1,
        goodput_bps,
        backlog_bytes,
        0,
        waited_s=waited_s,
        rtt_s=0.01,
        delivery_bps=delivery_bps,
    )


def with_stats(seen: View, report: LinkStats) -> View:
    return seen._replace(links={**seen.links, OUT: seen.links[OUT]._replace(stats=report)})


def after(
    seconds: int, how: ShortTermState, *, goodput_bps: float, backlog_bytes: int = 0
) -> ShortTermState:
    start = int(how.links[OUT].health.at_s or 0.0) + 1
    for now in range(start, start + seconds):
        report = stats(float(now), goodput_bps=goodput_bps, backlog_bytes=backlog_bytes)
        how = adjust(how, with_stats(view(now_s=now), report), now)
    return how


def test_a_full_link_raises_the_threshold_and_a_clear_one_lowers_it_again() -> None:
    rules = PaperSection(step=1.5, limit=2.0, hold_s=5.0)
    how = replace(state("paper"), rules=SchedulerSection(policy="paper", paper=rules))
    full = after(3, how, goodput_bps=0.95e8, backlog_bytes=1_000_000)
    assert full.links[OUT].health.verdict is LinkVerdict.BUILDING
    assert full.threshold_factor == 1.5, "once, until it shows what that did"
    fuller = after(20, full, goodput_bps=0.95e8, backlog_bytes=1_000_000)
    assert fuller.threshold_factor == 2.0
    request = Request(1, int(THRESHOLD * 1.9))
    waiting = view(pending_bytes=1e8)
    assert not routed(request, waiting, fuller).offloaded
    assert routed(request, view(), fuller).offloaded, "an idle remote cluster is sooner"
    calm = after(30, fuller, goodput_bps=0.1e8)
    assert calm.threshold_factor == 1.0
    assert routed(request, waiting, calm).offloaded


def test_a_full_link_does_not_raise_the_threshold_while_local_nodes_are_as_busy() -> None:
    how = state("paper", LinkVerdict.CONGESTED)
    assert adjust(how, view(), 100.0).threshold_factor > 1
    busy = view(free_at_s=dict.fromkeys(LOCAL[:2], 120.0))
    assert adjust(how, busy, 100.0).threshold_factor == 1
    raised = replace(how, threshold_factor=2.0)
    assert adjust(raised, busy, 100.0).threshold_factor == 1
    busier = view(free_at_s={**dict.fromkeys(LOCAL[:2], 120.0), **dict.fromkeys(REMOTE, 140.0)})
    assert adjust(how, busier, 100.0).threshold_factor > 1, "requests gain from local prefill"


def test_one_of_two_full_links_does_not_raise_the_threshold() -> None:
    other = ClusterId("other")
    seen = view()
    both = seen._replace(
        remotes=(*seen.remotes, ClusterView(other, seen.remotes[0].nodes)),
        links={**seen.links, (other, NEAR): seen.links[OUT]},
    )
    how = state("paper", LinkVerdict.CONGESTED)
    assert adjust(how, both, 100.0).threshold_factor == 1
    known = how.links[OUT]
    how = replace(how, links={**how.links, (other, NEAR): known})
    assert adjust(how, both, 100.0).threshold_factor > 1


def test_a_queue_at_prfaas_raises_the_threshold() -> None:
    how = state("paper")
    surge = view(free_at_s=dict.fromkeys(REMOTE, 120.0))
    assert adjust(how, surge, 100.0).threshold_factor > 1
    both = view(free_at_s=dict.fromkeys(LOCAL + REMOTE, 120.0))
    assert adjust(how, both, 100.0).threshold_factor == 1, "no request gains"


def test_a_slow_link_is_slow_until_it_is_clear_again() -> None:
    slow = after(3, state("adaptive"), goodput_bps=1e7, backlog_bytes=10_000_000)
    assert slow.links[OUT].bps == 1e7
    still = after(1, slow, goodput_bps=5e6)
    assert still.links[OUT].bps == 1e7
    assert after(10, still, goodput_bps=5e6).links[OUT].bps is None


def test_a_link_that_carries_nothing_is_slow_at_once() -> None:
    calm = after(3, state("adaptive"), goodput_bps=1e7)
    stopped = LinkStats("near", 4.0, 1, 0.0, 1_000_000, 1_000_000, waited_s=1.0, rtt_s=0.01)
    how = adjust(calm, with_stats(view(now_s=4.0), stopped), 4.0)
    bps = how.links[OUT].bps
    assert how.links[OUT].health.verdict is not LinkVerdict.CLEAR
    assert bps is not None and bps <= 8e6
    assert not routed(Request(1, THRESHOLD * 2), view(pending_bytes=1e6), how).offloaded


def test_a_reported_rate_of_zero_is_no_bandwidth() -> None:
    """A kvd may report anything: a route over the link divides by its bandwidth."""
    how = state("remote")
    for now_s, backlog in ((4.0, 1_000_000), (5.0, 0)):
        report = LinkStats("near", now_s, 1, 0.0, backlog, 0, waited_s=1.0, delivery_bps=0.0)
        how = adjust(how, with_stats(view(now_s=now_s), report), now_s)
        assert how.links[OUT].bps != 0
        assert routed(Request(1, THRESHOLD * 2), view(), how).offloaded


def test_a_few_bytes_on_a_clear_link_do_not_measure_its_bandwidth() -> None:
    light = after(3, state("adaptive"), goodput_bps=1e6, backlog_bytes=10_000)
    assert light.links[OUT].health.verdict is LinkVerdict.CLEAR
    assert light.links[OUT].bps is None


# Adaptive -----------------------------------------------------------------------------------------


def test_adaptive_avoids_a_slow_link() -> None:
    request = Request(1, THRESHOLD * 2)
    assert routed(request, view(), state("adaptive")).offloaded
    slow = after(3, state("adaptive"), goodput_bps=1e6, backlog_bytes=10_000_000)
    assert not routed(request, view(), slow).offloaded
    promised = view(pending_bytes=1e9)
    assert not routed(request, promised, state("adaptive")).offloaded


def test_adaptive_avoids_a_queue_on_either_side() -> None:
    for tokens in (THRESHOLD // 2, THRESHOLD * 2):
        request = Request(1, tokens)
        far_busy = view(free_at_s=dict.fromkeys(REMOTE, 150.0))
        near_busy = view(free_at_s=dict.fromkeys(LOCAL, 150.0))
        assert not routed(request, far_busy, state("adaptive")).offloaded
        assert routed(request, near_busy, state("adaptive")).offloaded


def test_with_long_queues_adaptive_follows_the_plan() -> None:
    """With equal queues on both sides, short requests stay and long ones are offloaded, even if the
    other cluster would be faster now. All of them wait at the router, where requests that come soon
    after a long one overtake it."""
    busy = view(free_at_s=dict.fromkeys(LOCAL + REMOTE, 160.0))
    how = state("adaptive")
    short = route(Request(1, THRESHOLD // 4, 90.0), busy, PLAN, how)
    long = route(Request(2, THRESHOLD * 3, 89.0), busy, PLAN, how)
    assert isinstance(short, Hold) and short.cluster == NEAR
    assert isinstance(long, Hold) and long.cluster == FAR
    longest = route(Request(3, 5000, 89.0), busy, PLAN, how)
    assert isinstance(longest, Hold) and longest.precedence > long.precedence
    assert long.precedence > 89.0 + short.work_s


@given(
    st.integers(2, 5000),
    st.floats(110, 400),
    st.dictionaries(st.sampled_from([NEAR, FAR]), st.floats(0, 2000)),
)
def test_a_long_prefill_is_overtaken_for_at_most_a_share_of_its_wait(
    tokens: int, free_at_s: float, held_s: dict[ClusterId, float]
) -> None:
    """However long it is, and however many shorter ones follow."""
    held = {cluster: HeldWork().add(7, work_s) for cluster, work_s in held_s.items()}
    busy = view(free_at_s=dict.fromkeys(LOCAL + REMOTE, free_at_s), held=held)
    how = state("adaptive")
    hold = route(Request(1, tokens, 90.0), busy, PLAN, how)
    assert isinstance(hold, Hold) and hold.cluster is not None
    nodes = 2  # that prefill, in either cluster
    wait_s = free_at_s - busy.now_s + held_s.get(hold.cluster, 0.0) / nodes
    lead_s = hold.precedence - 90.0
    assert 0 <= lead_s <= how.rules.adaptive.overtaken_share * wait_s + 1e-9
    assert lead_s <= how.rules.adaptive.patience * hold.work_s**2 + 1e-9


def test_held_work_counts_as_a_queue() -> None:
    request = Request(1, THRESHOLD * 2)
    held = HeldWork().add(length_class(0.2), 400.0)
    assert routed(request, view(held={NEAR: held}), state("adaptive")).offloaded
    assert not routed(request, view(held={FAR: held}), state("adaptive")).offloaded


@given(
    st.integers(2, 5000),
    st.floats(0.1, 200),
    st.floats(-50, 300),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_a_new_request_overtakes_a_queue_until_its_first_is_overdue(
    tokens: int, work_s: float, overdue_s: float, share: float
) -> None:
    """All prefill nodes are idle, so there is room. The first request of the queue decides which
    one gets it."""
    adaptive = AdaptiveSection(overdue_share=share)
    how = ShortTermState(SchedulerSection(policy="adaptive", adaptive=adaptive))
    held = HeldWork(first=100.0 - overdue_s).add(length_class(work_s), work_s)
    seen = view(held={NEAR: held, FAR: held}, free_at_s=dict.fromkeys(LOCAL[2:], 1e3))
    way = route(Request(1, tokens, 100.0), seen, PLAN, how)
    nodes = 2  # that prefill, in either cluster
    assert isinstance(way, Hold) == (100.0 - held.first > share * work_s / nodes)
    if isinstance(way, Hold):
        assert way.cluster in (NEAR, FAR) and way.work_s > 0
        assert way.precedence >= 100.0 > held.first, "the one before it keeps its turn"


@given(st.integers(1, 5000), st.floats(0, 100), st.floats(0, 100), st.floats(0.1, 200))
def test_a_request_from_the_queue_does_not_wait_for_later_ones(
    tokens: int, arrived_s: float, later_s: float, work_s: float
) -> None:
    """Otherwise a node would stay idle although requests wait for it."""
    later = HeldWork(first=arrived_s + later_s).add(length_class(work_s), work_s)
    seen = view(held={NEAR: later, FAR: later})
    assert isinstance(route(Request(1, tokens, arrived_s), seen, PLAN, state("adaptive")), Route)


def test_other_policies_hold_no_requests() -> None:
    held = HeldWork(first=0.0).add(0, 0.1)
    for policy in ("paper", "local", "remote"):
        routed(Request(1, THRESHOLD, 100.0), view(held={NEAR: held, FAR: held}), state(policy))


def test_a_cluster_has_room_when_a_node_is_nearly_done() -> None:
    how = state("adaptive")
    limit_s = how.rules.adaptive.queue_s
    for wait_s, room in ((0.0, True), (limit_s, True), (limit_s + 0.1, False)):
        seen = view(free_at_s=dict.fromkeys(REMOTE, 100.0 + wait_s))
        assert has_room(FAR, seen, how) == room
    # Requests that were held for it then go elsewhere.
    assert has_room(FAR, view(dead=frozenset(REMOTE)), how)
