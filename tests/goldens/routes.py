"""The router's decisions about drawn requests in drawn situations, for every policy.

A situation is what a router sees at one moment: nodes with queues, some of them lost, cached
prefixes, links of which some are slow or cut, requests that wait. All numbers are multiples of a
power of two, so that nodes and paths tie often and the golden holds how ties are broken. Each
request is decided by itself: nothing is dispatched. `simulations` has decisions that follow from
earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from prfaas.config import load_deployment
from prfaas.config.deployment import SchedulerSection
from prfaas.planner.network.problem import NetworkProblem
from prfaas.scheduler.costs import Costs, build_costs
from prfaas.scheduler.explain import explain
from prfaas.scheduler.homes.elsewhere import HomeContext, route_from
from prfaas.scheduler.homes.plans import as_network, first_plans, home_name
from prfaas.scheduler.lookup.prefixes import CachedPrefix, group_prefixes
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.short_term import adjust
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import ClusterView, LinkId, LinkView, NodeView, View
from prfaas.scheduler.waiting import CLASSES, HeldWork
from prfaas.sim.config import node_names
from prfaas.studies.network_plans import deployment_problem
from prfaas.types import ClusterId, LinkStats, NodeId
from tests.goldens.canonical import Golden, Precision
from tests.goldens.commands import ROOT
from tests.goldens.draws import Draws

PRECISION = Precision(digits=7)
DEPLOYMENTS = ("case_study", "two_by_two", "four_by_three")
POLICIES = ("paper", "adaptive", "local", "remote")
SITUATIONS = 24
REQUESTS = 5  # of each situation
LONGEST = 131_072
_NOW_S = 1024.0
_BLOCK_TOKENS = 64
_COMPARED_EVERY = 12  # so often a decision is explained
# What a request is, and what its row has of the decision.
_COLUMNS = (
    *("situation", "home", "tokens", "kind", "decision", "prefill", "decode", "cached", "sent"),
    *("bytes", "prefill_s", "copies", "credits", "round_trip_s", "reason"),
)


class _Hit(NamedTuple):
    tokens: int
    attention_tokens: int
    pool_tokens: int | None = None
    remote_pool_tokens: int | None = None


def goldens() -> Iterator[Golden]:
    for name in DEPLOYMENTS:
        file = ROOT / "configs" / f"{name}.toml"
        deployment = load_deployment(file)
        network = as_network(deployment_problem(file, deployment))
        costs = {home_name(home): build_costs(home.problem, LONGEST) for home in network.homes}
        for policy in POLICIES:
            rules = msgspec.structs.replace(deployment.scheduler, policy=policy)
            yield Golden(f"{name}.{policy}.json", _decisions(network, costs, rules))


def _decisions(
    network: NetworkProblem, costs: Mapping[ClusterId, Costs], rules: SchedulerSection
) -> dict[str, Any]:
    plans = _plans(network, rules)
    draws = Draws(17)  # the same situations for every policy
    rows: list[list[Any]] = []
    compared: dict[str, Any] = {}
    for number in range(SITUATIONS):
        contexts = _situation(draws, network, rules, plans, costs)
        for _ in range(REQUESTS):
            home = draws.one_of(sorted(contexts))
            request, kind = _request(draws, len(rows))
            here = contexts[home]

            others = [contexts[other] for other in sorted(contexts) if other != home]
            choice = route_from(request, here, others.copy)
            if len(rows) % _COMPARED_EVERY == 0:
                found = explain(choice, [here.view], request, here.plan, here.state)
                compared[str(len(rows))] = [
                    [way.cluster, way.node, way.cached_tokens, len(way.copies), way.cost_s]
                    + [*way.forecast, way.alone, way.declined]
                    for way in found.alternatives
                ]
            rows.append([number, home, request.prompt_tokens, kind, *_decided(choice.taken)])
    shown = {str(plan_home): _plan(plan) for plan_home, plan in plans.items()}
    return {"columns": _COLUMNS, "rows": rows, "compared": compared, "plans": shown}


def _decided(taken: Any) -> list[Any]:
    if isinstance(taken, Route):
        kind = "alone" if taken.alone else "remote" if taken.offloaded else "local"
        copies = [f"{c.source} > {c.target}: {c.tokens}" for c in taken.copies]
        credits = [f"{cluster} {tokens:.6g}" for cluster, tokens in taken.credits]
        row = [kind, taken.prefill, taken.decode, taken.cached_tokens, taken.transfer_tokens]
        row += [taken.nbytes, taken.prefill_s, "; ".join(copies), "; ".join(credits)]
        return [*row, taken.round_trip_s, taken.reason]
    row = ["hold", taken.cluster, None, None, None, None, taken.work_s, "", ""]
    return [*row, taken.precedence, taken.reason]


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "threshold_tokens": plan.threshold_tokens,
        "roles": dict(plan.roles),
        "shares": list(plan.shares),
        "capacity_rps": plan.capacity_rps,
    }


def _plans(network: NetworkProblem, rules: SchedulerSection) -> dict[ClusterId, Plan]:
    nodes = {
        home_name(home): node_names(
            home.problem.local.pool.cluster, home.problem.local.pool.instances
        )
        for home in network.homes
    }
    return first_plans(network, nodes, rules.replan, rules.policy)


# Situations ---------------------------------------------------------------------------------------


def _situation(
    draws: Draws,
    network: NetworkProblem,
    rules: SchedulerSection,
    plans: Mapping[ClusterId, Plan],
    costs: Mapping[ClusterId, Costs],
) -> dict[ClusterId, HomeContext]:
    """Everything that a deployment has at one moment, as the router of each home sees it."""
    busy, lost = draws.share(), draws.one_of((0.0, 0.0, 0.125, 0.5))
    remotes = {
        ClusterId(name): _cluster(draws, name, pool.instances, {}, busy, lost)
        for name, pool in network.prfaas_pools.items()
    }
    contexts: dict[ClusterId, HomeContext] = {}
    for home in network.homes:
        name, plan, local = home_name(home), plans[home_name(home)], home.problem.local
        slots = local.decode.bs_max
        gone = draws.one_of((lost, lost, lost, 0.875))
        own = _cluster(draws, name, local.pool.instances, plan.roles, busy, gone, slots)
        names = [ClusterId(remote.pool.cluster) for remote in home.problem.remotes]
        links: dict[LinkId, LinkView] = {}
        for remote, other in zip(home.problem.remotes, names, strict=True):
            links[other, name] = _link(draws, remote.path.bps, remote.path.rtt_s)
            links[name, other] = _link(draws, remote.path.bps, remote.path.rtt_s)
        clusters = [own, *(remotes[other] for other in names)]
        view = View(
            now_s=_NOW_S,
            local=own,
            remotes=tuple(remotes[other] for other in names),
            links=links,
            costs=costs[name],
            cached=_cached(draws, clusters),
            held={one.cluster: _held(draws) for one in clusters if draws.happens(0.4)},
            shared=len(network.homes) > 1,
        )
        state = ShortTermState(rules)
        for _ in range(3):  # reports: a verdict needs more than one of them
            links = {link: _later(seen) for link, seen in view.links.items()}
            view = view._replace(links=links)
            state = adjust(state, view, _NOW_S)
        contexts[name] = HomeContext(view, plan, state, draws.one_of((0.0, 0.0625, 0.125)))
    return contexts


def _cluster(
    draws: Draws,
    name: str,
    instances: int,
    roles: Mapping[NodeId, Any],
    busy: float,
    lost: float,
    slots: int = 0,
) -> ClusterView:
    nodes = []
    for node in node_names(name, instances):
        queued = draws.whole(1, 6) if draws.happens(busy) else 0
        nodes.append(
            NodeView(
                node=node,
                role=roles.get(node, "prefill"),
                usable=not draws.happens(lost),
                free_at_s=_NOW_S + queued * draws.one_of((0.5, 1.0, 8.0)),
                queued=queued,
                active=draws.whole(0, slots) if draws.happens(busy) else draws.whole(0, 2),
                slots=max(slots, 1),
                free_kv_bytes=draws.one_of((2.0**30, 2.0**36, 2.0**40)),
                next_alone_s=_NOW_S + draws.one_of((-64.0, -64.0, 16.0)),
                pace=draws.one_of((1.0, 1.0, 1.0, 1.0, 2.0)),
            )
        )
    return ClusterView(ClusterId(name), nodes)


def _link(draws: Draws, bps: float, rtt_s: float) -> LinkView:
    pending = draws.one_of((0.0, 0.0, 2.0**28, 2.0**32, 2.0**36))
    slow = draws.happens(0.25)
    stats = LinkStats(
        peer="peer",
        at_s=_NOW_S - 2.0,
        connections=8,
        goodput_bps=bps * (0.25 if slow else 0.5),
        backlog_bytes=int(pending),
        in_flight_bytes=int(pending) // 16,
        waited_s=draws.one_of((4.0, 16.0)) if slow and pending else 0.0,
        rtt_s=rtt_s * (4 if slow else 1),
        delivery_bps=bps * 0.25 if slow else None,
        retransmitted_segments=4096 if slow else 0,
    )
    return LinkView(
        up=not draws.happens(0.08),
        capacity_bps=bps,
        rtt_s=rtt_s,
        stats=stats,
        pending_bytes=pending,
        credit_tokens=draws.one_of((-4096.0, 0.0, 0.0, 4096.0)),
    )


def _later(link: LinkView) -> LinkView:
    """The same report a second later."""
    assert link.stats is not None
    return link._replace(stats=msgspec.structs.replace(link.stats, at_s=link.stats.at_s + 1.0))


def _cached(draws: Draws, clusters: Sequence[ClusterView]) -> Any:
    names = [node.node for cluster in clusters for node in cluster.nodes]
    numbers = {name: number for number, name in enumerate(names)}
    held: dict[NodeId, CachedPrefix] = {}
    share = draws.one_of((0.0, 0.1, 0.6))
    for name in names:
        if draws.happens(share):
            blocks = draws.one_of((4, 64, 64, 500))
            tokens = blocks * _BLOCK_TOKENS
            pool = draws.one_of((None, None, 0, tokens // 2))
            held[name] = _Hit(tokens, tokens + draws.one_of((0, 0, 640)), pool, pool)
    return group_prefixes(held, numbers)


def _held(draws: Draws) -> HeldWork:
    work = [draws.one_of((0.0, 0.0, 1.0, 4.0)) for _ in range(CLASSES)]
    return HeldWork(tuple(work), draws.one_of((0.5, 1000.0)), sum(work) / 2)


def _request(draws: Draws, number: int) -> tuple[Request, str]:
    tokens = draws.one_of((1, 200, 2_048, 8_000, 19_456, 32_768, 65_536, LONGEST))
    kind = draws.one_of(("", "", "", "", "", "", "adapter", "multimodal", "no_alone", "logprobs"))
    waited_s = draws.one_of((0.0, 0.0, 4.0))
    request = Request(number, tokens, _NOW_S - waited_s)
    match kind:
        case "adapter":
            request = request._replace(adapter="some-adapter")
        case "multimodal":
            request = request._replace(multimodal=True)
        case "no_alone":
            request = request._replace(no_alone=True)
        case "logprobs":
            request = request._replace(prompt_logprobs=True)
    return request, f"{kind or 'plain'}, waited {waited_s:g} s"
