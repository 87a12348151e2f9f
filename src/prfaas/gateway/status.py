"""The gateway's state as people and scripts read it: `/prfaas/v1/state`, `plan`, `explain`."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from prfaas.gateway.dispatch.retry_budget import RetryBudget
from prfaas.gateway.fleet.membership import Member
from prfaas.gateway.planning.plan_history import PlanHistory
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.router import Router
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.state import LinkState
from prfaas.scheduler.view import LinkId, LinkView
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId, NodeId


def shown_state(
    router: Router,
    book: PlanHistory,
    budget: RetryBudget,
    moves: PrefixCopies,
    in_flight: int,
    now_s: float,
) -> dict[str, Any]:
    view = router.board.view(now_s, {}, router.held.work)
    clusters = [router.local, *router.remotes]
    return {
        "policy": router.state.rules.policy,
        "up_s": round(now_s - router.started_s, 3),
        "clusters": [_cluster(router, cluster, now_s) for cluster in clusters],
        "links": [_link(way, link, router.state.links) for way, link in view.links.items()],
        "plan": shown_plan(router.plan, now_s),
        **_long_term(router, book, now_s),
        "threshold_factor": router.state.threshold_factor,
        "requests": {
            "in_flight": in_flight,
            "waiting": len(router.held),
            "waiting_for": {c: router.held.count(c) for c in clusters if router.held.count(c)},
        },
        "retries": {
            "left": round(budget.left, 1),
            "spent": budget.spent,
            "denied": budget.denied,
        },
        "moves": _moves(moves),
    }


def _long_term(router: Router, book: PlanHistory, now_s: float) -> dict[str, Any]:
    """What the loop has seen, and what it did."""
    seen = router.traffic.summarise(now_s)
    return {
        "advises": book.advises,
        "advice": None if book.advice is None else shown_plan(book.advice, now_s),
        "plans": [shown_plan(plan, now_s) for plan in book.plans],
        "conversions": [
            {"age_s": round(now_s - done.at_s, 3), "node": done.node, "role": done.role}
            for done in book.conversions
        ],
        "traffic": None if seen is None else seen._asdict(),
    }


def pace_metric(router: Router) -> Metric:
    says = "What prefills take over what the profile says."
    found = GaugeMetricFamily("prfaas_gateway_prefill_pace", says, labels=["cluster"])
    for cluster in (router.local, *router.remotes):
        found.add_metric([cluster], router.paces.factors.get(cluster, 1.0))
    return found


def _moves(moves: PrefixCopies) -> dict[str, Any]:
    under_way = [
        {"why": m.why, "from": m.source, "to": m.target, "tokens": m.tokens}
        for m in moves.under_way
    ]
    totals: dict[str, Any] = {
        why: {"made": t.made, "failed": t.failed, "tokens": t.tokens, "bytes": t.nbytes}
        for why, t in moves.tallies.items()
    }
    return {"under_way": under_way, **totals}


def shown_plan(plan: Plan | None, now_s: float) -> dict[str, Any]:
    if plan is None:
        return {"made": False, "reason": "no node of the PD cluster has answered yet"}
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


def shown_explanation(found: Explanation | None) -> dict[str, Any]:
    if found is None:
        return {"chosen": {"wait": True, "reason": "no node decodes yet"}, "alternatives": []}
    chosen = found.chosen
    if isinstance(chosen, Hold):
        shown: dict[str, Any] = {"wait": True, "reason": chosen.reason, "for": chosen.cluster}
    else:
        shown = {"wait": False, **chosen._asdict()}
        shown["copies"] = [copy._asdict() for copy in chosen.copies]
    return {
        "chosen": shown,
        "threshold_tokens": found.threshold_tokens,
        "alternatives": [
            {
                "cluster": option.cluster,
                "node": option.node,
                "cached_tokens": option.cached_tokens,
                "copies": len(option.copies),
                "ttft_s": option.forecast.ttft_s,
                **option.forecast._asdict(),
            }
            for option in found.alternatives
        ],
    }


def _cluster(router: Router, cluster: ClusterId, now_s: float) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "prefill_pace": router.paces.factors.get(cluster, 1.0),
        "nodes": [_node(router, m, now_s) for m in router.members if m.cluster == cluster],
    }


def _node(router: Router, member: Member, now_s: float) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "node": member.node,
        "url": member.engine_url,
        "kvd_url": member.kvd_url,
        "alive": member.alive(now_s),
        "listed": member.listed,
        "model": None if member.card is None else member.card.model,
        "incompatible": list(router.members.differences(member)),
    }
    if member.node is not None and member.node in router.board:
        seen = router.board.node(member.node)
        wait_s = seen.free_at_s - now_s
        shown |= {
            "role": seen.role,
            "becomes": _becomes(router, member.node),
            "in_use": seen.usable,
            "draining": member.node in router.draining or member.leaving,
            "queued": seen.queued,
            "wait_s": round(max(0.0, wait_s), 3) if math.isfinite(wait_s) else 0.0,
            "active": seen.active,
        }
    if member.load is not None:
        shown |= {"running": member.load.running, "waiting": member.load.waiting}
    report = member.report
    if report is not None:
        shown |= {"epoch": report.role.epoch, "data_address": report.data_address}
        if report.pool is not None:
            pool = report.pool
            used, idle = pool.occupancy.used_pages, pool.occupancy.idle_pages
            shown["cache"] = {
                "block_tokens": pool.block_tokens,
                "used_bytes": used * pool.page_bytes,
                "evictable_bytes": idle * pool.page_bytes,
                "capacity_bytes": (pool.occupancy.capacity_pages or 0) * pool.page_bytes,
            }
    return shown


def _becomes(router: Router, node: NodeId) -> str | None:
    """The role that it is to have, where that is another one."""
    wanted = None if router.plan is None else router.plan.roles.get(node)
    return None if wanted == router.roles.get(node) else wanted


def _link(way: LinkId, link: LinkView, states: Any) -> dict[str, Any]:
    known: LinkState = states.get(way) or LinkState()
    stats = link.stats
    return {
        "from": way[0],
        "to": way[1],
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
