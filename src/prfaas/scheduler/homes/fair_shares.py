"""Shares of PrfaaS clusters between the PD clusters that use them. Pure, apart from `ShareUses`.

The plan gives every home some of the prefill seconds of each PrfaaS cluster: its weight there. A
home whose requests flood the cluster must not take the part of the others. So its requests wait at
the router while the home has had more than its share:

    another home's requests wait for the cluster    the free node is for them
    the node has enough work already                the request would stand before theirs
    the home's link has enough to carry             its KV would wait there, and the node would have
                                                    been busy for that instead of for theirs

Once requests of a home wait, its later requests do not pass them on the way to a busy node. The
home that is behind its share takes no notice of all that: its requests go to the node at once.

A share that its home does not use is not lost: a request of any home gets a node that is free, if
the link to the home has room. The gateway and the simulator both ask `share_hold` before every
dispatch to a PrfaaS cluster. With one home there is nothing to share, and they do not ask.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from prfaas.planner.workload import weighted_sum
from prfaas.scheduler.homes.shares import shares_of
from prfaas.scheduler.options import estimated_bps, link_drain_s
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import LinkId, LinkView, NodeView
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId

TIME_CONSTANT_S = 20.0  # after which an earlier use counts 1/e
IDLE_S = 1.0  # a node that was idle for longer is free for every home
# A link has enough to carry if what was dispatched to it will last for so long after the end of the
# next prefill. More would be prefilled for the link's queue alone. With less (2 s), a home whose
# link is nearly full all the time missed its turns at the nodes: in one of eight drawn deployments
# under a constant backlog, the rate fell by 4%. From 4 to 10 s, all of them served as planned.
LINK_AHEAD_S = 5.0
_SLOW_LINK = 0.5  # of its configured bandwidth
_NEGLIGIBLE = 1e-9  # prefill seconds per second
LEAST_WEIGHT = 0.001  # of the largest weight at the cluster: a home without a planned flow


# Weights -----------------------------------------------------------------------------------------


def planned_work(plan: Plan) -> dict[ClusterId, float]:
    """Prefill seconds per second that the plan sends to each PrfaaS cluster, at its capacity."""
    work = plan.problem.workload
    _, long = work.divided(plan.threshold_tokens)
    new, cached, weight = work.new[long], work.cached[long], work.weight[long]
    shares = shares_of(plan)
    planned = {}
    for remote in plan.problem.remotes:
        name = ClusterId(remote.pool.cluster)
        seconds = weighted_sum(remote.pool.profile.seconds(new, cached), weight)
        planned[name] = plan.capacity_rps * shares[name] * seconds
    return planned


def planned_together(plans: Mapping[ClusterId, Plan]) -> Mapping[ClusterId, Plan]:
    """The plans of the homes that the newest plan was solved with: others are lost."""
    newest = max(plans.values(), key=lambda plan: plan.made_s, default=None)
    if newest is None or not newest.together:
        return plans
    return {home: plan for home, plan in plans.items() if home in newest.together}


def weights_by_cluster(
    plans: Mapping[ClusterId, Plan], clusters: Iterable[ClusterId]
) -> dict[ClusterId, dict[ClusterId, float]]:
    """The weight of every home at each PrfaaS cluster, above 0. Equal ones where no plan uses the
    cluster."""
    planned = {home: planned_work(plan) for home, plan in plans.items()}
    return {cluster: _weights(planned, cluster) for cluster in clusters}


def _weights(
    planned: Mapping[ClusterId, Mapping[ClusterId, float]], cluster: ClusterId
) -> dict[ClusterId, float]:
    here = {home: work.get(cluster, 0.0) for home, work in planned.items()}
    largest = max(here.values(), default=0.0)
    if largest < _NEGLIGIBLE:
        return dict.fromkeys(here, 1.0)
    return {home: max(work, LEAST_WEIGHT * largest) for home, work in here.items()}


# Uses --------------------------------------------------------------------------------------------


class ShareUses:
    """The prefill seconds that each home has lately dispatched to each PrfaaS cluster. They decay
    with time, so that a home pays for a flood only for a while. They are seconds that the profiles
    state, so that gateways with different corrections of them count alike."""

    def __init__(self, time_constant_s: float = TIME_CONSTANT_S) -> None:
        """A deployment with shorter prefills, such as one for tests, may have a shorter one."""
        self._time_constant_s = time_constant_s
        self._used: dict[ClusterId, dict[ClusterId, float]] = {}  # by cluster and home
        self._at_s: dict[ClusterId, float] = {}  # of the values in `_used`

    def record(self, cluster: ClusterId, home: ClusterId, stated_s: float, now_s: float) -> None:
        """A request of the home was dispatched to the cluster."""
        used = self._at(cluster, now_s)
        used[home] = used.get(home, 0.0) + stated_s

    def used_s(self, cluster: ClusterId, home: ClusterId, now_s: float) -> float:
        return self._at(cluster, now_s).get(home, 0.0)

    def of_homes(self, cluster: ClusterId, now_s: float) -> Mapping[ClusterId, float]:
        """The use of every home that has used the cluster. Valid until the next call."""
        return self._at(cluster, now_s)

    def _at(self, cluster: ClusterId, now_s: float) -> dict[ClusterId, float]:
        used = self._used.setdefault(cluster, {})
        past_s = now_s - self._at_s.get(cluster, now_s)
        if past_s > 0:
            factor = math.exp(-past_s / self._time_constant_s)
            for home in used:
                used[home] *= factor
        if past_s >= 0:
            self._at_s[cluster] = now_s
        return used


# Decisions ---------------------------------------------------------------------------------------


class SharedCluster(NamedTuple):
    """A PrfaaS cluster as its homes share it now."""

    cluster: ClusterId
    weights: Mapping[ClusterId, float]  # of all homes
    used_s: Mapping[ClusterId, float]  # by home; 0 where none is given
    wanting: Collection[ClusterId]  # homes whose requests wait for room there


def _behind(
    home: ClusterId, shared: SharedCluster, others: Collection[ClusterId], stated_s: float
) -> ClusterId | None:
    """One of the `others` that has had less of its share than this home, which may be ahead by its
    part of a prefill of `stated_s`."""
    used_s, weights = shared.used_s, shared.weights
    margin_s = weights[home] / sum(weights.values()) * stated_s
    had = (used_s.get(home, 0.0) - margin_s) / weights[home]
    for other in others:
        if other != home and used_s.get(other, 0.0) / weights[other] < had:
            return other
    return None


def time_to_drain_s(link_id: LinkId, link: LinkView, state: ShortTermState) -> float:
    """How long a link needs for what was dispatched to it. A link that has become slow counts as
    empty: what would wait for it at the router would wait until it is refused, although it could
    be served, if late."""
    if estimated_bps(link_id, link, state) < _SLOW_LINK * link.capacity_bps:
        return 0.0
    return link_drain_s(link_id, link, state)


def _has_enough_to_carry(drain_s: float, prefilled_s: float) -> bool:
    """Of a link that needs `drain_s` for what it has, when a prefill ends in `prefilled_s`."""
    return drain_s - prefilled_s > LINK_AHEAD_S


def share_hold(
    found: Route,
    request: Request,
    home: ClusterId,
    shared: SharedCluster,
    node: NodeView,
    now_s: float,
    *,
    stated_s: float,
    queue_s: float,
    drain_s: float,
) -> Hold | None:
    """The hold of a request that has the route `found` to a PrfaaS cluster, but whose home is ahead
    of its share there; None: it may go. `node` is the prefill node of the route, `stated_s` the
    stated duration of the prefill, `queue_s` the prefill work that keeps a node busy, and `drain_s`
    the `time_to_drain_s` of the link to the home.

    A home may be ahead by its part of the request's own prefill. Without that, two homes that send
    what the plan gives them would hold each other's requests in turn. With more, a home without a
    planned flow could always have a prefill at the cluster, at the cost of those that have one."""
    wait_s = node.free_at_s - now_s
    full = _has_enough_to_carry(drain_s, max(wait_s, 0.0) + found.prefill_s)
    if wait_s < -IDLE_S and not full:
        return None
    cluster, busy = shared.cluster, wait_s > queue_s
    others: Collection[ClusterId] = shared.weights if busy or full else shared.wanting
    behind = _behind(home, shared, others, stated_s)
    if behind is not None:
        reason = f"{behind} has had less of its share of {cluster}"
    elif busy and home in shared.wanting:
        reason = f"other requests of {home} wait for {cluster}"
    else:
        return None
    return Hold(reason, cluster, found.prefill_s, request.arrived_s)


def waits_for_link(
    home: ClusterId,
    shared: SharedCluster,
    prefill_s: float,
    link_id: LinkId,
    link: LinkView | None,
    state: ShortTermState,
) -> bool:
    """Whether a request that waits for the cluster need not be retried before its home's link has
    carried more: its home is ahead of its share, too. A link that is down may be no way any more,
    so that its requests are retried as others are."""
    if link is None or not link.up:
        return False
    if not _has_enough_to_carry(time_to_drain_s(link_id, link, state), prefill_s):
        return False
    return _behind(home, shared, shared.weights, prefill_s) is not None
