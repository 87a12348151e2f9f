"""Decisions are those that a look at every node gives, with the same ties."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from prfaas.config.deployment import SchedulerSection
from prfaas.scheduler import adaptive, forecast, options, short_term
from prfaas.scheduler.board import Board, NodeReport
from prfaas.scheduler.congestion import LinkHealth, LinkVerdict
from prfaas.scheduler.lookup.prefixes import CachedPrefix
from prfaas.scheduler.options import PrefixSource
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.short_term import route
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.scheduler.view import LinkView, View, exclude_nodes
from prfaas.scheduler.waiting import HeldWork, Hold
from prfaas.types import ClusterId, NodeId
from tests.scheduler.lookup import plain_options
from tests.scheduler.views import BACK, COSTS, FAR, NEAR, OUT, PLAN, Hit

NODES = 60
BOARDS = 100
STATES = 20  # per board
START_S = 100.0
WORK_S = (0.0, 0.001, 0.05, 0.5, 0.55, 1.0, 4.0)
MEMORY_BYTES = 8000.0 * COSTS.bytes_per_token
CHOICES = ("best_option", "choose_decode_node", "longest_own", "longest_pooled", "alone_option")


def decide_plainly(
    request: Request, view: View, state: ShortTermState, monkeypatch: pytest.MonkeyPatch
) -> Route | Hold:
    """The decision of `route` with the choices of `plain_options`."""
    with monkeypatch.context() as patched:
        for module in (options, short_term, adaptive, forecast):
            for name in CHOICES:
                if hasattr(module, name):
                    patched.setattr(module, name, getattr(plain_options, name))
        return route(request, view, PLAN, state)


A, B, C = (NodeId(name) for name in "abc")


def booked(prefill: NodeId, decode: NodeId, seconds: float, next_s: float | None = None) -> Route:
    return Route(NEAR, prefill, NEAR, decode, False, 0, 0, 0, seconds, (), "", next_s)


def random_board(draw: Random) -> Board:
    """Nodes in every condition. Times, loads and memory are from a few values, so that many nodes
    are equal."""
    split = draw.randint(1, NODES - 1)
    clusters: list[tuple[ClusterId, list[NodeId]]] = [
        (NEAR, [NodeId(f"near-{k}") for k in range(split)]),
        (FAR, [NodeId(f"far-{k}") for k in range(NODES - split)]),
    ]
    link = LinkView(True, draw.choice([1e7, 1e8, 1e9]), 0.01, None, draw.choice([0.0, 1e5, 1e7]))
    links = {OUT: link._replace(up=draw.random() < 0.9), BACK: link}
    board = Board(
        COSTS, clusters, links, slots=4, kv_bytes=draw.choice([MEMORY_BYTES, float("inf")])
    )
    prefills = draw.random()
    for cluster, names in clusters:
        for name in names:
            role = "prefill" if cluster == FAR or draw.random() < prefills else "decode"
            board.assign(name, role, usable=draw.random() < 0.9)  # type: ignore[arg-type]
            for _ in range(draw.choice([0, 0, 1, 2, 3]) if cluster == NEAR else 0):
                board.record_dispatch(booked(name, name, 0.0), draw.choice([0.0, MEMORY_BYTES]), 0)
            board.record_report(name, NodeReport(START_S, draw.choice(WORK_S), 0))
    return board


def change(board: Board, names: list[NodeId], draw: Random, now_s: float) -> None:
    """Nodes report, take and end work, are lost and return."""
    name = draw.choice(names)
    match draw.randrange(7):
        case 0:
            at_s = now_s - draw.choice([0.0, 0.5, 3.0])
            report = NodeReport(at_s, draw.choice(WORK_S), draw.randrange(7))
            board.record_report(name, report)
        case 1:
            role = "prefill" if name.startswith("far") else draw.choice(["prefill", "decode"])
            board.assign(name, role, usable=draw.random() < 0.9)  # type: ignore[arg-type]
        case 2:
            board.forget_work(name)
        case 3:
            board.set_pace(name, draw.choice([1.0, 1.0, 2.0, 20.0]))
        case _:
            local = [other for other in names if other.startswith("near")]
            decode = draw.choice(local)
            done = booked(name, decode, draw.choice([0.5, 2.0]))
            if draw.random() < 0.5:
                done = booked(decode, decode, 0.05, now_s + draw.choice([-1.0, 1.0]))
            kv_bytes = draw.choice([0.0, MEMORY_BYTES / 2])
            job = board.record_dispatch(done, kv_bytes, now_s)
            if draw.random() < 0.5:
                board.record_handoff(job, now_s + draw.choice([0.0, 0.3]))
                board.record_end(job)


def random_caches(names: list[NodeId], draw: Random) -> dict[NodeId, CachedPrefix]:
    """Few different prefixes on no node, on some nodes or on most nodes."""
    share = draw.choice([0.0, 0.05, 0.5, 1.0])
    prefixes = []
    for _ in range(draw.randint(1, 5)):
        tokens = draw.choice([0, 640, 1280, 3200])
        pool = draw.choice([None, min(tokens, 640)])
        prefixes.append(Hit(tokens, tokens + draw.randrange(5) * 64, pool, draw.choice([None, 0])))
    return {name: draw.choice(prefixes) for name in names if draw.random() < share}


def random_state(draw: Random) -> ShortTermState:
    rules = SchedulerSection(
        policy=draw.choice(["paper", "adaptive", "local", "remote"]),
    )
    known = LinkState(LinkHealth(draw.choice(list(LinkVerdict))), draw.choice([None, 1e7]))
    return ShortTermState(rules, {OUT: known}, threshold_factor=draw.choice([1.0, 2.0]))


def random_view(board: Board, names: list[NodeId], draw: Random, now_s: float) -> View:
    held = {NEAR: HeldWork((1.0,) * 8, now_s - 5)} if draw.random() < 0.3 else {}
    view = board.view(now_s, random_caches(names, draw), held)
    return exclude_nodes(view, draw.sample(names, draw.choice([0, 0, 3])))


def test_of_nodes_that_are_free_before_a_copy_is_made_the_longest_idle_one_is_chosen() -> None:
    """The others end at the same time."""
    board = Board(COSTS, [(NEAR, [A, B, C]), (FAR, [])], {}, slots=4)
    board.record_report(A, NodeReport(START_S, 1e-5, 0))
    board.record_report(C, NodeReport(START_S, 50.0, 0))
    view = board.view(START_S, {C: Hit(1920, 1920)}, {})
    for module in (options, plain_options):
        prefix = PrefixSource(1920, C, 1e10, 0.0, False)
        found = module.best_option(Request(0, 2000), view.local, view, prefix)
        assert found is not None and found.node == B and found.copies


def test_decisions_are_those_of_a_look_at_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(0)
    kinds = Counter[str]()
    for _ in range(BOARDS):
        board, now_s = random_board(draw), START_S
        view = board.view(now_s, {}, {})
        names = [node.node for cluster in (view.local, *view.remotes) for node in cluster.nodes]
        for number in range(STATES):
            for _ in range(draw.randrange(10)):
                change(board, names, draw, now_s)
            now_s += draw.choice([0.0, 0.5])
            state = random_state(draw)
            view = random_view(board, names, draw, now_s)
            longest = max((held.tokens for held in view.cached.values()), default=0)
            request = Request(number, draw.choice([1, 64, 700, 4000, longest + 20]), now_s)
            found = route(request, view, PLAN, state)
            assert found == decide_plainly(request, view, state, monkeypatch)
            for chosen in (False, True):
                alone = options.alone_option(request, view, state, by_choice=chosen)
                plain = plain_options.alone_option(request, view, state, by_choice=chosen)
                assert alone == plain
            for cluster in (view.local, *view.remotes):
                for far in (False, True):
                    pooled = options.longest_pooled(cluster, view, remote=far)
                    assert pooled == plain_options.longest_pooled(cluster, view, remote=far)
            kinds["alone"] += alone is not None
            kinds["held"] += isinstance(found, Hold)
            kinds["copied"] += isinstance(found, Route) and bool(found.copies)
            kinds["local"] += isinstance(found, Route) and not found.offloaded
            kinds["offloaded"] += isinstance(found, Route) and found.offloaded
    assert len(kinds) == 5 and min(kinds.values()) > 30, kinds
