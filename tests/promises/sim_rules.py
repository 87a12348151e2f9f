"""What must hold in every simulated case. Each rule looks at a run and returns the complaints.

The rules do not know how the scheduler decides. What happened to nodes, clusters and links they
take from the case, and not from the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from prfaas.sim.config import ClusterFault, DrainFault, LinkFault, NodeFault, SlowFault
from tests.promises.cases import ClusterCase, describe
from tests.promises.sim_cases import LIKE, Run

REPORTED_S = 1.1  # until the router has the next report, after which it retries what waits
# A node of a PrfaaS cluster is kept this long for the homes that have had less of their share.
KEPT_FOR_OTHERS_S = 1.0
AT_ONCE_S = 0.01


class Span(NamedTuple):
    begin_s: float
    end_s: float

    def has(self, at_s: float) -> bool:
        """Not at its beginning: what begins at the same moment may come first."""
        return self.begin_s < at_s < self.end_s


def losses(run: Run, node: str) -> list[Span]:
    """When the node was lost, or absent."""
    return [
        Span(fault.at_s, fault.until_s)
        for fault in run.config.faults
        if (isinstance(fault, NodeFault) and fault.node == node)
        or (isinstance(fault, ClusterFault) and fault.cluster == _cluster(node))
    ]


def drains(run: Run, node: str) -> list[Span]:
    return [
        Span(fault.at_s, fault.until_s)
        for fault in run.config.faults
        if isinstance(fault, DrainFault) and fault.cluster == _cluster(node)
    ]


def _cluster(node: str) -> str:
    return node.rpartition("-")[0]


# Rules --------------------------------------------------------------------------------------------


def every_request_ends_in_one_way(run: Run) -> Iterator[str]:
    """Completed, broken after its first token, or not served at all; and nothing is left of it."""
    rows = run.requests
    begun, ended = np.isfinite(rows.first_token_s), np.isfinite(rows.last_token_s)
    for index in np.flatnonzero(ended & ~begun):
        yield f"request {index} has a last token and no first one"
    late = ended & ~(rows.last_token_s >= rows.first_token_s)
    for index in np.flatnonzero(late | (begun & ~(rows.first_token_s > rows.arrival_s))):
        yield f"request {index}: arrival, first and last token are out of order"
    served = {landed.index for landed in run.landed}
    for index in np.flatnonzero(begun):
        if index not in served:
            yield f"request {index} has tokens, and no node had its KV"
    yield from run.left_behind


def served_while_a_node_lives(run: Run) -> Iterator[str]:
    """A request that is never served has no living node that decodes, neither at its home nor at
    another one that has a link to it."""
    rows = run.requests
    homes = run.case.deployment.homes
    unserved = {int(home) for home in rows.home[np.isnan(rows.first_token_s)]}
    for number in sorted(unserved):
        home = homes[number]
        there = [home] + [o for o in homes if (home.name, o.name) in run.config.round_trips]
        living = [node for one in there for node in _usable_for_ever(run, one)]
        if living:
            yield f"requests of {home.name} are not served, while {', '.join(living)} can decode"


def _usable_for_ever(run: Run, home: ClusterCase) -> list[str]:
    return [
        node
        for node in home.nodes
        if all(span.end_s < math.inf for span in (*losses(run, node), *drains(run, node)))
    ]


def only_a_lost_decode_node_breaks_a_request(run: Run) -> Iterator[str]:
    rows = run.requests
    last = {landed.index: landed for landed in run.landed}
    for index in np.flatnonzero(np.isfinite(rows.first_token_s) & np.isnan(rows.last_token_s)):
        landed = last[int(index)]
        if not any(span.begin_s >= landed.at_s for span in losses(run, landed.route.decode)):
            yield f"request {index} broke, and its decode node {landed.route.decode} was not lost"


def no_new_work_for_drained_or_lost_nodes(run: Run) -> Iterator[str]:
    for sent in run.dispatched:
        for node in {sent.route.prefill, sent.route.decode}:
            if any(span.has(sent.at_s) for span in drains(run, node)):
                yield f"{sent.at_s:.2f} s: request {sent.index} goes to {node}, which is drained"
            if any(span.has(sent.at_s) for span in losses(run, node)):
                yield f"{sent.at_s:.2f} s: request {sent.index} goes to {node}, which is lost"


def no_idle_node_while_a_request_waits(run: Run) -> Iterator[str]:
    """A request waits for a cluster, or for any node that can serve it, and there one is idle that
    is as fast as the others."""
    for idle in run.idle:
        limit_s = AT_ONCE_S
        if idle.cluster is not None and len(run.case.traffic) > 1:
            limit_s = REPORTED_S + KEPT_FOR_OTHERS_S
        elif idle.cluster is None or _happens_between(run, idle.from_s - REPORTED_S, idle.until_s):
            limit_s = REPORTED_S
        if idle.until_s - idle.from_s > limit_s:
            what = "any node" if idle.cluster is None else idle.cluster
            yield (
                f"{idle.node} is idle from {idle.from_s:.3f} to {idle.until_s:.3f} s, and a "
                f"request waits for {what}"
            )


def _happens_between(run: Run, begin_s: float, end_s: float) -> bool:
    """Whether something is lost, drained, cut or slow from then on, or no more."""
    at_s = [at_s for fault in run.config.faults for at_s in (fault.at_s, fault.until_s)]
    at_s += [change.at_s for changes in run.config.links.values() for change in changes]
    return any(begin_s <= one <= end_s for one in at_s)


def kv_of_cut_transfers_is_not_used(run: Run) -> Iterator[str]:
    """While a hand-off was on its way, neither its link was cut nor one of its nodes lost."""
    cuts = [fault for fault in run.config.faults if isinstance(fault, LinkFault)]
    for landed in run.landed:
        route = landed.route
        for node in {route.prefill, route.decode}:
            if any(landed.began_s < span.begin_s < landed.at_s for span in losses(run, node)):
                yield f"request {landed.index} uses KV from before {node} was lost"
        for cut in cuts:
            over = cut.link == (route.cluster, route.decode_cluster)
            if over and landed.began_s < cut.at_s < landed.at_s:
                yield f"request {landed.index} uses KV of a transfer that was cut"


# A slow node --------------------------------------------------------------------------------------

SLOW = 20.0
OBSERVED = 6  # prefills: three warm the node up, and three show its pace
DOUBTED_S = 15.0  # a slow node that was not asked for so long may be asked again


def a_slow_node_gets_little(run: Run) -> Iterator[str]:
    """Of two nodes of a cluster, one needs 20 times as long as the other. It has at most a tenth
    of their work once it is known, and now and then one that shows whether it still is slow."""
    for cluster in run.case.deployment.clusters:
        prefill = cluster.nodes[: cluster.stated_prefill]
        calm = [node for node in prefill if not losses(run, node) and not drains(run, node)]
        for slow in calm:
            since_s = _slow_since(run, slow)
            likes = [node for node in calm if _is_usual(run, node)]
            # What most nodes of a cluster need is usual there, and not slow.
            if since_s is not None and 2 * len(likes) >= len(prefill):
                yield from _much(run, slow, {slow, *likes}, since_s)


def _much(run: Run, slow: str, group: set[str], since_s: float) -> Iterator[str]:
    sent = [
        one
        for one in run.dispatched
        if one.route.prefill in group and not one.route.cached_tokens and one.at_s >= since_s
    ]
    seen = [one.at_s for one in run.landed if one.route.prefill == slow and one.began_s >= since_s]
    if len(seen) < OBSERVED:
        return
    known_s = seen[OBSERVED - 1]
    later = [one for one in sent if one.at_s >= known_s]
    own = [one for one in later if one.route.prefill == slow]
    again = 1 + int((later[-1].at_s - known_s) / DOUBTED_S) if later else 0
    # Where the others have a queue, short prompts have their first token sooner at the slow node.
    tokens = [int(run.requests.prompt_tokens[one.index]) for one in later]
    own_tokens = sorted(int(run.requests.prompt_tokens[one.index]) for one in own)
    if sum(own_tokens[: max(len(own) - again, 0)]) > sum(tokens) / 10:
        yield (
            f"{slow} gets {len(own)} of {len(later)} prefills after {known_s:.1f} s, with "
            f"{sum(own_tokens)} of {sum(tokens)} tokens, and is slow"
        )


def _slow_since(run: Run, node: str) -> float | None:
    """Since when, up to the end, the node's prefills take 20 times as long as stated; None: they
    do not."""
    faults = [f for f in run.config.faults if isinstance(f, SlowFault) and f.node == node]
    if any(fault.until_s < math.inf for fault in faults):
        return None
    if math.prod(fault.factor for fault in faults) < SLOW:
        return None
    return max(fault.at_s for fault in faults)


def _is_usual(run: Run, node: str) -> bool:
    faults = [f for f in run.config.faults if isinstance(f, SlowFault) and f.node == node]
    return all(fault.factor <= LIKE for fault in faults)


RULES: tuple[Callable[[Run], Iterator[str]], ...] = (
    every_request_ends_in_one_way,
    served_while_a_node_lives,
    only_a_lost_decode_node_breaks_a_request,
    no_new_work_for_drained_or_lost_nodes,
    no_idle_node_while_a_request_waits,
    kv_of_cut_transfers_is_not_used,
    a_slow_node_gets_little,
)


def complaints(run: Run) -> list[str]:
    return [f"{rule.__name__}: {found}" for rule in RULES for found in rule(run)]


def check(run: Run) -> None:
    found = complaints(run)
    shown = "\n".join(found[:20])
    assert not found, f"{shown}\n{describe(run.case)}"
