"""The plan of several clusters beside its baselines, with what one more of anything would add, and
what is served without a PrfaaS cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prfaas.planner.comparison import Extrapolation, extrapolations
from prfaas.planner.curves import Reading
from prfaas.planner.lost_sites import LostSite
from prfaas.planner.network import baselines
from prfaas.planner.network.lost_sites import lost_in_network
from prfaas.planner.network.plan import Binding, Flow, HomePlan, NetworkPlan, PrfaasPlan
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.network.sensitivity import Gain, gains
from prfaas.planner.network.solve import NetworkPlanner


@dataclass(frozen=True, slots=True)
class NetworkComparison:
    """A plan and its baselines, each at its best. None: the baseline does not exist."""

    plan: NetworkPlan
    alone_rps: float | None
    one_each: baselines.Pairs | None
    homogeneous_rps: float | None
    equal_cost_rps: float | None
    gains: tuple[Gain, ...]
    lost_sites: tuple[LostSite, ...]
    extrapolations: tuple[Extrapolation, ...]

    @property
    def ratios(self) -> dict[str, float | None]:
        """The plan's rate over that of each baseline."""
        one_each = self.one_each and self.one_each.rate_rps
        rates = {
            "over_alone": self.alone_rps,
            "over_one_each": one_each,
            "over_homogeneous": self.homogeneous_rps,
            "over_equal_cost": self.equal_cost_rps,
        }
        return {name: self.plan.rate_rps / rate if rate else None for name, rate in rates.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `prfaas plan --json`."""
        pairs = self.one_each
        return {
            "reading": self.plan.reading,
            "rate_rps": self.plan.rate_rps,
            "gap": self.plan.gap,
            "clusters": [_home_as_dict(home) for home in self.plan.homes],
            "prfaas_clusters": [_prfaas_as_dict(prfaas) for prfaas in self.plan.prfaas],
            "flows": [_flow_as_dict(flow) for flow in self.plan.flows],
            "binding": [_binding_as_dict(binding) for binding in self.plan.binding],
            "one_more": [_gain_as_dict(gain) for gain in self.gains],
            "lost_sites": [lost.as_dict() for lost in self.lost_sites],
            "baselines": {
                "alone_rps": self.alone_rps,
                "one_each_rps": pairs and pairs.rate_rps,
                "one_each_pairs": pairs and pairs.prfaas,
                "homogeneous_rps": self.homogeneous_rps,
                "equal_cost_rps": self.equal_cost_rps,
            },
            "ratios": self.ratios,
            "extrapolated": [extrapolation.as_dict() for extrapolation in self.extrapolations],
        }


def compare(
    problem: NetworkProblem, reading: Reading, planner: NetworkPlanner | None = None
) -> NetworkComparison:
    """The planner must have the same reading; it keeps the curves that problems share."""
    planner = planner or NetworkPlanner(reading)
    plan = planner.solve(problem)
    one_each = baselines.one_each(planner, problem)
    return NetworkComparison(
        plan=plan,
        alone_rps=baselines.alone(planner, problem) or None,
        one_each=one_each if one_each.rate_rps > 0 else None,
        homogeneous_rps=baselines.homogeneous(planner, problem),
        equal_cost_rps=baselines.equal_cost(planner, problem),
        gains=gains(planner, problem, plan.rate_rps),
        lost_sites=lost_in_network(planner, problem, plan),
        extrapolations=_extrapolations(problem, plan),
    )


def _extrapolations(problem: NetworkProblem, plan: NetworkPlan) -> tuple[Extrapolation, ...]:
    """Of each cluster the largest fraction. A PrfaaS cluster has one for every PD cluster."""
    found: dict[str, Extrapolation] = {}
    for home in problem.homes:
        planned = plan.home(home.cluster)
        threshold = planned.threshold_tokens
        if threshold is None:  # one side prefills everything
            threshold = 0 if planned.offload_fraction else home.problem.workload.max_new_tokens
        for one in extrapolations(home.problem, threshold):
            known = found.get(one.cluster)
            if known is None or known.fraction < one.fraction:
                found[one.cluster] = one
    return tuple(found.values())


def _home_as_dict(home: HomePlan) -> dict[str, Any]:
    return {
        "cluster": home.cluster,
        "traffic_share": home.share,
        "rate_rps": home.rate_rps,
        "threshold_tokens": home.threshold_tokens,
        "split": {"prefill": home.n_prefill, "decode": home.n_decode},
        "offload_fraction": home.offload_fraction,
        "utilisation": {"prefill": home.prefill_utilisation, "decode": home.decode_utilisation},
    }


def _prfaas_as_dict(prfaas: PrfaasPlan) -> dict[str, Any]:
    return {
        "cluster": prfaas.cluster,
        "instances": prfaas.instances,
        "rate_rps": prfaas.rate_rps,
        "utilisation": {"prefill": prfaas.utilisation},
    }


def _flow_as_dict(flow: Flow) -> dict[str, Any]:
    return {
        "from": flow.source,
        "to": flow.target,
        "rps": flow.rps,
        "gbps": flow.bps / 1e9,
        "share": flow.share,
        "link_gbps": flow.link_bps / 1e9,
        "utilisation": flow.utilisation,
    }


def _binding_as_dict(binding: Binding) -> dict[str, Any]:
    if binding.target is None:
        return {"stage": binding.stage, "cluster": binding.cluster}
    return {"stage": binding.stage, "from": binding.cluster, "to": binding.target}


def _gain_as_dict(gain: Gain) -> dict[str, Any]:
    where = {"cluster": gain.cluster}
    if gain.target is not None:
        where = {"from": gain.cluster, "to": gain.target}
    return {"added": gain.added, **where, "gain_rps": gain.gain_rps}
