"""`bench lost_clusters`: what the gateways say of themselves over time, and what follows from it.

`Watch` reads `/prfaas/v1/state` of every gateway twice a second. All else here is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prfaas.cli.drain import nodes_of, requests_left
from prfaas.clock import Clock
from prfaas.errors import PeerError
from prfaas.http_client.client import HttpClient

LOOK_S = 0.5  # between two polls of a gateway
ASK_S = 5.0  # for one response


@dataclass(frozen=True, slots=True)
class Seen:
    """One gateway at one time."""

    instances: Mapping[str, Mapping[str, int]]  # home -> cluster -> instances in the home's plan
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
        instances={h: p["instances"] for h, p in plan["homes"].items() if p["made"]},
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


def follows(seen: Seen, live: Mapping[str, int], homes: Iterable[str]) -> bool:
    """Whether the gateway uses exactly the live nodes, and has a plan of exactly these for every PD
    cluster that has any. `live`: instances by cluster."""
    if any(seen.in_use.get(cluster, 0) != count for cluster, count in live.items()):
        return False
    for home in homes:
        if not live[home]:
            continue
        plan = seen.instances.get(home)
        if plan is None or plan.get(home, 0) != live[home]:
            return False
        # A PrfaaS cluster that is lost may be left out, one that lives may not.
        if any(plan.get(cluster, 0) != live[cluster] for cluster in live.keys() - set(homes)):
            return False
    return True


def all_follow_at(
    samples: Sequence[Sample],
    gateways: Iterable[str],
    live: Mapping[str, int],
    homes: Sequence[str],
    from_s: float,
    until_s: float,
) -> float | None:
    """The first time from which on each of the gateways follows the plan of the live nodes, until
    `until_s`. None: they do not."""
    latest = from_s
    for gateway in gateways:
        since: float | None = None
        for at_s, name, seen in samples:
            if name != gateway or not from_s <= at_s <= until_s or seen is None:
                continue  # a late answer is not another plan
            if not follows(seen, live, homes):
                since = None
            elif since is None:
                since = at_s
        if since is None:
            return None
        latest = max(latest, since)
    return latest


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


@dataclass(slots=True)
class Watch:
    urls: Mapping[str, str]  # of the gateways, by home
    http: HttpClient
    clock: Clock
    samples: list[Sample] = field(default_factory=list)

    async def run(self) -> None:
        """Polls until cancelled."""
        async with asyncio.TaskGroup() as group:
            for home in self.urls:
                group.create_task(self._poll(home))

    async def _poll(self, home: str) -> None:
        while True:
            self.samples.append(Sample(self.clock.now(), home, await self._look(home)))
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
