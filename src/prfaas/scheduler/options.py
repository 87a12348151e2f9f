"""The options that a policy chooses from, each with its predicted times.

An `Option` is the best prefill node of one cluster, given the cached prefixes that may be used
there. All times are absolute; nothing is reserved. A prefix that another node holds can be copied
first, over the cluster's fabric or, where the caller allows it, over a link between clusters.
One more option is a decode node that has all but a short remainder of the prompt cached: it
prefills the remainder and decodes, without a hand-off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from prfaas.scheduler.lookup.prefixes import EVERY_NODE, CachedPrefix
from prfaas.scheduler.lookup.ranking import lowest
from prfaas.scheduler.request import CacheCopy, Request, Route, is_offloadable
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, LinkId, LinkView, NodeView, View
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
    decodes: bool = False  # the node also decodes the request: there is no hand-off

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
    because a copy takes memory twice, and then the node with the lowest number."""
    now = view.now_s
    groups = view.cached.groups
    ranks = cluster.ranks(view.cached)
    free = ranks.prefill_free_at_s
    if not free.nodes:
        return None
    if not groups:
        # Every prefill takes the same time, so the node that is free first is best.
        free_at_s, number = free.least()
        prefill_s = view.costs.prefill_s[cluster.cluster](request.prompt_tokens, 0)
        start = free_at_s if free_at_s > now else now
        return Option(cluster.cluster, ranks.name(number), 0, start, prefill_s, NO_COPIES)
    best: _Candidate | None = None
    best_held: CachedPrefix | None = None
    idle, others = free.at_most(now), free.nodes
    for held, nodes in groups:
        members = nodes & free.nodes
        if members:
            others &= ~members
            found = _first_to_end(request, members, idle, held, cluster, view, prefix)
            if best is None or found < best:
                best, best_held = found, held
    if others:
        found = _first_to_end(request, others, idle, None, cluster, view, prefix)
        if best is None or found < best:
            best, best_held = found, None
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
    number: int
    start_s: float
    prefill_s: float
    cached_tokens: int


def _first_to_end(
    request: Request,
    nodes: int,
    idle: int,
    held: CachedPrefix | None,
    cluster: ClusterView,
    view: View,
    prefix: PrefixSource | None,
) -> _Candidate:
    """The prefill of these nodes takes the same time at each of them, so the node that is free
    first is best, and the nodes that are idle are equal."""
    now, tokens = view.now_s, request.prompt_tokens
    seconds = view.costs.prefill_s[cluster.cluster]
    free = cluster.ranks().prefill_free_at_s
    own = 0 if held is None else min(held.tokens, tokens - 1)
    if nodes & idle:
        start, number = now, lowest(nodes & idle)
    else:
        first = free.first(nodes)
        assert first is not None
        start, number = first
    prefill_s = seconds(tokens - own, own)
    end = start + prefill_s
    if prefix is None or prefix.tokens <= own:
        return _Candidate(end, False, number, start, prefill_s, own)
    copied = min(prefix.tokens, tokens - 1)
    copied_s = seconds(tokens - copied, copied)
    if start + copied_s >= end:
        return _Candidate(end, False, number, start, prefill_s, own)
    _, copy_s = _copy_cost(prefix, held, view)
    copied_at = now + copy_s
    if copied_at > start:
        if copied_at + copied_s >= end:
            return _Candidate(end, False, number, start, prefill_s, own)
        # Every node that is free before the copy is made is equal.
        start, number = copied_at, lowest(nodes & free.at_most(copied_at))
    return _Candidate(start + copied_s, True, number, start, copied_s, copied)


def _copy_cost(prefix: PrefixSource, held: CachedPrefix | None, view: View) -> tuple[int, float]:
    """Bytes and seconds of a copy to a node that holds `held`."""
    skip = 0 if held is None else min(held.attention_tokens, prefix.tokens)
    nbytes = view.costs.handoff_bytes(prefix.tokens, prefix.tokens - skip)
    return nbytes, nbytes * 8 / prefix.bps + prefix.rtt_s


def remainder_option(request: Request, view: View, state: ShortTermState) -> Option | None:
    """The decode node whose prefill of the remainder ends first. None where no decode node may
    prefill it. The decodes beside it wait for the prefill. So the remainder is short, the node has
    a free slot and memory, and a node that decodes waits between two remainders as long as
    `next_remainder_after` says."""
    rules = state.rules.remainders
    cached, now, tokens = view.cached, view.now_s, request.prompt_tokens
    if state.rules.policy != "adaptive" or not rules.tokens or not cached:
        return None
    if request.no_remainder or not is_offloadable(request):
        return None
    best: Option | None = None
    best_number = 0
    ranks = view.local.ranks(cached)
    seconds = view.costs.prefill_s[view.local.cluster]
    allowed: int | None = None
    for held, nodes in cached.groups:
        own = min(held.tokens, tokens - 1)
        if own <= 0 or tokens - own > rules.tokens:
            continue
        if allowed is None:
            allowed = _may_prefill_remainder(tokens * view.costs.bytes_per_token, view)
        members = nodes & allowed
        if not members:
            continue
        idle = members & ranks.decode_free_at_s.at_most(now)
        if idle:
            start, number = now, lowest(idle)
        else:
            first = ranks.decode_free_at_s.first(members)
            assert first is not None
            start, number = first
            if start - now > state.rules.adaptive.queue_s:
                continue
        found = Option(
            view.local.cluster,
            ranks.name(number),
            own,
            start,
            seconds(tokens - own, own),
            NO_COPIES,
            decodes=True,
        )
        if best is None or (found.end_s, number) < (best.end_s, best_number):
            best, best_number = found, number
    return best


def _may_prefill_remainder(kv_bytes: float, view: View) -> int:
    """The set of decode nodes with a free slot, with memory, and not too soon after another
    remainder."""
    ranks = view.local.ranks()
    if not ranks.active.nodes:
        return 0
    slots = view.local.node(ranks.name(ranks.active.least()[1])).slots
    waited = ranks.next_remainder_s.at_most(view.now_s) | ranks.active.at_most(0)
    return waited & ranks.active.at_most(slots - 1) & ranks.minus_free_kv_bytes.at_most(-kv_bytes)


def next_remainder_after(prefill_s: float, now_s: float, slowdown: float) -> float:
    """When a node that decodes may prefill another remainder after one that takes `prefill_s` and
    is dispatched now. Decodes then get all but slowdown / (1 + slowdown) of the node's time, so
    that a token takes 1 + slowdown times as long."""
    return now_s + prefill_s * (1 + 1 / slowdown)


def remainder_steps(uncached_tokens: int, chunk_tokens: int) -> int:
    """Decode steps between the chunks of a remainder, where other requests decode, and the step
    that would have followed a hand-off."""
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
    if option.decodes:
        return _remainder_route(option, view, state, reason)
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


def _remainder_route(option: Option, view: View, state: ShortTermState, reason: str) -> Route:
    slowdown = state.rules.remainders.slowdown
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
        next_remainder_s=next_remainder_after(option.prefill_s, option.start_s, slowdown),
    )
