"""Policy `adaptive`: the way of least predicted cost under the live state of queues and links.

    cost = the request's own time to first token          waits, prefill, link drain, round trip
         + price * prefill seconds / T(threshold) there    what it takes from those behind it

Own time alone would fill the faster cluster with whatever comes and leave long prompts to the slow
one: good for each, worse for all. The plan knows the exchange rate: at its threshold a prefill
costs both clusters alike, so work is counted in units of T(threshold) of its cluster. The price of
a unit is the wait it causes there, and that grows with the cluster's present wait. Idle clusters
are thus used by own time, full ones by the plan, and a lost node or a slow link shifts the border
at once. Where every queue is long enough, a request waits at the router (`make_hold`), and where a
node has room, a new request waits nevertheless if others have waited too long for that room
(`others_are_overdue`).
"""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.forecast import forecast
from prfaas.scheduler.options import (
    Option,
    PrefixSource,
    best_option,
    estimated_bps,
    prefix_across,
    prefix_within,
)
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, View
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId


def choose_cheapest(
    request: Request, view: View, plan: Plan, state: ShortTermState, remotes: Sequence[ClusterView]
) -> tuple[Option | None, str]:
    options = alternatives(request, view, state, remotes)
    if not options:
        return None, "no node prefills"
    if len(options) == 1:
        return options[0], "the only way"
    rules = state.rules.adaptive
    threshold = max(plan.threshold_tokens, 1)
    best, best_cost = options[0], float("inf")
    for option in options:
        wait_s = option.start_s - view.now_s
        cost = sum(forecast(request, option, view, state))
        if option.cluster in view.held:
            held = view.held[option.cluster]
            nodes = _prefill_nodes(option.cluster, view)
            cost += held.up_to(option.prefill_s) / nodes
            wait_s += held.total_s / nodes
        # About as many come during a wait as there are waiting: the present wait is the measure of
        # what one more unit of work costs those who come next.
        price_s = rules.least_price_s + rules.congestion_price * wait_s
        cost += price_s * option.prefill_s / view.costs.prefill_s[option.cluster](threshold, 0)
        if option.copies:
            cost += state.rules.adaptive.copy_margin_s
        if cost < best_cost:
            best, best_cost = option, cost
    return best, "least cost now"


def alternatives(
    request: Request, view: View, state: ShortTermState, remotes: Sequence[ClusterView]
) -> list[Option]:
    """The best node of every cluster, and again with a prefix of another cluster where its link is
    clear and the prefix is longer than the cluster's own."""
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
    """Late binding: a node is given little more than it needs to stay busy. Requests that wait go
    in order of arrival, except that a long prefill lets shorter ones pass that arrive soon after
    it: few long ones hold most of the work, so most requests wait less. How soon grows with the
    square of the prefill's length, so that ordinary requests keep their order. It is bounded by a
    share of the wait that the request finds. In a burst many shorter requests follow, and without
    the bound the longest prefills would be the last of all."""
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
    """Whether a node that is free belongs to the requests that wait for its cluster, and not to
    this one. A new request may take the node: most requests are short, and then wait for nothing.
    But in a burst new requests come faster than nodes become free, and the line would stand still
    while they pass. So the first request in the line may be overdue (beyond its arrival and its
    lead) only by a share of the wait that the whole line stands for.

    The comparison is with the time of arrival, so a request that comes from the line is never
    behind those that are left in it, and a request that changes clusters keeps its age."""
    held = view.held.get(option.cluster)
    if held is None:
        return False
    overdue_s = request.arrived_s - held.first
    return overdue_s > state.rules.adaptive.overdue_share * _queued_s_per_node(option.cluster, view)


def _queued_s_per_node(cluster: ClusterId, view: View) -> float:
    """The prefill time that the router holds back for each node of the cluster."""
    held = view.held.get(cluster)
    return 0.0 if held is None else held.total_s / _prefill_nodes(cluster, view)


def _prefill_nodes(cluster: ClusterId, view: View) -> int:
    seen = next(c for c in (view.local, *view.remotes) if c.cluster == cluster)
    return sum(node.usable and node.role == "prefill" for node in seen.nodes)


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
        there = prefix_across(other, cluster, view, state)
        if there is not None and (best is None or there.tokens > best.tokens):
            best = there
    return best if best is not own else None


def _link_has_room(
    source: ClusterView, target: ClusterView, view: View, state: ShortTermState
) -> bool:
    """Whether the link could take a copy beside the hand-offs it carries."""
    link_id = (source.cluster, target.cluster)
    link = view.links.get(link_id)
    known = state.links.get(link_id)
    if link is None or (known is not None and known.health.verdict is not LinkVerdict.CLEAR):
        return False
    return link.pending_bytes * 8 / estimated_bps(link_id, link, state) < 1.0
