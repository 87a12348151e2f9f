"""`bench lost_clusters`: losses and drains, step by step, and what each has to show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from _lost_processes import World
from _lost_requests import (
    Asked,
    Load,
    Loss,
    Tally,
    rate_back_at,
    tally,
    ttft_quantile,
)
from _lost_watch import (
    Sample,
    Splits,
    Wanted,
    all_follow,
    all_follow_at,
    empty_at,
    planned_together,
    planner_since,
    shared_epochs,
    splits_before,
)
from prfaas.demo.shared import Check
from prfaas.launch.request_outcomes import RequestOutcome
from prfaas.planner.network.problem import NetworkProblem
from prfaas.scheduler.homes.plans import solve_network
from prfaas.scheduler.plan import find_optimum, hardware_for

OFFERED = 0.6  # of what is left can serve
CALM_S = 30.0  # of load before a step: the nodes have work then
LEFT_S = 30.0  # until the plan of what is left
FULL_S = 60.0  # until the full plan, after the return
PLANNER_S = 10.0  # until another gateway plans
MORE_S = 30.0  # of load after all is back
WINDOW_S = 20.0  # in which first tokens are counted
BACK = 0.9  # of the requests of the same seconds have a first token, but for chance
EMPTY_S = 120.0  # for a drained cluster to finish its requests
EMPTY_LOOKS = 3  # so often in a row each gateway must say that it has none


# Rates --------------------------------------------------------------------------------------------


def without(network: NetworkProblem, cluster: str) -> NetworkProblem:
    """The problem without a PrfaaS cluster."""
    return network.with_remotes(lambda _, r: None if r.pool.cluster == cluster else r)


def rate_left_rps(network: NetworkProblem, lost: str | None, policy: str) -> float:
    """Requests of all homes per second that the clusters can serve without `lost`. While a PD
    cluster is lost, the other one serves the requests of both, each with its own lengths."""
    lost_home = next((home for home in network.homes if home.cluster == lost), None)
    if lost is None or lost_home is None:
        return solve_network(network if lost is None else without(network, lost)).rate_rps
    (left,) = (home for home in network.homes if home.cluster != lost)
    problem = hardware_for(policy, left.problem)
    seconds = 0.0  # of all nodes that are left, for one request
    for home in network.homes:
        served = replace(problem, workload=home.problem.workload)
        seconds += home.share / find_optimum(served).capacity_rps
    return 1 / seconds


def rates_of(network: NetworkProblem, total_rps: float) -> dict[str, float]:
    return {home.cluster: home.share * total_rps for home in network.homes}


# Losses -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One cluster or gateway that was killed and has returned. Times are seconds after the kill, or
    after the return for those that are named `full`."""

    name: str
    offered_rps: float
    tally: Tally
    left_plan_s: float | None
    left_rate_s: float | None
    started_s: float  # that the processes took to start
    full_plan_s: float | None
    full_rate_s: float | None
    p90_ttft_s: float
    shared_epochs: dict[int, list[str]]
    planned_together: list[str]  # gateways that have planned at the same time
    used_again: int | None = None  # requests that a returned cluster has served
    planner_s: float | None = None  # until another gateway planned
    epochs: tuple[int, int] | None = None  # of the killed gateway, and of the next

    @property
    def is_of_planner(self) -> bool:
        return self.epochs is not None


def step_checks(step: Step) -> list[Check]:
    found = step.tally
    none = "none"
    checks = [
        Check(
            f"{step.name}: no request fails whose gateway and decode node survived",
            not found.failed,
            f"{len(found.failed)} of {found.requests}; {found.excused} excused",
        ),
        Check(
            f"{step.name}: every other request ends with a clear error",
            not found.unclear,
            str(found.unclear or none),
        ),
        _within(f"{step.name}: the plan of what is left is followed", step.left_plan_s, LEFT_S),
        _within(f"{step.name}: first tokens at the offered rate", step.left_rate_s, LEFT_S),
        _within(f"{step.name}: the full plan is followed", step.full_plan_s, FULL_S),
        _within(f"{step.name}: first tokens are back after it", step.full_rate_s, FULL_S),
        Check(
            f"{step.name}: no two gateways plan with one epoch",
            not step.shared_epochs,
            str(step.shared_epochs or none),
        ),
        Check(
            f"{step.name}: no two gateways plan at the same time",
            not step.planned_together,
            "; ".join(step.planned_together) or none,
        ),
    ]
    if step.used_again is not None:
        checks.append(_again(step.name, step.used_again))
    if step.is_of_planner:
        checks.append(_within(f"{step.name}: another gateway plans", step.planner_s, PLANNER_S))
        before, after = step.epochs or (0, 0)
        claim = f"{step.name}: the next epoch is higher"
        checks.append(Check(claim, after > before, f"{before}, then {after}"))
    return checks


def _again(name: str, requests: int) -> Check:
    return Check(f"{name}: serves again", requests > 0, f"{requests} requests")


def _within(claim: str, seconds: float | None, limit_s: float) -> Check:
    held = seconds is not None and seconds <= limit_s
    seen = "never" if seconds is None else f"{seconds:.1f} s"
    return Check(f"{claim} within {limit_s:g} s", held, seen)


async def lose_cluster(world: World, cluster: str, lost_s: float, seed: int) -> Step:
    policy = world.case.deployment.scheduler.policy
    load = _started_load(world, rate_left_rps(world.case.problem, cluster, policy), lost_s, seed)
    await asyncio.sleep(CALM_S)
    kill, start = partial(world.kill_nodes, cluster), partial(world.start_nodes, cluster)
    loss, began_s = await _lose(world, load, kill, start, lost_s)
    live = world.instances | {cluster: 0}
    kind = "PD" if cluster in world.homes else "PrfaaS"
    step = _step(world, f"{kind} cluster {cluster}", load, loss, began_s, live, world.homes)
    return replace(step, used_again=_uses(world, load, cluster, loss.until_s))


async def lose_planner(world: World, lost_s: float, seed: int) -> Step:
    load = _started_load(world, rate_left_rps(world.case.problem, None, ""), lost_s, seed)
    await asyncio.sleep(CALM_S)
    home, epoch = planner_of(world.watch.samples, world.homes)
    kill, start = partial(world.kill_gateway, home), partial(world.start_gateway, home)
    loss, began_s = await _lose(world, load, kill, start, lost_s)
    others = [other for other in world.homes if other != home]
    step = _step(world, f"gateway of {home}", load, loss, began_s, world.instances, others)
    following = planner_since(world.watch.samples, others, epoch, loss.from_s)
    if following is None or following.seen is None:
        return replace(step, epochs=(epoch, 0))
    planner_s = following.at_s - loss.from_s
    return replace(step, planner_s=planner_s, epochs=(epoch, following.seen.epoch))


def _started_load(world: World, left_rps: float, for_s: float, seed: int) -> Load:
    load = world.load(seed)
    load.start(rates_of(world.case.problem, OFFERED * left_rps), _longest_s(for_s))
    return load


async def _lose(
    world: World,
    load: Load,
    kill: Callable[[], Awaitable[Loss]],
    start: Callable[[], Awaitable[None]],
    lost_s: float,
) -> tuple[Loss, float]:
    """Kills, starts again after `lost_s`, and ends the load when all is back. Returns the loss and
    the time at which the start began."""
    splits = splits_before(world.watch.samples, world.clock.now())
    loss = await kill()
    await asyncio.sleep(lost_s)
    began_s = world.clock.now()
    await start()
    loss = loss._replace(until_s=world.clock.now())
    await _return(world, load, splits)
    return loss, began_s


def planner_of(samples: Sequence[Sample], homes: Collection[str]) -> tuple[str, int]:
    """The gateway that has planned last, and its epoch."""
    for sample in reversed(samples):
        if sample.gateway in homes and sample.seen is not None and sample.seen.plans:
            return sample.gateway, sample.seen.epoch
    raise AssertionError("a gateway plans, because there is a plan")


def _longest_s(lost_s: float) -> float:
    """A bound on the time of one step, of which starting processes is the uncertain part."""
    return CALM_S + lost_s + 300.0 + FULL_S + MORE_S


async def _return(world: World, load: Load, splits: Splits) -> None:
    """Load until all gateways follow the full plan, and for a while after it."""
    wanted = Wanted(world.instances, world.homes, splits)

    def is_back() -> bool:
        return all_follow([world.watch.latest(home) for home in world.homes], wanted)

    await world.until(is_back, FULL_S)
    await asyncio.sleep(MORE_S)
    await load.stop()
    # Of a request that a killed gateway had, there is no line.
    await world.lines.wait_for([one.id for one in load.asked if one.error is None])


def _step(
    world: World,
    name: str,
    load: Load,
    loss: Loss,
    began_s: float,
    live: Mapping[str, int],
    gateways: Sequence[str],
) -> Step:
    """`live`: the instances that were left. `gateways`: those that were left."""
    samples = [sample for sample in world.watch.samples if sample.at_s >= loss.from_s - CALM_S]
    asked = load.asked
    until_s = max((one.sent_s for one in asked), default=loss.until_s)
    left = Wanted(live, world.homes)
    full = Wanted(world.instances, world.homes, splits_before(samples, loss.from_s))
    left_s = all_follow_at(samples, gateways, left, loss.from_s, began_s)
    full_s = all_follow_at(samples, world.homes, full, loss.until_s, until_s)
    served = [one for one in asked if one.home in gateways]
    return Step(
        name=name,
        offered_rps=sum(one.sent_s < loss.from_s for one in asked) / CALM_S,
        tally=tally(asked, world.lines.found, [loss], world.cluster_of),
        left_plan_s=None if left_s is None else left_s - loss.from_s,
        left_rate_s=rate_back_s(served, left_s, loss.from_s, began_s),
        started_s=loss.until_s - began_s,
        full_plan_s=None if full_s is None else full_s - loss.until_s,
        full_rate_s=rate_back_s(asked, full_s, loss.until_s, until_s),
        p90_ttft_s=ttft_quantile(asked, 0.9),
        shared_epochs=shared_epochs(samples),
        planned_together=planned_together(samples),
    )


def rate_back_s(
    asked: Sequence[Asked], followed_s: float | None, since_s: float, until_s: float
) -> float | None:
    """Seconds after `since_s`, the kill or the return, until first tokens come at the offered rate
    for the rest of the phase. `followed_s`: since when the plan is followed. No window reaches back
    to what was served before `since_s`."""
    if followed_s is None:
        return None
    from_s = max(followed_s, since_s + WINDOW_S)
    return _after(rate_back_at(asked, from_s, until_s, WINDOW_S, BACK), since_s)


def _after(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else max(0.0, at_s - since_s)


# Drain --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drain:
    """A cluster that was drained and has been returned."""

    cluster: str
    offered_rps: float
    tally: Tally
    empty_s: float | None  # from the order until no node had requests
    left_plan_s: float | None  # from the order until the plan of what is left
    full_plan_s: float | None  # from the second order until the full plan
    served_elsewhere: int  # requests that took another cluster in its place, while it was empty
    served_there: int  # requests that used it nevertheless
    used_again: int  # requests that it served after the return


def drain_checks(found: Drain) -> list[Check]:
    bad = len(found.tally.failed) + len(found.tally.unclear) + found.tally.excused
    checks = [
        Check("no request fails", not bad, f"{bad} of {found.tally.requests}"),
        _within(f"{found.cluster} has no request left", found.empty_s, EMPTY_S),
        _within("the plan of what is left is followed", found.left_plan_s, LEFT_S),
        _within("the full plan is followed after the return", found.full_plan_s, FULL_S),
        Check(
            f"requests are served elsewhere while {found.cluster} is drained",
            found.served_elsewhere > 0 and found.served_there == 0,
            f"{found.served_elsewhere} elsewhere, {found.served_there} there",
        ),
        _again(found.cluster, found.used_again),
    ]
    return checks


async def drain_cluster(world: World, cluster: str, drained_s: float, seed: int) -> Drain:
    policy = world.case.deployment.scheduler.policy
    left_rps = rate_left_rps(world.case.problem, cluster, policy)
    load = _started_load(world, left_rps, drained_s + EMPTY_S, seed)
    await asyncio.sleep(CALM_S)
    ordered_s = world.clock.now()
    splits = splits_before(world.watch.samples, ordered_s)
    await world.order_drain(cluster, drained=True)

    def is_empty() -> bool:
        seen = world.watch.samples
        return empty_at(seen, world.homes, cluster, ordered_s, EMPTY_LOOKS) is not None

    emptied = await world.until(is_empty, EMPTY_S)
    empty_s = world.clock.now()
    await asyncio.sleep(drained_s)
    returned_s = world.clock.now()
    await world.order_drain(cluster, drained=False)
    await _return(world, load, splits)
    until_s = max((one.sent_s for one in load.asked), default=returned_s)
    samples, homes = world.watch.samples, world.homes
    left = Wanted(world.instances | {cluster: 0}, homes)
    full = Wanted(world.instances, homes, splits)
    left_s = all_follow_at(samples, homes, left, ordered_s, returned_s)
    full_s = all_follow_at(samples, homes, full, returned_s, until_s)
    meanwhile = [one for one in load.asked if empty_s <= one.sent_s <= returned_s]
    return Drain(
        cluster,
        OFFERED * left_rps,
        tally(load.asked, world.lines.found, [], world.cluster_of),
        empty_s - ordered_s if emptied else None,
        _after(left_s, ordered_s),
        _after(full_s, returned_s),
        served_elsewhere=sum(
            is_served_elsewhere(
                one, world.lines.found.get(one.id), cluster, homes, world.cluster_of
            )
            for one in meanwhile
        ),
        # A request that was sent just before the second order may be placed after it.
        served_there=sum(
            cluster in _clusters_used(world, one)
            for one in meanwhile
            if one.first_s is not None and one.first_s <= returned_s
        ),
        used_again=_uses(world, load, cluster, returned_s),
    )


def is_served_elsewhere(
    asked: Asked,
    line: RequestOutcome | None,
    drained: str,
    homes: Collection[str],
    cluster_of: Mapping[str, str],
) -> bool:
    """Whether another cluster has served the request in the drained one's place: it arrived at the
    drained PD cluster, or, for a PrfaaS cluster, another PrfaaS cluster has prefilled it."""
    if asked.error is not None or line is None:
        return False
    prefill, decode = cluster_of.get(line.prefill), cluster_of.get(line.decode)
    if decode is None or drained in (prefill, decode):
        return False
    if drained in homes:
        return asked.home == drained
    return prefill is not None and prefill not in homes


def _uses(world: World, load: Load, cluster: str, from_s: float) -> int:
    """Requests sent from then on that have completed, and have used the cluster."""
    asked = [one for one in load.asked if one.sent_s >= from_s and one.error is None]
    return sum(cluster in _clusters_used(world, one) for one in asked)


def _clusters_used(world: World, asked: Asked) -> set[str]:
    line = world.lines.found.get(asked.id)
    if line is None:
        return set()
    return {world.cluster_of[node] for node in (line.prefill, line.decode) if node}
