"""The options that a policy chooses from, each with its predicted times.

An `Option` is the best prefill node of one cluster, given the cached prefixes that may be used
there. All times are absolute; nothing is reserved. A prefix that another node holds can be copied
first, over the cluster's fabric or, where the caller allows it, over a link between clusters.
One more option is a decode node that serves the request *alone*: it prefills for itself, without a
hand-off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from prfaas.scheduler.lookup.prefixes import EVERY_NODE, CachedPrefix
from prfaas.scheduler.lookup.ranking import lowest
from prfaas.scheduler.request import CacheCopy, Request, Route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, LinkId, LinkView, NodeRanks, NodeView, View
from prfaas.types import ClusterId, NodeId

NO_COPIES: tuple[CacheCopy, ...] = ()


class PrefixSource(NamedTuple):
    """The longest prefix that can be copied to a cluster's nodes, and from where."""

    tokens: int
    source: NodeId
    bps: float
    rtt_s: float
    crosses: bool  # whether the copy uses a link between clusters


class Option(NamedTuple):
    cluster: ClusterId
    node: NodeId
    cached_tokens: int
    start_s: float
    prefill_s: float
    copies: tuple[CacheCopy, ...]
    alone: bool = False  # the node also decodes the request: there is no hand-off
    # Of a node alone: what the requests that decode there wait for the prefill, all together.
    delays_s: float = 0.0
    by_choice: bool = False  # of a node alone: other nodes could prefill the request

    @property
    def end_s(self) -> float:
        return self.start_s + self.prefill_s


def longest_pooled(
    cluster: ClusterView, view: View, *, remote: bool = False
) -> tuple[int, NodeId | None]:
    """The longest prefix that can be copied from a usable node of the cluster, of any role, and the
    node (the paper's l_pd and l_prfaas). `remote`: to a node of another cluster."""
    best, holders = 0, 0
    ranks = cluster.ranks(view.cached)
    for prefix, nodes in view.cached.groups:
        usable = nodes & ranks.usable
        if not usable:
            continue
        tokens = prefix.pool_tokens
        if remote and prefix.remote_pool_tokens is not None:
            tokens = prefix.remote_pool_tokens
        if tokens is None:
            tokens = prefix.tokens
        if tokens > best:
            best, holders = tokens, usable
        elif tokens == best:
            holders |= usable
    return best, ranks.name(lowest(holders)) if best else None


def longest_own(cluster: ClusterView, view: View) -> int:
    """The longest prefix that a usable prefill node of the cluster can resume from without a
    copy."""
    prefills = cluster.ranks(view.cached).prefill_free_at_s.nodes
    return max(
        (prefix.tokens for prefix, nodes in view.cached.groups if nodes & prefills), default=0
    )


def prefix_within(cluster: ClusterView, view: View) -> PrefixSource | None:
    """The longest prefix that the cluster itself holds, to be copied over its fabric."""
    if not view.cached:
        return None
    tokens, holder = longest_pooled(cluster, view)
    if holder is None:
        return None
    return PrefixSource(tokens, holder, view.costs.fabric_bps(cluster.cluster), 0.0, False)


def prefix_across(
    source: ClusterView, target: ClusterView, view: View, state: ShortTermState
) -> PrefixSource | None:
    """The longest prefix of another cluster, if the link from there is up."""
    link_id = (source.cluster, target.cluster)
    link = view.links.get(link_id)
    if link is None or not link.up or not view.cached:
        return None
    tokens, holder = longest_pooled(source, view, remote=True)
    if holder is None:
        return None
    return PrefixSource(tokens, holder, estimated_bps(link_id, link, state), link.rtt_s, True)


def best_option(
    request: Request, cluster: ClusterView, view: View, prefix: PrefixSource | None
) -> Option | None:
    """The node whose prefill ends first, resuming from its own cache or from a copy of `prefix`.
    None if no node of the cluster can prefill. Among equals, a node that already has the prefix,
    because a copy takes memory twice, and then the one that has been idle for longest."""
    now = view.now_s
    groups = view.cached.groups
    ranks = cluster.ranks(view.cached)
    free = ranks.prefill_free_at_s
    if not free.nodes:
        return None
    if not groups and not ranks.paces:
        # Every prefill takes the same time, so the node that is free first is best.
        free_at_s, number = free.least()
        prefill_s = view.costs.prefill_s[cluster.cluster](request.prompt_tokens, 0)
        start = free_at_s if free_at_s > now else now
        return Option(cluster.cluster, ranks.name(number), 0, start, prefill_s, NO_COPIES)
    best: _Candidate | None = None
    best_held: CachedPrefix | None = None
    for held, pace, members in _alike(view, ranks, free.nodes):
        found = _first_to_end(request, members, held, pace, cluster, view, prefix)
        if best is None or found < best:
            best, best_held = found, held
    assert best is not None
    node, copies = ranks.name(best.number), NO_COPIES
    if best.copied:
        assert prefix is not None
        nbytes, copy_s = _copy_cost(prefix, best_held, view)
        copies = (CacheCopy(prefix.source, node, prefix.tokens, nbytes, copy_s),)
    return Option(cluster.cluster, node, best.cached_tokens, best.start_s, best.prefill_s, copies)


class _Candidate(NamedTuple):
    """The best of the nodes that hold the same. Of two candidates, the lower one is better."""

    end_s: float
    copied: bool
    free_at_s: float  # in the past: idle since then
    number: int
    start_s: float
    prefill_s: float
    cached_tokens: int


def _first_to_end(
    request: Request,
    nodes: int,
    held: CachedPrefix | None,
    pace: float,
    cluster: ClusterView,
    view: View,
    prefix: PrefixSource | None,
) -> _Candidate:
    """The prefill of these nodes takes the same time at each of them, so the node that is free
    first is best. Idle nodes take turns: the one that has been idle for longest is first."""
    now, tokens = view.now_s, request.prompt_tokens
    seconds = view.costs.prefill_s[cluster.cluster]
    free = cluster.ranks().prefill_free_at_s
    own = 0 if held is None else min(held.tokens, tokens - 1)
    first = free.first(nodes)
    assert first is not None
    free_at_s, number = first
    start = max(free_at_s, now)
    prefill_s = pace * seconds(tokens - own, own)
    end = start + prefill_s
    if prefix is None or prefix.tokens <= own:
        return _Candidate(end, False, free_at_s, number, start, prefill_s, own)
    copied = min(prefix.tokens, tokens - 1)
    copied_s = pace * seconds(tokens - copied, copied)
    if start + copied_s >= end:
        return _Candidate(end, False, free_at_s, number, start, prefill_s, own)
    _, copy_s = _copy_cost(prefix, held, view)
    copied_at = now + copy_s
    if copied_at > start:
        if copied_at + copied_s >= end:
            return _Candidate(end, False, free_at_s, number, start, prefill_s, own)
        start = copied_at  # the node is free before the copy is made
    return _Candidate(start + copied_s, True, free_at_s, number, start, copied_s, copied)


def _copy_cost(prefix: PrefixSource, held: CachedPrefix | None, view: View) -> tuple[int, float]:
    """Bytes and seconds of a copy to a node that holds `held`."""
    skip = 0 if held is None else min(held.attention_tokens, prefix.tokens)
    nbytes = view.costs.handoff_bytes(prefix.tokens, prefix.tokens - skip)
    return nbytes, nbytes * 8 / prefix.bps + prefix.rtt_s


def _alike(
    view: View, ranks: NodeRanks, nodes: int
) -> Iterator[tuple[CachedPrefix | None, float, int]]:
    """The set of nodes, divided into sets that hold the same prefix and have the same pace."""
    for held, holders in view.cached.groups:
        members = holders & nodes
        if members:
            nodes &= ~members
            for pace, alike in ranks.by_pace(members):
                yield held, pace, alike
    for pace, alike in ranks.by_pace(nodes):
        yield None, pace, alike


# A decode node alone -----------------------------------------------------------------------------


def alone_option(
    request: Request, view: View, state: ShortTermState, *, by_choice: bool
) -> Option | None:
    """The decode node that serves the request alone, with the earliest first token for the least
    delay of the requests that decode there. None where no PD node may.

    `by_choice`: other nodes could prefill the request. Then those that decode on the node must not
    notice it: the node has a free slot and memory, no other prefill before this one, and has not
    spent more than its share of time on such prefills (`next_alone_after`)."""
    ranks = view.local.ranks(view.cached)
    free, load = ranks.decode_free_at_s, ranks.active
    if by_choice:
        allowed = _may_serve_alone(request, view)
    elif load.nodes:
        allowed = load.nodes
    else:  # no node decodes: every PD node can
        free = load = ranks.prefill_free_at_s
        allowed = free.nodes
    if not allowed:
        return None
    best: Option | None = None
    best_cost: tuple[float, int] | None = None
    idle = allowed & free.at_most(view.now_s)
    for held, pace, members in _alike(view, ranks, allowed):
        # The node that decodes least of those that are idle, or the one that is free first.
        found = load.first(members & idle) if members & idle else free.first(members)
        assert found is not None
        number = found[1]
        node = view.local.node(ranks.name(number))
        option = _alone_at(request, node, held, pace, view, by_choice=by_choice)
        cost = (option.end_s + option.delays_s + slot_wait_s(node, view), number)
        if best_cost is None or cost < best_cost:
            best, best_cost = option, cost
    return best


def _may_serve_alone(request: Request, view: View) -> int:
    """The set of decode nodes that may serve the request alone although other nodes could prefill
    it."""
    ranks = view.local.ranks()
    if request.no_alone or not ranks.active.nodes:
        return 0
    slots = view.local.node(ranks.name(ranks.active.least()[1])).slots
    kv_bytes = request.prompt_tokens * view.costs.bytes_per_token
    rested = ranks.next_alone_s.at_most(view.now_s) | ranks.active.at_most(0)
    return (
        rested
        & ranks.active.at_most(slots - 1)
        & ranks.minus_free_kv_bytes.at_most(-kv_bytes)
        & ranks.decode_free_at_s.at_most(view.now_s)
    )


def _alone_at(
    request: Request,
    node: NodeView,
    held: CachedPrefix | None,
    pace: float,
    view: View,
    *,
    by_choice: bool,
) -> Option:
    tokens, name = request.prompt_tokens, view.local.cluster
    own = 0 if held is None else min(held.tokens, tokens - 1)
    prefill_s = pace * view.costs.prefill_s[name](tokens - own, own)
    return Option(
        name,
        node.node,
        own,
        max(node.free_at_s, view.now_s),
        prefill_s,
        NO_COPIES,
        alone=True,
        delays_s=node.active * prefill_s,
        by_choice=by_choice,
    )


def slot_wait_s(node: NodeView, view: View) -> float:
    """Expected wait of a new request for a decode slot of the node."""
    if node.active < node.slots:
        return 0.0
    return (node.active - node.slots + 1) / node.slots * view.costs.mean_hold_s


def next_alone_after(prefill_s: float, now_s: float, slowdown: float) -> float:
    """When a node that decodes may serve another request alone after one whose prefill takes
    `prefill_s` and is dispatched now. Decodes then get all but slowdown / (1 + slowdown) of the
    node's time, so that a token takes 1 + slowdown times as long."""
    return now_s + prefill_s * (1 + 1 / slowdown)


def most_computed_tokens(uncached_tokens: int, chunk_tokens: int) -> int:
    """The most tokens that a node may compute of a prompt that it serves alone by choice. It may
    have lost a little of the prefix; one that has lost much had better not compute all that beside
    its decodes."""
    return max(2 * uncached_tokens, chunk_tokens)


def alone_steps(uncached_tokens: int, chunk_tokens: int) -> int:
    """Decode steps between the chunks of a prompt that a node prefills for itself while others
    decode there, and the step that would have followed a hand-off."""
    return max(1, math.ceil(uncached_tokens / chunk_tokens))


def choose_decode_node(request: Request, view: View, bps: float) -> tuple[NodeView, int] | None:
    """The decode node of least cost, and the number of prompt tokens it already holds. The cost is
    the time of a step and the wait for a slot and memory, less the transfer over `bps` that the
    held tokens save. None if no node decodes. Among equals, the node with the lowest number."""
    cached, costs, local = view.cached, view.costs, view.local
    ranks = local.ranks(cached)
    active = ranks.active
    if not active.nodes:
        return None
    least_loaded = local.node(ranks.name(active.least()[1]))
    if not cached.groups:
        return least_loaded, 0
    # Of the nodes that hold the same and have memory, or have none, the least loaded is best.
    roomy = ranks.minus_free_kv_bytes.at_most(-request.prompt_tokens * costs.bytes_per_token)
    slots = least_loaded.slots
    best_cost, best_number, best_held = float("inf"), -1, 0
    others = active.nodes
    for tokens, nodes in _held_by(view, request):
        members = nodes & others
        others &= ~members
        saved_s = tokens * costs.bytes_per_token * 8 / bps
        for part, wait_s in ((members & roomy, 0.0), (members & ~roomy, costs.mean_hold_s)):
            first = active.first(part) if part else None
            if first is None:
                continue
            load, number = first
            cost = load / slots * costs.t_decode_s  # a fuller batch steps more slowly
            if load >= slots:
                cost += (load - slots + 1) / slots * costs.mean_hold_s
            cost = cost - saved_s + wait_s
            if cost < best_cost or (cost == best_cost and number < best_number):
                best_cost, best_number, best_held = cost, number, tokens
    return local.node(ranks.name(best_number)), best_held


def _held_by(view: View, request: Request) -> Iterator[tuple[int, int]]:
    """Tokens that a hand-off can omit, and the nodes that hold them: last, all nodes."""
    for prefix, nodes in view.cached.groups:
        yield min(prefix.attention_tokens, request.prompt_tokens), nodes
    yield 0, EVERY_NODE


def estimated_bps(link_id: LinkId, link: LinkView, state: ShortTermState) -> float:
    """The link's bandwidth as last observed under load, otherwise as configured."""
    known = state.links.get(link_id)
    return link.capacity_bps if known is None or known.bps is None else known.bps


def link_drain_s(link_id: LinkId, link: LinkView, state: ShortTermState) -> float:
    """Seconds until the link has sent what was dispatched to it."""
    return link.pending_bytes * 8 / estimated_bps(link_id, link, state)


def handoff_bps(option: Option, view: View, state: ShortTermState) -> float:
    """Bandwidth from the option's cluster to the decode cluster."""
    if option.cluster == view.local.cluster:
        return view.costs.fabric_bps(option.cluster)
    link_id = (option.cluster, view.local.cluster)
    return estimated_bps(link_id, view.links[link_id], state)


def make_route(
    request: Request, option: Option, view: View, state: ShortTermState, reason: str
) -> Route | None:
    """Completes an option with a decode node, which is chosen last because the bandwidth to it
    decides what its cache is worth. None if no node decodes."""
    if option.alone:
        return _alone_route(option, state, reason)
    placed = choose_decode_node(request, view, handoff_bps(option, view, state))
    if placed is None:
        return None
    decode, held = placed
    transfer_tokens = request.prompt_tokens - held
    return Route(
        cluster=option.cluster,
        prefill=option.node,
        decode_cluster=view.local.cluster,
        decode=decode.node,
        offloaded=option.cluster != view.local.cluster,
        cached_tokens=option.cached_tokens,
        transfer_tokens=transfer_tokens,
        nbytes=view.costs.handoff_bytes(request.prompt_tokens, transfer_tokens),
        prefill_s=option.prefill_s,
        copies=option.copies,
        reason=reason,
    )


def _alone_route(option: Option, state: ShortTermState, reason: str) -> Route:
    next_s: float | None = None
    if option.by_choice:
        slowdown = state.rules.alone.slowdown
        next_s = next_alone_after(option.prefill_s, option.start_s, slowdown)
    return Route(
        cluster=option.cluster,
        prefill=option.node,
        decode_cluster=option.cluster,
        decode=option.node,
        offloaded=False,
        cached_tokens=option.cached_tokens,
        transfer_tokens=0,
        nbytes=0,
        prefill_s=option.prefill_s,
        copies=option.copies,
        reason=reason,
        next_alone_s=next_s,
    )
