"""The choices of `scheduler.options` in the plain way: every node is looked at, in order."""

from __future__ import annotations

from prfaas.scheduler.options import NO_COPIES, Option, PrefixSource
from prfaas.scheduler.request import CacheCopy, Request
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
    if not cached and all(node.pace == 1 for node in cluster.nodes):
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
    best_rank: tuple[float, bool, float, int] | None = None
    for number, node in enumerate(cluster.nodes):
        if not node.usable or node.role != "prefill":
            continue
        held = cached.get(node.node)
        own = 0 if held is None else min(held.tokens, tokens - 1)
        start = node.free_at_s if node.free_at_s > now else now
        prefill_s = node.pace * seconds(tokens - own, own)
        copies = NO_COPIES
        if prefix is not None and prefix.tokens > own:
            skip = 0 if held is None else min(held.attention_tokens, prefix.tokens)
            nbytes = view.costs.handoff_bytes(prefix.tokens, prefix.tokens - skip)
            copy_s = nbytes * 8 / prefix.bps + prefix.rtt_s
            copied_at = now + copy_s
            copied = min(prefix.tokens, tokens - 1)
            copied_s = node.pace * seconds(tokens - copied, copied)
            copied_start = copied_at if copied_at > start else start
            if copied_start + copied_s < start + prefill_s:
                start, prefill_s, own = copied_start, copied_s, copied
                copies = (CacheCopy(prefix.source, node.node, prefix.tokens, nbytes, copy_s),)
        # Among equals, a node that already has the prefix, because a copy takes memory twice, and
        # then the one that has been idle for longest.
        rank = (start + prefill_s, bool(copies), node.free_at_s, number)
        if best_rank is None or rank < best_rank:
            best_rank = rank
            best = Option(cluster.cluster, node.node, own, start, prefill_s, copies)
    return best


def alone_option(
    request: Request, view: View, state: ShortTermState, *, by_choice: bool
) -> Option | None:
    """Of the nodes that hold the same and have the same pace, the idle one that decodes least, or
    the one that is free first. Of these, the one with the least cost."""
    now, tokens = view.now_s, request.prompt_tokens
    usable = [(number, node) for number, node in enumerate(view.local.nodes) if node.usable]
    decodes = [(number, node) for number, node in usable if node.role == "decode"]
    if by_choice:
        need = tokens * view.costs.bytes_per_token
        decodes = [
            (number, node)
            for number, node in decodes
            if node.active < node.slots
            and node.free_kv_bytes >= need
            and node.free_at_s <= now
            and (not node.active or now >= node.next_alone_s)
            and not request.no_alone
        ]
    elif not decodes:
        decodes = usable
    alike: dict[object, list[tuple[int, NodeView]]] = {}
    for number, node in decodes:
        alike.setdefault((view.cached.get(node.node), node.pace), []).append((number, node))
    seconds = view.costs.prefill_s[view.local.cluster]
    best: Option | None = None
    best_rank: tuple[float, int] | None = None
    role = decodes[0][1].role if decodes else ""
    for group in alike.values():
        idle = [one for one in group if one[1].free_at_s <= now]
        if idle and role == "decode":
            number, node = min(idle, key=lambda one: (one[1].active, one[0]))
        else:
            number, node = min(group, key=lambda one: (one[1].free_at_s, one[0]))
        held = view.cached.get(node.node)
        own = 0 if held is None else min(held.tokens, tokens - 1)
        prefill_s = node.pace * seconds(tokens - own, own)
        delays_s = node.active * prefill_s
        slot_s = 0.0
        if node.active >= node.slots:
            slot_s = (node.active - node.slots + 1) / node.slots * view.costs.mean_hold_s
        start = max(now, node.free_at_s)
        rank = (start + prefill_s + delays_s + slot_s, number)
        if best_rank is None or rank < best_rank:
            best_rank = rank
            best = Option(
                view.local.cluster,
                node.node,
                own,
                start,
                prefill_s,
                NO_COPIES,
                alone=True,
                delays_s=delays_s,
                by_choice=by_choice,
            )
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
