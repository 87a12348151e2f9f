"""The choices of `scheduler.options` in the plain way: every node is looked at, in order."""

from __future__ import annotations

from prfaas.scheduler.options import NO_COPIES, Option, PrefixSource
from prfaas.scheduler.request import CacheCopy, Request, is_offloadable
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, NodeView, View
from prfaas.types import NodeId


def longest_pooled(
    cluster: ClusterView, view: View, *, remote: bool = False
) -> tuple[int, NodeId | None]:
    """The longest prefix that can be copied from a usable node of the cluster, of any role, and the
    node (the paper's l_pd and l_prfaas). `remote`: to a node of another cluster."""
    best, holder = 0, None
    cached = view.cached
    for node in cluster.nodes:
        found = cached.get(node.node)
        if found is not None and found.tokens > best and node.usable:
            tokens = found.pool_tokens
            if remote and found.remote_pool_tokens is not None:
                tokens = found.remote_pool_tokens
            if tokens is None:
                tokens = found.tokens
            if tokens > best:
                best, holder = tokens, node.node
    return best, holder


def longest_own(cluster: ClusterView, view: View) -> int:
    """The longest prefix that a usable prefill node of the cluster can resume from without a
    copy."""
    found = [view.cached.get(n.node) for n in cluster.nodes if n.usable and n.role == "prefill"]
    return max((held.tokens for held in found if held is not None), default=0)


def best_option(
    request: Request, cluster: ClusterView, view: View, prefix: PrefixSource | None
) -> Option | None:
    """The node whose prefill ends first, resuming from its own cache or from a copy of `prefix`.
    None if no node of the cluster can prefill."""
    now = view.now_s
    seconds = view.costs.prefill_s[cluster.cluster]
    tokens = request.prompt_tokens
    cached = view.cached
    if not cached:
        # Every prefill takes the same time, so the node that is free first is best.
        first: NodeView | None = None
        for node in cluster.nodes:
            if (
                node.usable
                and node.role == "prefill"
                and (first is None or node.free_at_s < first.free_at_s)
            ):
                first = node
        if first is None:
            return None
        start = first.free_at_s if first.free_at_s > now else now
        return Option(cluster.cluster, first.node, 0, start, seconds(tokens, 0), NO_COPIES)
    best: Option | None = None
    best_end = float("inf")
    for node in cluster.nodes:
        if not node.usable or node.role != "prefill":
            continue
        held = cached.get(node.node)
        own = 0 if held is None else min(held.tokens, tokens - 1)
        start = node.free_at_s if node.free_at_s > now else now
        prefill_s = seconds(tokens - own, own)
        copies = NO_COPIES
        if prefix is not None and prefix.tokens > own:
            skip = 0 if held is None else min(held.attention_tokens, prefix.tokens)
            nbytes = view.costs.handoff_bytes(prefix.tokens, prefix.tokens - skip)
            copy_s = nbytes * 8 / prefix.bps + prefix.rtt_s
            copied_at = now + copy_s
            copied = min(prefix.tokens, tokens - 1)
            copied_s = seconds(tokens - copied, copied)
            copied_start = copied_at if copied_at > start else start
            if copied_start + copied_s < start + prefill_s:
                start, prefill_s, own = copied_start, copied_s, copied
                copies = (CacheCopy(prefix.source, node.node, prefix.tokens, nbytes, copy_s),)
        end = start + prefill_s
        # Among equals, the node that already has the prefix: a copy takes memory twice.
        if end < best_end or (end == best_end and best is not None and best.copies and not copies):
            best_end = end
            best = Option(cluster.cluster, node.node, own, start, prefill_s, copies)
    return best


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
    seconds = view.costs.prefill_s[view.local.cluster]
    need = tokens * view.costs.bytes_per_token
    for node in view.local.nodes:
        held = cached.get(node.node)
        if held is None or not node.usable or node.role != "decode":
            continue
        own = min(held.tokens, tokens - 1)
        if own <= 0 or tokens - own > rules.tokens:
            continue
        if node.active >= node.slots or node.free_kv_bytes < need:
            continue
        if node.active and now < node.next_remainder_s:
            continue
        start = max(now, node.free_at_s)
        if start - now > state.rules.adaptive.queue_s:
            continue
        found = Option(
            view.local.cluster,
            node.node,
            own,
            start,
            seconds(tokens - own, own),
            NO_COPIES,
            decodes=True,
        )
        if best is None or found.end_s < best.end_s:
            best = found
    return best


def choose_decode_node(request: Request, view: View, bps: float) -> tuple[NodeView, int] | None:
    """The decode node of least cost, and the number of prompt tokens it already holds. The cost is
    the time of a step and the wait for a slot and memory, less the transfer over `bps` that the
    held tokens save. None if no node decodes."""
    best: NodeView | None = None
    best_cost = float("inf")
    best_held = 0
    cached = view.cached
    costs = view.costs
    need = request.prompt_tokens * costs.bytes_per_token if cached else 0
    for node in view.local.nodes:
        if not node.usable or node.role != "decode":
            continue
        held = 0
        cost = node.active / node.slots * costs.t_decode_s  # a fuller batch steps more slowly
        if node.active >= node.slots:
            cost += (node.active - node.slots + 1) / node.slots * costs.mean_hold_s
        if cached:
            found = cached.get(node.node)
            if found is not None:
                held = min(found.attention_tokens, request.prompt_tokens)
                cost -= held * costs.bytes_per_token * 8 / bps
            if node.free_kv_bytes < need:
                cost += costs.mean_hold_s
        if cost < best_cost:
            best, best_cost, best_held = node, cost, held
    return None if best is None else (best, best_held)
