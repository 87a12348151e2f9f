"""The gateway's state for operators and scripts: `/prfaas/v1/state`, `plan`, `explain`, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client.core import Metric

from prfaas.clock import Clock
from prfaas.contracts.forms import choose_compat
from prfaas.contracts.kvd_api import PoolReport
from prfaas.gateway.dispatch.attempts import RetryBudget
from prfaas.gateway.exposition.dispatching import attempt_metrics, waiting_metrics
from prfaas.gateway.exposition.families import counter, gauge
from prfaas.gateway.exposition.links import ObservedLink, link_metrics
from prfaas.gateway.exposition.nodes import node_metrics, observe_nodes
from prfaas.gateway.exposition.planning import plan_metrics
from prfaas.gateway.exposition.services import service_metrics
from prfaas.gateway.exposition.tenants import tenant_metrics
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.home_services import HomeServices
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.planning.long_term_loop import LongTermLoop
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.router import Router
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.state import LinkState
from prfaas.scheduler.view import LinkId, LinkView, View
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId, Form, NodeId

UNPLANNED = "no node of the PD cluster has answered yet"


class GatewayStatus:
    """Reads the gateway's parts; changes none."""

    # limits: the parts of the gateway that it describes
    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        loop: LongTermLoop,
        budget: RetryBudget,
        copies: PrefixCopies,
        clock: Clock,
        traffic: HomeTraffic,
        services: HomeServices,
        gateways: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`gateways`: describes the gateways of the deployment, where there are several."""
        self._fleet = fleet
        self._services = services
        self._router = router
        self._loop = loop
        self._budget = budget
        self._copies = copies
        self._clock = clock
        self._traffic = traffic.histories
        self._gateways = gateways
        self._started_s = clock.now()

    def state(self, in_flight: int) -> dict[str, Any]:
        router, now_s = self._router, self._clock.now()
        clusters = self._clusters()
        waiting = {c: router.waiting_room.count(c) for c in clusters}
        return {
            "policy": router.rules.policy,
            "up_s": round(now_s - self._started_s, 3),
            "model": self._fleet.members.formats.model,
            "sets": [self._set(nodes) for nodes in self._fleet.sets],
            "clusters": [self._cluster(cluster, now_s) for cluster in clusters],
            "links": [
                _link(link_id, link, router.states[home].links)
                for home in self._fleet.homes
                for link_id, link in self._view(home).links.items()
            ],
            "homes": [
                {"cluster": home, "service": found.level, "reason": found.reason}
                for home, found in self._services.all().items()
            ],
            "plan": self.plan(),
            **self._long_term(now_s),
            "threshold_factor": self._of_homes(
                {home: state.threshold_factor for home, state in router.states.items()}
            ),
            "requests": {
                "in_flight": in_flight,
                "waiting": len(router.waiting_room),
                "waiting_for": {c: count for c, count in waiting.items() if count},
            },
            "tenants": router.tenants.state(),
            "retries": {
                "left": round(self._budget.left, 1),
                "spent": self._budget.spent,
                "denied": self._budget.denied,
            },
            "moves": self._moves(),
            **({} if self._gateways is None else self._gateways()),
        }

    def unready_reason(self) -> str:
        """Why no request can be served now; empty when those of a PD cluster can be."""
        services = self._services.all()
        found = [services[home] for home in self._router.serving_homes]
        if any(service.level != "unserved" for service in found):
            return ""
        return "; ".join(service.reason for service in found)

    def plan(self) -> dict[str, Any]:
        """The plan in force; with several PD clusters, that of each of them under `homes`."""
        now_s, plans = self._clock.now(), self._router.plans
        found = {home: plan_json(plans.get(home), now_s) for home in self._fleet.homes}
        if len(found) == 1:
            return found[self._fleet.homes[0]]
        return {"made": bool(plans), "homes": found}

    def describe_route(self, explanation: Explanation | None) -> dict[str, Any]:
        """The explanation of a route as JSON; None: no plan serves the request."""
        return explanation_json(explanation, self._form_between)

    def _form_between(self, prefill: NodeId, decode: NodeId) -> Form | None:
        """None: the nodes cannot hand over, or no hand-off is needed."""
        one, other = self._fleet.members.named(prefill), self._fleet.members.named(decode)
        if one is None or other is None or one is other:
            return None
        compat = choose_compat(one.compats, other.compats)
        return None if compat is None else compat.form

    def _view(self, home: ClusterId) -> View:
        return self._fleet.board.view(self._clock.now(), {}, {}, home)

    def _of_homes(self, values: Mapping[ClusterId, Any]) -> Any:
        """The value of the only PD cluster, or the values of all of them by name."""
        return values if len(self._fleet.homes) > 1 else values.get(self._fleet.homes[0])

    def metrics(self) -> Iterator[Metric]:
        fleet, router = self._fleet, self._router
        yield gauge(
            "ready",
            "Whether the gateway can serve requests now: 1 or 0.",
            value=not self.unready_reason(),
        )
        yield from service_metrics(self._services.all(), self._services.remotes())
        yield from waiting_metrics(self._waiting())
        yield from attempt_metrics(self._budget)
        yield from self._copies.metrics()
        yield from self._loop.history.metrics(router.plans)
        yield from plan_metrics(
            fleet.homes,
            router.plans,
            router.states,
            self._roles_pending(),
            plans_here=self._loop.plans_here,
        )
        pace = gauge(
            "prefill_pace_ratio",
            "The observed time of a cluster's prefills, divided by the time in its profile.",
            "cluster",
        )
        for cluster in self._clusters():
            pace.add_metric([cluster], fleet.pace.factors.get(cluster, 1.0))
        yield pace
        yield from link_metrics(self._observed_links())
        yield from router.short_term_log.metrics()
        yield from node_metrics(
            observe_nodes(fleet, self._clock.now()), fleet.liveness.fallen_silent
        )
        yield from tenant_metrics(router.tenants)
        failures = counter(
            "loop_failures",
            "Unexpected failures in a loop of the gateway, which went on. Each one is a defect.",
            "loop",
        )
        for loop, number in fleet.failures.counts.items():
            failures.add_metric([loop], number)
        yield failures

    def _waiting(self) -> dict[str, int]:
        """Requests that wait for each cluster; under the empty name, those for none of them."""
        room = self._router.waiting_room
        found = {str(cluster): room.count(cluster) for cluster in self._clusters()}
        return {**found, "": len(room) - sum(found.values())}

    def _roles_pending(self) -> dict[ClusterId, int]:
        plans = self._router.plans
        return {
            home: sum(self.next_role(node) is not None for node in plan.roles)
            for home, plan in plans.items()
        }

    def _observed_links(self) -> Iterator[ObservedLink]:
        """Those that lead to or from a PD cluster, each once."""
        seen: set[LinkId] = set()
        for home in self._fleet.homes:
            known = self._router.states[home].links
            for link_id, view in self._view(home).links.items():
                if link_id not in seen:
                    seen.add(link_id)
                    state = known.get(link_id) or LinkState()
                    cuts = self._fleet.links.cuts[link_id]
                    yield ObservedLink(link_id, view, state, cuts)

    def _clusters(self) -> list[ClusterId]:
        return [*self._fleet.homes, *self._fleet.remotes]

    def _long_term(self, now_s: float) -> dict[str, Any]:
        """What the long-term loop has observed, and what it did."""
        history = self._loop.history
        seen = {home: kept.summarise(now_s) for home, kept in self._traffic.items()}
        traffic = {h: None if found is None else found._asdict() for h, found in seen.items()}
        advice = {home: plan_json(plan, now_s) for home, plan in history.advice.items()}
        return {
            "advises": history.advises,
            "advice": self._of_homes(advice) or None,
            "plans": [
                {"cluster": made.home, **plan_json(made.plan, now_s)} for made in history.plans
            ],
            "conversions": [
                {"age_s": round(now_s - done.at_s, 3), "node": done.node, "role": done.role}
                for done in history.conversions
            ],
            "traffic": self._of_homes(traffic),
        }

    def _moves(self) -> dict[str, Any]:
        under_way = [
            {
                "why": copy.why,
                "from": copy.source,
                "to": copy.target,
                "tokens": copy.tokens,
                "form": None if copy.compat is None else copy.compat.form,
            }
            for copy in self._copies.under_way
        ]
        totals: dict[str, Any] = {
            why: {"made": t.made, "failed": t.failed, "tokens": t.tokens, "bytes": t.nbytes}
            for why, t in self._copies.tallies.items()
        }
        return {"under_way": under_way, **totals}

    def _cluster(self, cluster: ClusterId, now_s: float) -> dict[str, Any]:
        return {
            "cluster": cluster,
            "kind": "pd" if cluster in self._fleet.homes else "prfaas",
            "drained": cluster in self._fleet.drained,
            "prefill_pace": self._fleet.pace.factors.get(cluster, 1.0),
            "nodes": [self._node(m, now_s) for m in self._fleet.members if m.cluster == cluster],
        }

    def _node(self, member: Member, now_s: float) -> dict[str, Any]:
        fleet = self._fleet
        found: dict[str, Any] = {
            "node": member.node,
            "url": member.engine_url,
            "kvd_url": member.kvd_url,
            "alive": member.is_alive(now_s),
            "listed": member.listed,
            "model": None if member.card is None else member.card.model,
            "format": None if member.compat is None else msgspec.to_builtins(member.compat),
            "incompatible": [] if (why := fleet.members.formats.problem(member)) is None else [why],
            "problems": dict(member.problems),
            "not_used": self.why_not_used(member, now_s),
        }
        if member.node is not None and member.node in fleet.board:
            seen = fleet.board.node(member.node)
            wait_s = seen.free_at_s - now_s
            found |= {
                "role": seen.role,
                "becomes": self.next_role(member.node),
                "in_use": seen.usable,
                "draining": fleet.roles.is_draining(member.node) or member.leaving,
                "queued": seen.queued,
                "wait_s": round(max(0.0, wait_s), 3) if math.isfinite(wait_s) else 0.0,
                "active": seen.active,
                "pace": seen.pace,
            }
        if member.load is not None:
            found |= {"running": member.load.running, "waiting": member.load.waiting}
        report = member.report
        if report is not None:
            found |= {"epoch": report.role.epoch, "data_address": report.data_address}
            found["forms"] = {pool.compat.form: _form(pool, fleet, member) for pool in report.pools}
            if report.pool is not None:
                found["cache"] = _cache(report.pool)
        return found

    def _set(self, nodes: Collection[NodeId]) -> dict[str, Any]:
        """Nodes in use with the same KV format: hand-offs stay within them."""
        found = self._fleet.members.format_of(next(iter(nodes)))
        roles = {str(node): self._fleet.board.node(node).role for node in sorted(nodes)}
        return {"format": msgspec.to_builtins(found), "nodes": roles}

    def why_not_used(self, member: Member, now_s: float) -> str | None:
        """Why the member gets no requests, in words; None: it does."""
        fleet, node = self._fleet, member.node
        if member.has_duplicate_name:
            return "another member has its node name"
        if node is None or node not in fleet.board:
            return member.problems.get("kvd", "its kvd has not answered yet")
        if fleet.board.node(node).usable:
            return None
        if not member.is_kvd_alive(now_s):
            return f"its kvd does not answer: {member.problems.get('kvd', 'it is silent')}"
        if member.leaving:
            return "its engine drains, or has exited after that"
        if member.compat is None:
            return "no engine has registered with its kvd"
        problem = fleet.members.formats.problem(member)
        if problem is not None:
            return problem
        if not member.is_alive(now_s):
            return f"its engine does not answer: {member.problems.get('engine', 'it is silent')}"
        if member.cluster in fleet.drained:
            return f"the cluster {member.cluster} is drained"
        if fleet.roles.is_draining(node):
            return "it finishes its requests before it changes its role"
        return "it has no role yet"

    def next_role(self, node: NodeId) -> str | None:
        """The node's role in the plan, where it differs from its role now."""
        plans = self._router.plans.values()
        wanted = next((plan.roles[node] for plan in plans if node in plan.roles), None)
        return None if wanted == self._fleet.roles.of(node) else wanted


def _cache(pool: PoolReport) -> dict[str, int]:
    used = pool.occupancy
    return {
        "block_tokens": pool.block_tokens,
        "used_bytes": used.used_pages * pool.page_bytes,
        "evictable_bytes": used.idle_pages * pool.page_bytes,
        "capacity_bytes": (used.capacity_pages or 0) * pool.page_bytes,
    }


def _form(pool: PoolReport, fleet: Fleet, member: Member) -> dict[str, Any]:
    """One form in which a node hands over."""
    compat = pool.compat
    return {
        "layout": compat.layout,
        "block_tokens": compat.block_tokens,
        "kv_dtype": compat.kv_dtype,
        "state_dtype": compat.state_dtype,
        "indexed": fleet.members.formats.has_indexed_blocks(member, compat),
        "cache": _cache(pool),
    }


def plan_json(plan: Plan | None, now_s: float) -> dict[str, Any]:
    if plan is None:
        return {"made": False, "reason": UNPLANNED}
    return {
        "made": True,
        "age_s": round(now_s - plan.made_s, 3),
        "reason": plan.reason,
        "threshold_tokens": plan.threshold_tokens,
        "roles": dict(plan.roles),
        "shares": [round(share, 4) for share in plan.shares],
        "capacity_rps": plan.capacity_rps,
        "instances": {pool.cluster: pool.instances for pool in plan.problem.pools},
    }


def explanation_json(
    found: Explanation | None, form_between: Callable[[NodeId, NodeId], str | None]
) -> dict[str, Any]:
    """`form_between` returns the form in which one node hands over to another."""
    if found is None:
        return {"chosen": {"wait": True, "reason": "no node decodes yet"}, "alternatives": []}
    if isinstance(found.chosen, Hold):
        hold = found.chosen
        decode = None
        chosen: dict[str, Any] = {"wait": True, "reason": hold.reason, "for": hold.cluster}
    else:
        decode = found.chosen.decode
        chosen = {"wait": False, **found.chosen._asdict()}
        del chosen["next_alone_s"]  # a time of the gateway's own clock
        chosen["alone"] = found.chosen.alone
        chosen["form"] = form_between(found.chosen.prefill, decode)
        chosen["copies"] = [copy._asdict() for copy in found.chosen.copies]
    return {
        "chosen": chosen,
        "threshold_tokens": found.threshold_tokens,
        "alternatives": [
            {
                "cluster": option.cluster,
                "node": option.node,
                "cached_tokens": option.cached_tokens,
                "copies": len(option.copies),
                "alone": option.alone,
                "declined": option.declined or None,
                # To the decode node of the chosen route; another set has other decode nodes.
                "form": None if decode is None else form_between(option.node, decode),
                "ttft_s": option.forecast.ttft_s,
                "cost_s": option.cost_s,
                **option.forecast._asdict(),
            }
            for option in found.alternatives
        ],
    }


def _link(link_id: LinkId, link: LinkView, states: Mapping[LinkId, LinkState]) -> dict[str, Any]:
    known = states.get(link_id) or LinkState()
    stats = link.stats
    return {
        "from": link_id[0],
        "to": link_id[1],
        "up": link.up,
        "verdict": known.health.verdict.value,
        "cause": known.health.cause,
        "capacity_bps": link.capacity_bps,
        "believed_bps": known.bps,
        "goodput_bps": 0.0 if stats is None else stats.goodput_bps,
        "backlog_bytes": 0 if stats is None else stats.backlog_bytes,
        "waited_s": 0.0 if stats is None else stats.waited_s,
        "rtt_s": link.rtt_s if stats is None or stats.rtt_s is None else stats.rtt_s,
        "pending_bytes": link.pending_bytes,
        "stats": None if stats is None else msgspec.to_builtins(stats),
    }
