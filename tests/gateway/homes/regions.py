"""A fleet of two PD clusters that share a PrfaaS cluster, and a router over it; no process and no
socket. Every node has answered: `e0` and `w0` prefill, `e1` and `w1` decode, `f0` is remote."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import Clock
from prfaas.config import Deployment, parse_deployment
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.homes.fair_access import FairAccess, OtherUses, nobody_else
from prfaas.gateway.placement import PlacementRequest
from prfaas.gateway.router import Router
from prfaas.planner.network.problem import NetworkProblem
from prfaas.scheduler.homes.plans import plans_for_nodes
from prfaas.scheduler.homes.round_trips import round_trips
from prfaas.scheduler.request import Request
from prfaas.studies.network_plans import NetworkStudy
from prfaas.types import ClusterId, NodeId
from tests.gateway.backends import MODEL, THRESHOLD, prompt
from tests.gateway.reports import appear

EAST, WEST, FAR = (ClusterId(name) for name in ("east", "west", "far"))
E0, E1, W0, W1, F0 = (NodeId(name) for name in ("e0", "e1", "w0", "w1", "f0"))
NODES = {EAST: [E0, E1], WEST: [W0, W1], FAR: [F0]}
LONG, SHORT = 2 * THRESHOLD, THRESHOLD // 2


class Regions(NamedTuple):
    deployment: Deployment
    network: NetworkProblem
    fleet: Fleet
    router: Router
    clock: Clock

    def placement(self, home: ClusterId, tokens: int, seed: int = 0) -> PlacementRequest:
        hashes = PromptHashes(prompt(tokens, seed))
        return PlacementRequest(Request(seed, tokens, self.clock.now()), hashes, home=home)

    def member(self, node: NodeId) -> Member:
        found = self.fleet.members.named(node)
        assert found is not None
        return found


def deployment(**scheduler: Any) -> Deployment:
    clusters = [
        {
            **{"name": cluster, "kind": "prfaas" if cluster == FAR else "pd"},
            **{"accelerator": "h200" if cluster == FAR else "h20", "gpus": 8 * len(nodes)},
            "gpus_per_instance": 8,
            **({} if cluster == FAR else {"prefill": 1, "decode": 1}),
            "nodes": [{"url": f"http://{n}:1", "kvd_url": f"http://{n}:2"} for n in nodes],
        }
        for cluster, nodes in NODES.items()
    ]
    links = [(FAR, EAST), (FAR, WEST), (EAST, WEST), (WEST, EAST)]
    raw: dict[str, Any] = {
        "model": {"name": MODEL},
        "workload": {
            "kind": "lognormal",
            **{"mu": 7.0, "sigma": 1.0, "min_tokens": 128, "max_tokens": 131072},
            "output_tokens": 64,
        },
        "slo": {"output_tokens_per_s": 40},
        "clusters": clusters,
        "links": [{"from": a, "to": b, "gbps": 10, "rtt_ms": 30} for a, b in links],
        "scheduler": {"policy": "paper", "threshold_tokens": THRESHOLD, **scheduler},
    }
    return parse_deployment(raw, "test.toml")


def regions(clock: Clock, other_uses: OtherUses = nobody_else, **scheduler: Any) -> Regions:
    made = deployment(**scheduler)
    network = NetworkStudy(Path("test.toml"), "exact").network(made)
    fleet = Fleet(made, network, clock)
    router = Router(fleet, made.scheduler, clock)
    fair = FairAccess(
        fleet, router.waiting_room, made.scheduler.adaptive.queue_s, clock, other_uses
    )
    router.serve_several(fair, round_trips(made))
    names = [node for nodes in NODES.values() for node in nodes]
    for member, name in zip(fleet.members, names, strict=True):
        appear(fleet, member, name, clock.now())
    plans = plans_for_nodes(
        network,
        {home: dict.fromkeys(NODES[home]) for home in (EAST, WEST)},
        made.scheduler.replan,
        clock.now(),
        reason="test",
        policy=made.scheduler.policy,
    )
    router.follow(plans)
    for plan in plans.values():
        for node, role in plan.roles.items():
            fleet.assign_role(node, role)
    fleet.refresh()
    return Regions(made, network, fleet, router, clock)
