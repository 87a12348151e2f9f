"""Policy `adaptive`: the option of least predicted cost, given the present queues and links.

    cost = the request's own time to first token          waits, prefill, link drain, round trip
         + price * prefill seconds / T(threshold) there    the delay of later requests

A policy that minimises only the request's own time fills the faster cluster with every prompt and
leaves long prompts to the slow one. That is good for each request and worse for all. The plan gives
the exchange rate: at its threshold a prefill costs both clusters alike, so work is counted in units
of T(threshold) of its cluster. The price of a unit is the wait that it causes at the cluster, and
this grows with the cluster's present wait. Thus own time decides between idle clusters, the plan
decides between full ones, and a lost node or a slow link moves the boundary at once.

Where every queue is long enough, a request waits at the router (`make_hold`). Where a node has
room, a new request waits nevertheless if other requests have waited too long for that room
(`others_are_overdue`).
"""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.forecast import forecast
from prfaas.scheduler.options import (
    Option,
    PrefixSource,
    alone_option,
    best_option,
    estimated_bps,
    link_drain_s,
    prefix_across,
    prefix_within,
)
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, LinkId, View
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId

LEAST_COST = "least sum of its own time and the delay of later requests"
ONLY_WAY = "the only way"
ALONE_IS_CHEAPEST = "least cost where a decode node prefills for itself"


def choose_cheapest(
    request: Request, view: View, plan: Plan, state: ShortTermState, remotes: Sequence[ClusterView]
) -> tuple[Option | None, str]:
    """None where no node prefills for others."""
    options = alternatives(request, view, state, remotes)
    if not options:
        return None, ""
    alone = alone_option(request, view, state, by_choice=True)
    if alone is not None:
        options.append(alone)
    if len(options) == 1:
        return options[0], ONLY_WAY
    best = _cheapest(request, view, plan, state, options)
    return best, ALONE_IS_CHEAPEST if best.alone else LEAST_COST


def _cheapest(
    request: Request, view: View, plan: Plan, state: ShortTermState, options: Sequence[Option]
) -> Option:
    best, best_cost_s = options[0], float("inf")
    for option in options:
        cost_s = option_cost_s(request, option, view, plan, state)
        if cost_s < best_cost_s:
            best, best_cost_s = option, cost_s
    return best


def option_cost_s(
    request: Request, option: Option, view: View, plan: Plan, state: ShortTermState
) -> float:
    """The request's own time to first token, and the delay of later requests."""
    rules = state.rules.adaptive
    threshold = max(plan.threshold_tokens, 1)
    cost_s = _own_time_s(request, option, view, state, threshold)
    wait_s = option.start_s - view.now_s
    if option.alone:
        # Those that decode on the node are delayed, too. It may be given the other role as well,
        # so that its time has the same price as that of the cluster's prefill nodes.
        cost_s += option.delays_s
        if option.by_choice:
            cost_s += state.rules.alone.margin_s
    elif option.cluster in view.held:
        wait_s += view.held[option.cluster].total_s / _prefill_nodes(option.cluster, view)
    # During a wait, about as many requests arrive as are waiting now. So the present wait measures
    # what one more unit of work costs the next requests.
    price_s = rules.least_price_s + wait_s
    cost_s += price_s * option.prefill_s / view.costs.prefill_s[option.cluster](threshold, 0)
    if len(view.remotes) > 1 and option.cluster != view.local.cluster:
        cost_s += _link_price_s(request, option, view, state, threshold)
    if option.copies:
        cost_s += rules.copy_margin_s
    return cost_s


def _link_price_s(
    request: Request, option: Option, view: View, state: ShortTermState, threshold: int
) -> float:
    """The delay of later requests on the option's link, by the same rule as that of later prefills:
    the wait that the request finds there, times its bytes in units of those at the threshold. The
    wait is what is left of the link's backlog when the prefill ends.

    Without this price the longest prompts all choose the narrowest of several links, because only
    their own wait counts there. With one PrfaaS cluster the price is left out: local prefill is the
    only other way, whose wait bounds that of the link, and in simulations of a link that is slow
    for a minute the mean time to first token was up to 4% higher with the price."""
    link_id = (option.cluster, view.local.cluster)
    drain_s = _drain_s(link_id, view, state, threshold)
    wait_s = drain_s - (option.end_s - view.now_s)
    if view.shared:
        wait_s -= _wait_at_router_s(option, view)
    if wait_s <= 0:
        return 0.0
    costs, tokens = view.costs, request.prompt_tokens
    nbytes = costs.handoff_bytes(tokens, tokens - option.cached_tokens)
    units = nbytes / costs.handoff_bytes(threshold, threshold)
    return wait_s * units


def _own_time_s(
    request: Request, option: Option, view: View, state: ShortTermState, threshold: int
) -> float:
    """The request's time to first token, with its wait at the router."""
    found = forecast(request, option, view, state)
    own_s = found.ttft_s + _wait_at_router_s(option, view)
    waits_for_link = view.shared and option.cluster in view.held
    if not waits_for_link or option.cluster == view.local.cluster:
        return own_s
    # The requests before it need the link, too.
    link_id = (option.cluster, view.local.cluster)
    link, tokens = view.links[link_id], request.prompt_tokens
    nbytes = view.costs.handoff_bytes(tokens, tokens - option.cached_tokens)
    sent_s = nbytes * 8 / estimated_bps(link_id, link, state)
    sent_s += _drain_s(link_id, view, state, threshold)
    return max(own_s, sent_s + link.rtt_s + found.decode_s)


def _wait_at_router_s(option: Option, view: View) -> float:
    """A request that a decode node serves alone does not wait there for a prefill node."""
    held = view.held.get(option.cluster)
    if held is None or option.alone:
        return 0.0
    return held.up_to(option.prefill_s) / _prefill_nodes(option.cluster, view)


def _drain_s(link_id: LinkId, view: View, state: ShortTermState, threshold: int) -> float:
    """Seconds until the link has sent what was dispatched to it. Where requests wait at the router
    for links, also about what the home's own ones that wait for the PrfaaS cluster will send: as if
    each were as long as the threshold."""
    link, costs = view.links[link_id], view.costs
    drain_s = link_drain_s(link_id, link, state)
    held = view.held.get(link_id[0])
    if held is None or not view.shared:
        return drain_s
    count = held.own_s / costs.prefill_s[link_id[0]](threshold, 0)
    nbytes = count * costs.handoff_bytes(threshold, threshold)
    return drain_s + nbytes * 8 / estimated_bps(link_id, link, state)


def alternatives(
    request: Request, view: View, state: ShortTermState, remotes: Sequence[ClusterView]
) -> list[Option]:
    """The best node of every cluster. Where another cluster holds a longer prefix and the link from
    it is clear, also the best node with a copy of that prefix."""
    clusters = [view.local, *remotes]
    found: list[Option] = []
    for cluster in clusters:
        own = prefix_within(cluster, view)
        option = best_option(request, cluster, view, own)
        if option is None:
            continue
        found.append(option)
        if view.cached:
            foreign = _longer_foreign_prefix(own, cluster, clusters, view, state)
            if foreign is not None:
                copied = best_option(request, cluster, view, foreign)
                if copied is not None and copied.copies:
                    found.append(copied)
    return found


def make_hold(
    request: Request, option: Option, view: View, state: ShortTermState, reason: str
) -> Hold:
    """Late binding: a node gets little more work than it needs to stay busy. Waiting requests go in
    order of arrival, with one exception: shorter prefills that arrive soon after a long one
    overtake it. Few long prefills hold most of the work, so most requests wait less. The time
    within which a prefill may be overtaken grows with the square of its length, so that ordinary
    requests keep their order, and is bounded by a share of the wait that the request finds. In a
    burst many shorter requests follow, and without the bound the longest prefills would be last."""
    rules = state.rules.adaptive
    wait_s = option.start_s - view.now_s + _queued_s_per_node(option.cluster, view)
    lead_s = min(rules.patience * option.prefill_s**2, rules.overtaken_share * wait_s)
    return Hold(
        reason,
        option.cluster,
        option.prefill_s,
        request.arrived_s + lead_s,
    )


def others_are_overdue(request: Request, option: Option, view: View, state: ShortTermState) -> bool:
    """Whether a free node is for the requests that wait for its cluster, and not for this one.

    A new request may take a free node: most requests are short, and then they do not wait. But in a
    burst new requests come faster than nodes become free, and the queue would not move while they
    overtake it. So the first request of the queue may be overdue (later than its arrival plus its
    lead) only by a share of the wait that the whole queue amounts to.

    The rule compares times of arrival. So a request from the queue never waits for the requests
    left in the queue, and a request that changes clusters keeps its age."""
    held = view.held.get(option.cluster)
    if held is None:
        return False
    overdue_s = request.arrived_s - held.first
    return overdue_s > state.rules.adaptive.overdue_share * _queued_s_per_node(option.cluster, view)


def _queued_s_per_node(cluster: ClusterId, view: View) -> float:
    """Prefill seconds that wait at the router, per prefill node of the cluster."""
    held = view.held.get(cluster)
    return 0.0 if held is None else held.total_s / _prefill_nodes(cluster, view)


def _prefill_nodes(cluster: ClusterId, view: View) -> int:
    """The nodes that prefill what waits for the cluster: where no node has the role, the decode
    nodes, each for itself. At least one."""
    ranks = view.cluster(cluster).ranks()
    return max(1, len(ranks.prefill_free_at_s) or len(ranks.active))


def _longer_foreign_prefix(
    own: PrefixSource | None,
    cluster: ClusterView,
    clusters: Sequence[ClusterView],
    view: View,
    state: ShortTermState,
) -> PrefixSource | None:
    best = own
    for other in clusters:
        if other is cluster or not _link_has_room(other, cluster, view, state):
            continue
        foreign = prefix_across(other, cluster, view, state)
        if foreign is not None and (best is None or foreign.tokens > best.tokens):
            best = foreign
    return best if best is not own else None


def _link_has_room(
    source: ClusterView, target: ClusterView, view: View, state: ShortTermState
) -> bool:
    """Whether the link can carry a copy in addition to its hand-offs."""
    link_id = (source.cluster, target.cluster)
    link = view.links.get(link_id)
    known = state.links.get(link_id)
    if link is None or (known is not None and known.health.verdict is not LinkVerdict.CLEAR):
        return False
    return link_drain_s(link_id, link, state) < 1.0
