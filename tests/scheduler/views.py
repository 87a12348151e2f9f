"""Small deployments as the router sees them, and strategies for many of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hypothesis import strategies as st

from prfaas.config.deployment import SchedulerSection
from prfaas.planner.problem import Path, Problem
from prfaas.scheduler.board import Board
from prfaas.scheduler.congestion import LinkHealth, LinkVerdict
from prfaas.scheduler.costs import build_costs
from prfaas.scheduler.explain import Explanation, explain
from prfaas.scheduler.homes.elsewhere import decide_by_route
from prfaas.scheduler.lookup.prefixes import CachedPrefix, group_prefixes
from prfaas.scheduler.plan import Plan, first_plan
from prfaas.scheduler.request import Request
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.scheduler.view import ClusterView, LinkView, NodeView, View
from prfaas.scheduler.waiting import HeldWork
from prfaas.types import ClusterId, NodeId
from tests.planner.builders import problem

FAR, NEAR = ClusterId("far"), ClusterId("near")
OUT, BACK = (FAR, NEAR), (NEAR, FAR)
PROBLEM: Problem = problem(fabric=Path(1e10, 0.0))  # 2 remote nodes, 4 local ones
LOCAL = tuple(NodeId(f"near-{i}") for i in range(4))
REMOTE = tuple(NodeId(f"far-{i}") for i in range(2))
NUMBERS = {name: number for number, name in enumerate(LOCAL + REMOTE)}
COSTS = build_costs(PROBLEM, 5000)
PLAN: Plan = first_plan(PROBLEM, LOCAL, SchedulerSection().replan)


class Hit(NamedTuple):
    tokens: int
    attention_tokens: int
    pool_tokens: int | None = None
    remote_pool_tokens: int | None = None


def node(name: NodeId, role: str, *, usable: bool = True, free_at_s: float = 0.0) -> NodeView:
    assert role in ("prefill", "decode")
    return NodeView(name, role, usable, free_at_s, 0, 0, 4, float("inf"))  # type: ignore[arg-type]


def view(
    cached: Mapping[NodeId, CachedPrefix] | None = None,
    *,
    dead: frozenset[NodeId] = frozenset(),
    free_at_s: Mapping[NodeId, float] | None = None,
    up: bool = True,
    pending_bytes: float = 0.0,
    now_s: float = 100.0,
    held: Mapping[ClusterId, HeldWork] | None = None,
) -> View:
    """Two local nodes prefill, two decode; the links lead both ways."""
    free = free_at_s or {}

    def seen(name: NodeId, role: str) -> NodeView:
        return node(name, role, usable=name not in dead, free_at_s=free.get(name, 0.0))

    link = LinkView(up, 1e8, 0.01, None, pending_bytes)
    return View(
        now_s=now_s,
        local=ClusterView(
            NEAR, tuple(seen(n, "prefill" if i < 2 else "decode") for i, n in enumerate(LOCAL))
        ),
        remotes=(ClusterView(FAR, tuple(seen(n, "prefill") for n in REMOTE)),),
        links={OUT: link, BACK: link},
        costs=COSTS,
        cached=group_prefixes(cached or {}, NUMBERS),
        held=held or {},
    )


def books(board: Board) -> tuple[object, ...]:
    """Everything that a board has recorded, as it is now."""
    seen = board.view(0.0, {}, {})
    return *(cluster.nodes for cluster in (seen.local, *seen.remotes)), seen.links


def state(policy: str, verdict: LinkVerdict = LinkVerdict.CLEAR) -> ShortTermState:
    known = LinkState(LinkHealth(verdict))
    rules = SchedulerSection(policy=policy)  # type: ignore[arg-type]
    return ShortTermState(rules, {OUT: known, BACK: known})


pooled = st.none() | st.integers(0, 60).map(lambda blocks: blocks * 64)
hits = st.builds(
    lambda tokens, more, pool, remote: Hit(
        tokens * 64,
        (tokens + more) * 64,
        None if pool is None else min(pool, tokens * 64),
        None if remote is None else min(remote, tokens * 64),
    ),
    st.integers(1, 60),
    st.integers(0, 10),
    pooled,
    pooled,
)
caches = st.dictionaries(st.sampled_from(LOCAL + REMOTE), hits)
some_dead = st.frozensets(st.sampled_from(LOCAL + REMOTE))
free_times = st.dictionaries(st.sampled_from(LOCAL + REMOTE), st.floats(0, 200))
policies = st.sampled_from(["paper", "adaptive", "local", "remote"])
views = st.builds(
    view, caches, dead=some_dead, free_at_s=free_times, up=st.booleans(),
    pending_bytes=st.floats(0, 1e10),
)  # fmt: skip
requests = st.builds(Request, st.just(1), st.integers(1, 5000))


def explain_at(request: Request, seen: View, how: ShortTermState) -> Explanation:
    return explain(decide_by_route(request, seen, PLAN, how), [seen], request, PLAN, how)
