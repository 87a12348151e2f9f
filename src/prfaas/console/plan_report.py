"""A plan as the data of one page: the clusters, the flows between them, what limits the rate, and
curves. Pure: a solved plan in, plain data out. `plan_curves` makes the curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from prfaas import __version__
from prfaas.console.plan_curves import Curve
from prfaas.console.scene import ClusterScene, HomeScene, LinkScene, NodeScene, Scene
from prfaas.console.text_table import TextTable
from prfaas.planner.comparison import DeploymentComparison, Solution
from prfaas.planner.curves import WorkCurves
from prfaas.planner.network.plan import Binding, Flow, HomePlan, NetworkPlan, PrfaasPlan
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.planner.shown_curves import chosen_row
from prfaas.sim.config import node_names

# As in `planner.network.solve`: busier than this is at the limit.
_BUSY = 0.999


class PlanTexts(NamedTuple):
    """What the page says in words, as `prfaas plan` prints it."""

    title: str
    model: str
    policy: str
    headline: str
    tables: Sequence[TextTable] = ()
    notes: Sequence[str] = ()


def plan_report(
    texts: PlanTexts, problem: NetworkProblem, plan: NetworkPlan, curves: Sequence[Curve]
) -> dict[str, Any]:
    """`as_network_plan` makes the plan of a deployment with one PD cluster."""
    return {
        "kind": "plan",
        "title": texts.title,
        "model": texts.model,
        "made_by": f"prfaas {__version__}",
        "reading": plan.reading,
        "headline": f"{plan.rate_rps:.2f} requests/s. {texts.headline}",
        "limits": [_limit(binding) for binding in plan.binding],
        "summary": [list(row) for row in _summary(plan)],
        "scene": msgspec.to_builtins(_scene(texts, problem, plan)),
        "busy": _busy(plan),
        "flows": _flows(plan),
        "curves": [curve.as_dict() for curve in curves],
        "tables": [table.as_dict() for table in texts.tables],
        "notes": list(texts.notes),
    }


def as_network_plan(
    problem: Problem, curves: WorkCurves, comparison: DeploymentComparison
) -> NetworkPlan:
    """The solution of one PD cluster in the form that several clusters have."""
    best = comparison.prfaas_pd
    rate = best.lambda_max_rps
    row = chosen_row(curves, best)
    home = HomePlan(
        cluster=problem.local.pool.cluster,
        share=1.0,
        rate_rps=rate,
        threshold_tokens=best.threshold_tokens,
        n_prefill=best.n_prefill,
        n_decode=best.n_decode,
        offload_fraction=best.offload_fraction,
        prefill_utilisation=rate * (1 - best.offload_fraction) / best.theta.pd_p
        if best.theta.pd_p
        else 0.0,
        decode_utilisation=rate / best.theta.pd_d,
    )
    flows, prfaas = [], []
    for remote, share in zip(problem.remotes, best.shares, strict=True):
        pool = remote.pool
        rps = rate * best.offload_fraction * share
        seconds = float(curves.prefill_long_s(pool.profile)[row])
        flows.append(
            Flow(
                source=pool.cluster,
                target=home.cluster,
                rps=rps,
                share=share,
                bps=best.egress_bps * share,
                link_bps=remote.path.bps,
            )
        )
        prfaas.append(PrfaasPlan(pool.cluster, pool.instances, rps, rps * seconds / pool.instances))
    binding = _binding(best, home, prfaas, flows)
    reading = comparison.reading
    return NetworkPlan(reading, rate, 0.0, (home,), tuple(prfaas), tuple(flows), binding)


def _binding(
    best: Solution, home: HomePlan, prfaas: Sequence[PrfaasPlan], flows: Sequence[Flow]
) -> tuple[Binding, ...]:
    """The stage that the solution names, at each place where it is at its limit."""
    match best.bottleneck:
        case "PrfaaS prefill":
            full = [one for one in prfaas if one.utilisation > _BUSY]
            return tuple(Binding("PrfaaS prefill", one.cluster) for one in full)
        case "PrfaaS egress":
            # With several PrfaaS clusters, some may be limited by their instances.
            full = [one for one in prfaas if one.utilisation > _BUSY]
            return (
                *(Binding("PrfaaS prefill", one.cluster) for one in full),
                *(
                    Binding("PrfaaS egress", flow.source, flow.target)
                    for flow in flows
                    if flow.utilisation > _BUSY
                ),
            )
        case "PD-P prefill":
            return (Binding("PD-P prefill", home.cluster),)
    return (Binding("PD-D decode", home.cluster),)


def _limit(binding: Binding) -> dict[str, str]:
    where = binding.cluster
    if binding.target is not None:
        where = f"{binding.cluster} -> {binding.target}"
    return {"text": binding.in_words, "where": where}


def _summary(plan: NetworkPlan) -> list[tuple[str, str]]:
    """With several PD clusters, the table of clusters has what differs between them."""
    rows = [("rate (requests/s)", f"{plan.rate_rps:.3f}")]
    if len(plan.homes) == 1:
        home = plan.homes[0]
        threshold = home.threshold_tokens
        rows += [
            ("threshold (tokens)", "-" if threshold is None else f"{threshold:,}"),
            ("local nodes that prefill", str(home.n_prefill)),
            ("local nodes that decode", str(home.n_decode)),
        ]
    offloaded = sum(flow.rps for flow in plan.flows) / plan.rate_rps
    egress_bps = sum(flow.bps for flow in plan.flows)
    return [
        *rows,
        ("offloaded", f"{offloaded:.1%}"),
        ("KV on all links (Gbit/s)", f"{egress_bps / 1e9:.1f}"),
    ]


def _busy(plan: NetworkPlan) -> dict[str, dict[str, float]]:
    busy: dict[str, dict[str, float]] = {}
    for prfaas in plan.prfaas:
        busy[prfaas.cluster] = {"prefill": round(prfaas.utilisation, 4)}
    for home in plan.homes:
        busy[home.cluster] = {"decode": round(home.decode_utilisation, 4)}
        if home.n_prefill:
            busy[home.cluster]["prefill"] = round(home.prefill_utilisation, 4)
    return busy


def _flows(plan: NetworkPlan) -> dict[str, Any]:
    sources = [prfaas.cluster for prfaas in plan.prfaas]
    targets = [home.cluster for home in plan.homes]
    flows = {(flow.source, flow.target): flow for flow in plan.flows}

    def matrix(figure: str, digits: int) -> list[list[float | None]]:
        return [
            [
                round(getattr(flows[source, target], figure), digits)
                if (source, target) in flows
                else None
                for target in targets
            ]
            for source in sources
        ]

    return {
        "sources": sources,
        "targets": targets,
        "rps": matrix("rps", 4),
        "share": matrix("share", 4),
        "bps": matrix("bps", 0),
        "link_bps": matrix("link_bps", 0),
        "local_rps": [round(h.rate_rps * (1 - h.offload_fraction), 4) for h in plan.homes],
    }


# The scene ----------------------------------------------------------------------------------------


def _scene(texts: PlanTexts, problem: NetworkProblem, plan: NetworkPlan) -> Scene:
    prfaas = tuple(_prfaas_cluster(p.cluster, p.instances) for p in plan.prfaas)
    rtts = {
        (remote.pool.cluster, home.cluster): remote.path.rtt_s
        for home in problem.homes
        for remote in home.problem.remotes
    }
    return Scene(
        at_s=0.0,
        model=texts.model,
        policy=texts.policy,
        clusters=(*prfaas, *(_pd_cluster(home, plan.home(home.cluster)) for home in problem.homes)),
        links=tuple(_link(flow, rtts[flow.source, flow.target]) for flow in plan.flows),
        homes=tuple(_home(home, plan.home(home.cluster)) for home in problem.homes),
    )


def _prfaas_cluster(name: str, instances: int) -> ClusterScene:
    nodes = tuple(NodeScene(node, node, role="prefill") for node in node_names(name, instances))
    return ClusterScene(name, "prfaas", nodes)


def _pd_cluster(home: Home, plan: HomePlan) -> ClusterScene:
    """The nodes have the roles that a run begins with."""
    slots = home.problem.local.decode.bs_max
    names = node_names(home.cluster, plan.n_prefill + plan.n_decode)
    nodes = [
        NodeScene(name, name, role="prefill")
        if number < plan.n_prefill
        else NodeScene(name, name, role="decode", slots=slots)
        for number, name in enumerate(names)
    ]
    return ClusterScene(home.cluster, "pd", tuple(nodes))


def _link(flow: Flow, rtt_s: float) -> LinkScene:
    return LinkScene(
        source=flow.source,
        target=flow.target,
        cause="the plan uses it completely" if flow.utilisation > _BUSY else "",
        capacity_bps=flow.link_bps,
        rate_bps=round(flow.bps),
        rtt_s=rtt_s,
    )


def _home(home: Home, plan: HomePlan) -> HomeScene:
    threshold = plan.threshold_tokens
    if threshold is None:  # one side prefills everything
        threshold = 0 if plan.offload_fraction else home.problem.workload.max_new_tokens
    return HomeScene(
        cluster=home.cluster,
        has_plan=True,
        threshold_tokens=threshold,
        planned_threshold_tokens=threshold,
        planned_rps=round(plan.rate_rps, 4),
        planned_share=round(plan.offload_fraction, 4),
    )
