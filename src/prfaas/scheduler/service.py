"""How well a PD cluster is served now, and in plain words why not better. Pure.

    served     a node of the PD cluster decodes, and a PrfaaS cluster or a local node prefills
    degraded   every request is answered, but one node prefills and decodes it, or another PD
               cluster decodes
    unserved   requests have to wait, or are refused: no node of the PD cluster is in use

Readiness, metrics, alerts, the console and the causes that `prfaas trace` names all follow this
one judgement. It says what the deployment can do for a request; it does not say how busy it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from prfaas.scheduler.plan import Plan
from prfaas.types import ClusterId

ServiceLevel: TypeAlias = Literal["served", "degraded", "unserved"]
SERVICE_LEVELS: Final[tuple[ServiceLevel, ...]] = get_args(ServiceLevel)


class Service(NamedTuple):
    level: ServiceLevel
    reason: str = ""  # empty where the PD cluster is served


class ClusterNodes(NamedTuple):
    """The nodes of a cluster: those in use by their roles, the others by what keeps them out."""

    cluster: ClusterId
    prefilling: int = 0
    decoding: int = 0
    others: Mapping[str, int] = {}  # such as "lost": 2
    drained: bool = False
    link_up: bool = True  # from a PrfaaS cluster to the PD cluster


def judge_service(
    home: ClusterNodes,
    remotes: Sequence[ClusterNodes],
    plan: Plan | None,
    helpers: Collection[ClusterId] = (),
) -> Service:
    """`remotes`: the PrfaaS clusters that may prefill for the PD cluster. `helpers`: other PD
    clusters that can decode for it now."""
    problem = _why_unserved(home, plan)
    if problem and helpers:
        names = _joined(sorted(helpers))
        return Service("degraded", f"{problem}: requests of {home.cluster} decode at {names}")
    if problem or plan is None:
        return Service("unserved", problem)
    if not home.decoding:
        return Service("degraded", f"{_no_node(home, 'decodes')}: prefill nodes decode as well")
    # Without a PrfaaS cluster, a plan without prefill nodes lacks nothing.
    wants_prefill = bool(remotes) or plan.n_prefill > 0
    if wants_prefill and not _has_prefill(home, remotes):
        missing = _missing_prefill(home, remotes)
        return Service("degraded", f"{missing}: decode nodes prefill for themselves")
    if plan.capacity_rps <= 0:
        # The nodes in use answer nevertheless. A gateway that is not ready would lose their work.
        return Service("degraded", f"the plan of {home.cluster} has capacity 0")
    return Service("served")


def why_no_prefill_at(remote: ClusterNodes, home: ClusterId) -> str:
    """Why a PrfaaS cluster cannot prefill for a PD cluster now; empty where it can."""
    if remote.drained:
        return f"the PrfaaS cluster {remote.cluster} is drained"
    if not remote.prefilling:
        return _no_node(remote, "prefills")
    return "" if remote.link_up else f"the link from {remote.cluster} to {home} is cut"


def _why_unserved(home: ClusterNodes, plan: Plan | None) -> str:
    """Empty where a request can be answered. A single node is enough, whatever its role."""
    if home.drained:
        return f"{home.cluster} is drained"
    if not home.prefilling + home.decoding:
        before = f"{home.cluster} has no plan yet, and " if plan is None else ""
        return f"{before}{_no_node(home, 'is in use')}"
    return f"{home.cluster} has no plan yet" if plan is None else ""


def _has_prefill(home: ClusterNodes, remotes: Sequence[ClusterNodes]) -> bool:
    return home.prefilling > 0 or any(not why_no_prefill_at(r, home.cluster) for r in remotes)


def _missing_prefill(home: ClusterNodes, remotes: Sequence[ClusterNodes]) -> str:
    here = f"{home.cluster} has no prefill node in use"
    there = _joined([why_no_prefill_at(remote, home.cluster) for remote in remotes])
    return f"{there}, and {here}" if there else here


def _no_node(nodes: ClusterNodes, verb: str) -> str:
    """ "no node of pd decodes: 2 are lost, 1 prefills" """
    named = f"no node of {nodes.cluster} {verb}"
    prefills = nodes.prefilling if verb == "decodes" else 0
    found = [(f"{'is' if count == 1 else 'are'} {state}", count) for state, count in _some(nodes)]
    if prefills:
        found.append(("prefills" if prefills == 1 else "prefill", prefills))
    if not found:
        return f"{named}: it has none"
    if len(found) > 1:
        return f"{named}: {', '.join(f'{count} {state}' for state, count in found)}"
    ((state, count),) = found
    which = "its only node" if count == 1 else "both" if count == 2 else f"all {count}"
    return f"{named}: {which} {state}"


def _some(nodes: ClusterNodes) -> list[tuple[str, int]]:
    return [(state, count) for state, count in nodes.others.items() if count]


def _joined(texts: Sequence[str]) -> str:
    return ", ".join(texts[:-1]) + " and " + texts[-1] if len(texts) > 1 else "".join(texts)
