"""Short-term routing: which nodes prefill and decode a request, and from which cached prefix.

Pure; the gateway and the simulator both call `route` for every request and `adjust` after every
round of reports. Policies: `paper` (section 3.4.3), `local`, `remote`, and `adaptive` (in
`adaptive.py`). Under every policy, a request that no prefill node can take is served by a decode
node alone. This module does not know HTTP, sockets or clocks.

    bandwidth scarce      each cluster counts only its own cache
    bandwidth abundant    the best cache of any cluster counts, and its prefix is copied
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.config.deployment import SchedulerSection
from prfaas.scheduler.adaptive import choose_cheapest, make_hold, others_are_overdue
from prfaas.scheduler.congestion import DEFAULT_RULES, LinkVerdict, judge
from prfaas.scheduler.forecast import forecast
from prfaas.scheduler.homes.shares import Credits, choose_by_share
from prfaas.scheduler.options import (
    Option,
    PrefixSource,
    alone_option,
    best_option,
    longest_own,
    make_route,
    prefix_across,
    prefix_within,
)
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import (
    Request,
    Route,
    alone_reason,
    is_offloadable,
)
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.scheduler.view import ClusterView, LinkId, LinkView, View
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId

# `paper` raises its threshold for a link whose backlog lasts this many times as long as the wait
# for a local node, however busy the local nodes are.
_MUCH_LONGER = 2.0

SHORT = "short: at most the threshold is uncached"
LONG = "long: more than the threshold is uncached"
# Locality is a preference and never a reason to refuse.
NOT_THERE = ", but no node there can take it"
KEPT = "the raised threshold keeps it: local prefill is no later than remote"
NOT_KEPT = "long: the raised threshold would keep it, but local prefill is later"
ALONE = "no prefill node can take it: a decode node prefills for itself"
QUEUES_ARE_LONG = "every prefill queue of the cluster is long enough"
NOTHING_DECODES = "no node decodes"
POLICY_LOCAL = "policy local"
POLICY_REMOTE = "policy remote"


def route(request: Request, view: View, plan: Plan, state: ShortTermState) -> Route | Hold:
    """The route of `request`, or the hold under which it waits. Reserves nothing: the caller
    records a route on the board, and puts a held request into the waiting room."""
    option, reason, credits = _choose(request, view, plan, state)
    if option is not None and (option.alone or view.local.ranks().active.nodes):
        chosen = _dispatch_or_hold(request, option, reason, view, state)
        if isinstance(chosen, Route) and credits:
            chosen = chosen._replace(credits=credits)
        return chosen
    # No prefill node can take the request, or no node decodes what others prefill.
    alone = alone_option(request, view, state, by_choice=False)
    if alone is None:
        return Hold(NOTHING_DECODES, None, 0.0, request.arrived_s)
    return _dispatch_or_hold(request, alone, ALONE, view, state)


class _Decided(NamedTuple):
    option: Option | None
    reason: str = ""
    credits: Credits = ()


def _choose(request: Request, view: View, plan: Plan, state: ShortTermState) -> _Decided:
    """The option that the policy prefers. None where no prefill node can take the request."""
    stays = alone_reason(request)
    if stays is not None:
        return _Decided(alone_option(request, view, state, by_choice=False), stays)
    remotes = reachable_remotes(request, view)
    match state.rules.policy:
        case "paper":
            return _paper(request, view, plan, state, remotes)
        case "adaptive":
            return _Decided(*choose_cheapest(request, view, plan, state, remotes))
        case "local":
            near = best_option(request, view.local, view, prefix_within(view.local, view))
            return _Decided(near, POLICY_LOCAL)
        case "remote":
            return _remote(request, view, plan, remotes)


def _dispatch_or_hold(
    request: Request, option: Option, reason: str, view: View, state: ShortTermState
) -> Route | Hold:
    # A decode node alone takes no prefill node, so that the request does not wait for one. Where
    # one of the roles is missing, the nodes that are left have a queue like prefill nodes.
    ranks = view.local.ranks()
    waits = not option.alone or not (ranks.prefill_free_at_s.nodes and ranks.active.nodes)
    if state.rules.policy == "adaptive" and waits:
        if option.start_s - view.now_s > state.rules.adaptive.queue_s and not has_room(
            option.cluster, view, state
        ):
            return make_hold(request, option, view, state, QUEUES_ARE_LONG)
        if others_are_overdue(request, option, view, state):
            return make_hold(request, option, view, state, "other requests have waited longer")
    chosen = make_route(request, option, view, state, reason)
    assert chosen is not None, "a node decodes"
    return chosen


def has_room(cluster: ClusterId, view: View, state: ShortTermState) -> bool:
    """Whether a prefill queue of `cluster` is short enough to retry the requests held for it. Also
    when no node prefills there any more: then these requests go elsewhere."""
    return has_room_at(view.cluster(cluster), view.now_s, state.rules)


def has_room_at(cluster: ClusterView, now_s: float, rules: SchedulerSection) -> bool:
    """The same for a cluster of any view: it may prefill for several PD clusters. Where no node of
    a PD cluster has the role, its decode nodes prefill for themselves."""
    ranks = cluster.ranks()
    free = ranks.prefill_free_at_s if ranks.prefill_free_at_s.nodes else ranks.decode_free_at_s
    return not free.nodes or free.least()[0] - now_s <= rules.adaptive.queue_s


def reachable_remotes(request: Request, view: View) -> list[ClusterView]:
    """PrfaaS clusters that may prefill this request and whose link is up."""
    if not is_offloadable(request):
        return []
    to = view.local.cluster
    return [remote for remote in view.remotes if view.links[remote.cluster, to].up]


def _paper(
    request: Request, view: View, plan: Plan, state: ShortTermState, remotes: Sequence[ClusterView]
) -> _Decided:
    """Short requests stay local, long ones are offloaded (section 3.4.3), and the plan's shares say
    to which PrfaaS cluster. A raised threshold keeps a request local only if its forecast TTFT
    there is at most that of every PrfaaS cluster. So a raised threshold never makes a request later
    than the plan's threshold would, whatever made the loop raise it."""
    prefixes: dict[ClusterId, PrefixSource | None] = {}
    counted = _count_prefixes(prefixes, view, state, remotes) if view.cached else 0
    uncached = request.prompt_tokens - counted
    near = best_option(request, view.local, view, prefixes.get(view.local.cluster))
    if uncached <= plan.threshold_tokens and near is not None:
        return _Decided(near, SHORT)
    far = [
        found
        for remote in remotes
        if (found := best_option(request, remote, view, prefixes.get(remote.cluster))) is not None
    ]
    if not far:
        return _Decided(near, LONG + NOT_THERE)
    turn, credits = _whose_turn(far, uncached, view, plan)
    if uncached <= plan.threshold_tokens:
        return _Decided(turn, SHORT + NOT_THERE, credits)
    if near is not None and uncached <= plan.threshold_tokens * state.threshold_factor:
        near_s = forecast(request, near, view, state).ttft_s
        if all(near_s <= forecast(request, option, view, state).ttft_s for option in far):
            return _Decided(near, KEPT)
        return _Decided(turn, NOT_KEPT, credits)
    return _Decided(turn, LONG, credits)


def _remote(request: Request, view: View, plan: Plan, remotes: Sequence[ClusterView]) -> _Decided:
    """Every request is offloaded, and the plan's shares say to which PrfaaS cluster."""
    far = [
        found
        for remote in remotes
        if (found := best_option(request, remote, view, prefix_within(remote, view))) is not None
    ]
    if not far:
        near = best_option(request, view.local, view, prefix_within(view.local, view))
        return _Decided(near, POLICY_REMOTE)
    uncached = request.prompt_tokens - max(option.cached_tokens for option in far)
    turn, credits = _whose_turn(far, uncached, view, plan)
    return _Decided(turn, POLICY_REMOTE, credits)


def _whose_turn(
    options: Sequence[Option], uncached: int, view: View, plan: Plan
) -> tuple[Option, Credits]:
    """The PrfaaS cluster whose turn it is by the plan's shares. Where the plan does not decide, the
    one whose prefill ends first."""
    if len(options) > 1:
        turn = choose_by_share(options, uncached, view, plan)
        if turn is not None:
            return turn.option, turn.credits
    return min(options, key=lambda option: option.end_s), ()


def _count_prefixes(
    prefixes: dict[ClusterId, PrefixSource | None],
    view: View,
    state: ShortTermState,
    remotes: Sequence[ClusterView],
) -> int:
    """Fills in the prefix that each cluster may resume from. Returns the cached length that counts
    against the threshold. A scarce link is not used for copies of prefixes: then each cluster
    counts only its own."""
    home = view.local
    best = prefix_within(home, view)
    for remote in remotes:
        abundant = _clear((remote.cluster, home.cluster), state)
        if abundant:
            best = _longer(best, prefix_across(remote, home, view, state))
        prefixes[remote.cluster] = _prefix_at(remote, view, state, abundant=abundant)
    prefixes[home.cluster] = best
    return max(0 if best is None else best.tokens, longest_own(home, view))


def _prefix_at(
    remote: ClusterView, view: View, state: ShortTermState, *, abundant: bool
) -> PrefixSource | None:
    """The best prefix for a prefill at `remote`."""
    own = prefix_within(remote, view)
    if abundant and _clear((view.local.cluster, remote.cluster), state):
        return _longer(own, prefix_across(view.local, remote, view, state))
    return own


def _longer(one: PrefixSource | None, other: PrefixSource | None) -> PrefixSource | None:
    if one is None or other is None:
        return one or other
    return other if other.tokens > one.tokens else one


def _clear(link: LinkId, state: ShortTermState) -> bool:
    known = state.links.get(link)
    return known is None or known.health.verdict is LinkVerdict.CLEAR


# State of the loop -------------------------------------------------------------------------------


def adjust(state: ShortTermState, view: View, now_s: float) -> ShortTermState:
    """The state after a round of reports: a verdict on every link, and the factor of the threshold,
    which rises while PrfaaS' egress or queue surges and returns to 1 afterwards."""
    links = {link_id: _update_link(link_id, link, state) for link_id, link in view.links.items()}
    factor, cause = _factor(state, links, view, now_s)
    if factor == state.threshold_factor:
        return ShortTermState(state.rules, links, factor, state.changed_s, state.cause)
    return ShortTermState(state.rules, links, factor, now_s, cause)


def _update_link(link_id: LinkId, link: LinkView, state: ShortTermState) -> LinkState:
    known = state.links.get(link_id) or LinkState()
    stats = link.stats
    if stats is None or stats.at_s == known.health.at_s:
        return known
    health = judge(known.health, stats, link.capacity_bps)
    if stats.delivery_bps:
        # While bytes wait, the delivery rate is the link's bandwidth. Where none arrives, a rate of
        # zero says less than how long they have waited, and no time can be predicted with it.
        return LinkState(health, stats.delivery_bps, stats.at_s)
    stuck = stats.backlog_bytes > 0 and stats.waited_s > 0 and not stats.goodput_bps
    if stuck and health.cause == "waiting":
        # Nothing arrives although bytes wait: with more than this bandwidth, the backlog would have
        # arrived by now.
        most_bps = stats.backlog_bytes * 8 / stats.waited_s
        bps = most_bps if known.bps is None else min(known.bps, most_bps)
        return LinkState(health, bps, stats.at_s)
    # One quiet second does not clear a slow link. The estimate stays until the verdict is clear and
    # no bytes have waited for as long as a verdict needs to improve.
    if known.bps_at_s is not None and (
        health.verdict is not LinkVerdict.CLEAR
        or stats.at_s - known.bps_at_s < DEFAULT_RULES.calm_s
    ):
        return LinkState(health, known.bps, known.bps_at_s)
    return LinkState(health)


def _factor(
    state: ShortTermState, links: dict[LinkId, LinkState], view: View, now_s: float
) -> tuple[float, str]:
    """The factor of the plan's threshold, and the reason for it."""
    rules = state.rules.paper
    if state.rules.policy != "paper" or rules.limit == 1 or now_s < state.changed_s + rules.hold_s:
        return state.threshold_factor, state.cause
    to = view.local.cluster
    surging = [
        remote.cluster
        for remote in view.remotes
        if links[remote.cluster, to].health.verdict is not LinkVerdict.CLEAR
    ]
    waits = [
        wait for remote in view.remotes if (wait := shortest_wait_s(remote, now_s)) is not None
    ]
    local_s = shortest_wait_s(view.local, now_s)
    if not waits or local_s is None:
        return 1.0, "only one side can prefill, so there is nothing to shift"
    excess_s = min(waits) - local_s
    raised = min(state.threshold_factor * rules.step, rules.limit)
    lowered = max(state.threshold_factor / rules.step, 1.0)
    # While one of several links is clear, the shares still send most requests as planned. A link
    # that the plan uses completely is never clear for long, and is no surge.
    if surging and len(surging) == len(view.remotes):
        # Where local nodes are nearly as busy, a shift to them would outlast the surge of the link.
        drain_s = min(_drain_s((name, to), view, links) for name in surging)
        if local_s <= max(rules.surge_wait_s, drain_s / _MUCH_LONGER):
            health = links[surging[0], to].health
            return raised, f"the link {surging[0]} -> {to} is {health.described}"
        if excess_s <= rules.surge_wait_s:
            return lowered, f"local nodes are busy for {local_s:.1f} s themselves"
    if excess_s > rules.surge_wait_s:
        return raised, f"PrfaaS nodes are busy for {excess_s:.1f} s longer than local ones"
    if excess_s < rules.calm_wait_s:
        return lowered, "links are clear and PrfaaS queues are short"
    return state.threshold_factor, state.cause


def _drain_s(link_id: LinkId, view: View, links: dict[LinkId, LinkState]) -> float:
    """Seconds until a link has sent what was dispatched to it."""
    link = view.links[link_id]
    bps = links[link_id].bps or link.capacity_bps
    return link.pending_bytes * 8 / bps


def shortest_wait_s(cluster: ClusterView, now_s: float) -> float | None:
    """Seconds until a node of the cluster can start another prefill; None if no node prefills."""
    free = cluster.ranks().prefill_free_at_s
    return max(0.0, free.least()[0] - now_s) if free.nodes else None
