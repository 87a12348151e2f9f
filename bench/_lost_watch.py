"""`bench lost_clusters`: what the gateways say of themselves over time, and what follows from it.

`Watch` reads `/prfaas/v1/state` of every gateway twice a second, and `beside` lets its errors end
the work. All else here is pure.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias, TypeVar

from prfaas.cli.drain import nodes_of, requests_left
from prfaas.clock import Clock
from prfaas.errors import PeerError
from prfaas.http_client.client import HttpClient

LOOK_S = 0.5  # between two polls of a gateway
ASK_S = 5.0  # for one response
SPREADS_S = 2.0  # for a new plan to reach all gateways, and for the next look at each

T = TypeVar("T")
Splits: TypeAlias = Mapping[str, Mapping[str, int]]  # home -> role -> nodes


class HomePlan(NamedTuple):
    """The plan of one PD cluster, as a gateway shows it."""

    threshold_tokens: int
    roles: Mapping[str, str]  # by node
    instances: Mapping[str, int]  # by cluster

    @property
    def split(self) -> dict[str, int]:
        """Nodes by role."""
        return dict(Counter(self.roles.values()))


@dataclass(frozen=True, slots=True)
class Seen:
    """One gateway at one time."""

    homes: Mapping[str, HomePlan]  # those that have a plan
    in_use: Mapping[str, int]  # nodes by cluster
    plans: bool  # it is the gateway that plans
    epoch: int  # of its plans, or of those that it follows
    planner: str | None  # the home of the gateway that plans, as far as it knows
    requests: Mapping[str, int]  # that the nodes of each cluster have
    drained: frozenset[str]


class Sample(NamedTuple):
    at_s: float
    gateway: str  # the home that it serves
    seen: Seen | None  # None: it has not answered


def read_state(state: Mapping[str, Any]) -> Seen:
    plan, planner = state["plan"], state["planner"]
    clusters = state["clusters"]
    return Seen(
        homes={
            home: HomePlan(made["threshold_tokens"], made["roles"], made["instances"])
            for home, made in plan["homes"].items()
            if made["made"]
        },
        in_use={c["cluster"]: sum(n.get("in_use", False) for n in c["nodes"]) for c in clusters},
        plans=planner["here"],
        epoch=planner["epoch"],
        planner=planner["cluster"],
        requests={
            c["cluster"]: sum(requests_left(nodes_of(state, c["cluster"])).values())
            for c in clusters
        },
        drained=frozenset(c["cluster"] for c in clusters if c["drained"]),
    )


class Wanted(NamedTuple):
    """What gateways have to follow: a plan of the nodes that live."""

    live: Mapping[str, int]  # instances by cluster
    homes: Sequence[str]
    splits: Splits | None = None  # None: any

    @property
    def living_homes(self) -> list[str]:
        return [home for home in self.homes if self.live[home]]


def follows(seen: Seen, wanted: Wanted) -> bool:
    """Whether the gateway uses exactly the live nodes, and has a plan of exactly these for every PD
    cluster that has any, with the splits that are wanted."""
    live = wanted.live
    if any(seen.in_use.get(cluster, 0) != count for cluster, count in live.items()):
        return False
    for home in wanted.living_homes:
        plan = seen.homes.get(home)
        if plan is None or plan.instances.get(home, 0) != live[home]:
            return False
        # A PrfaaS cluster that is lost may be left out, one that lives may not.
        remotes = live.keys() - set(wanted.homes)
        if any(plan.instances.get(cluster, 0) != live[cluster] for cluster in remotes):
            return False
        if wanted.splits is not None and plan.split != wanted.splits.get(home):
            return False
    return True


def have_one_plan(seen: Sequence[Seen], homes: Iterable[str]) -> bool:
    """Whether the gateways have the same plan for each of the homes: its threshold, its roles and
    its instances. The state of a gateway does not name the epoch and number of its own plan."""
    return all(one.homes.get(home) == seen[0].homes.get(home) for home in homes for one in seen)


def all_follow(seen: Sequence[Seen | None], wanted: Wanted) -> bool:
    """Whether all the gateways have answered, and follow one such plan."""
    known = [one for one in seen if one is not None]
    if len(known) < len(seen) or not all(follows(one, wanted) for one in known):
        return False
    return have_one_plan(known, wanted.living_homes)


def all_follow_at(
    samples: Iterable[Sample],
    gateways: Collection[str],
    wanted: Wanted,
    from_s: float,
    until_s: float,
) -> float | None:
    """The first time from which on all the gateways follow one such plan, until `until_s`. None:
    they do not. A later plan may take `SPREADS_S` to reach all of them."""
    latest: dict[str, Seen] = {}
    since_s: float | None = None
    apart_s: float | None = None  # since when they have different plans of the live nodes
    for at_s, name, seen in samples:
        if name not in gateways or not from_s <= at_s <= until_s or seen is None:
            continue  # a late answer is not another plan
        latest[name] = seen
        known = list(latest.values())
        if len(known) < len(gateways) or not all(follows(one, wanted) for one in known):
            since_s = apart_s = None
        elif have_one_plan(known, wanted.living_homes):
            since_s, apart_s = at_s if since_s is None else since_s, None
        elif since_s is not None:
            apart_s = at_s if apart_s is None else apart_s
            if at_s - apart_s > SPREADS_S:
                since_s = apart_s = None
    return since_s


def splits_before(samples: Iterable[Sample], at_s: float) -> Splits:
    """The splits of the plans that a gateway has shown last before this time. Raises `ValueError`
    if none has answered."""
    before = [one.seen for one in samples if one.at_s <= at_s and one.seen is not None]
    if not before:
        raise ValueError("no gateway has shown its plan before the loss")
    return {home: plan.split for home, plan in before[-1].homes.items()}


def empty_at(
    samples: Iterable[Sample], gateways: Collection[str], cluster: str, from_s: float, looks: int
) -> float | None:
    """The first time at which each gateway has said `looks` times in a row, from `from_s` on, that
    the cluster is drained and has no request, and no gateway has said otherwise meanwhile."""
    counts: Counter[str] = Counter()
    for at_s, name, seen in samples:
        if name not in gateways or at_s < from_s or seen is None:
            continue
        if cluster not in seen.drained or seen.requests[cluster]:
            counts.clear()
            continue
        counts[name] += 1
        if all(counts[gateway] >= looks for gateway in gateways):
            return at_s
    return None


def planner_since(
    samples: Iterable[Sample], gateways: Iterable[str], above: int, from_s: float
) -> Sample | None:
    """The first sample from `from_s` on of a gateway, one of `gateways`, that plans with a higher
    epoch than `above`."""
    wanted = set(gateways)
    for sample in samples:
        if sample.gateway in wanted and sample.at_s >= from_s and sample.seen is not None:
            if sample.seen.plans and sample.seen.epoch > above:
                return sample
    return None


def planners_by_epoch(samples: Iterable[Sample]) -> dict[int, list[str]]:
    """The gateways that have said that they plan, by epoch."""
    found: dict[int, set[str]] = {}
    for sample in samples:
        if sample.seen is not None and sample.seen.plans:
            found.setdefault(sample.seen.epoch, set()).add(sample.gateway)
    return {epoch: sorted(names) for epoch, names in sorted(found.items())}


def shared_epochs(samples: Iterable[Sample]) -> dict[int, list[str]]:
    """Epochs with which more than one gateway has planned; there must be none."""
    return {epoch: names for epoch, names in planners_by_epoch(samples).items() if len(names) > 1}


def planned_together(samples: Sequence[Sample]) -> list[str]:
    """The times at which two gateways have planned, whatever their epochs; there must be none."""
    spells = [
        (gateway, *spell)
        for gateway in sorted({sample.gateway for sample in samples})
        for spell in _planning_spells(s for s in samples if s.gateway == gateway)
    ]
    found = []
    for (one, from_s, until_s), (other, other_from_s, other_until_s) in combinations(spells, 2):
        both_s = min(until_s, other_until_s) - max(from_s, other_from_s)
        if one != other and both_s > 0:
            found.append(f"{one} and {other} for {both_s:.1f} s")
    return found


def _planning_spells(samples: Iterable[Sample]) -> Iterable[tuple[float, float]]:
    """The times in which a gateway surely plans, from its own samples. An answer may be as old as
    the answer before it, so that the last one of a row counts only up to that one."""
    row: list[float] = []
    for at_s, _, seen in samples:
        if seen is not None and seen.plans:
            row.append(at_s)
            continue
        if len(row) > 1:
            yield row[0], row[-2]
        row = []
    if len(row) > 1:
        yield row[0], row[-2]


@dataclass(slots=True)
class Watch:
    urls: Mapping[str, str]  # of the gateways, by home
    http: HttpClient
    clock: Clock
    samples: list[Sample] = field(default_factory=list)

    async def run(self) -> None:
        """Polls until cancelled. Only an error that is not the gateway's silence ends it."""
        async with asyncio.TaskGroup() as group:
            for home in self.urls:
                group.create_task(self._poll(home))

    async def _poll(self, home: str) -> None:
        while True:
            seen = await self._look(home)
            self.samples.append(Sample(self.clock.now(), home, seen))  # no earlier than the answer
            await asyncio.sleep(LOOK_S)

    async def _look(self, home: str) -> Seen | None:
        url = f"{self.urls[home]}/prfaas/v1/state"
        try:
            state = await self.http.request_json("GET", url, dict[str, Any], timeout_s=ASK_S)
        except PeerError:
            return None
        return read_state(state)

    def latest(self, home: str) -> Seen | None:
        return next((s.seen for s in reversed(self.samples) if s.gateway == home), None)

    async def is_ready(self, home: str) -> bool:
        """Whether a load balancer would send requests to the gateway."""
        try:
            await self.http.request("GET", f"{self.urls[home]}/ready", timeout_s=ASK_S)
        except PeerError:
            return False
        return True


async def beside(watching: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """Returns the work's result. When the watch ends first, cancels the work and raises its
    error."""
    working = asyncio.create_task(work)
    either: set[asyncio.Task[Any]] = {working, watching}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
            raise RuntimeError("the watch of the gateways has ended")
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
