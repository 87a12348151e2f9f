"""Decisions are those that a look at every node gives, with the same ties."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from prfaas.config.deployment import RemaindersSection, SchedulerSection
from prfaas.scheduler import adaptive, forecast, options, short_term
from prfaas.scheduler.board import Board, NodeReport
from prfaas.scheduler.congestion import LinkHealth, LinkVerdict
from prfaas.scheduler.lookup.prefixes import CachedPrefix
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
CHOICES = ("best_option", "choose_decode_node", "longest_own", "longest_pooled", "remainder_option")


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
    board = Board(COSTS, clusters, links, slots=4, kv_bytes=draw.choice([3e5, float("inf")]))
    prefills = draw.random()
    for cluster, names in clusters:
        for name in names:
            role = "prefill" if cluster == FAR or draw.random() < prefills else "decode"
            board.assign(name, role, usable=draw.random() < 0.9)  # type: ignore[arg-type]
    return board


def change(board: Board, names: list[NodeId], draw: Random, now_s: float) -> None:
    """Nodes report, take and end work, are lost and return."""
    name = draw.choice(names)
    match draw.randrange(6):
        case 0:
            at_s = now_s - draw.choice([0.0, 0.5, 3.0])
            report = NodeReport(at_s, draw.choice([0.0, 0.5, 1.0, 4.0]), draw.randrange(7))
            board.record_report(name, report)
        case 1:
            role = "prefill" if name.startswith("far") else draw.choice(["prefill", "decode"])
            board.assign(name, role, usable=draw.random() < 0.9)  # type: ignore[arg-type]
        case 2:
            board.forget_work(name)
        case _:
            local = [other for other in names if other.startswith("near")]
            remainder_s = now_s + draw.choice([-1.0, 1.0]) if draw.random() < 0.3 else None
            done = Route(
                NEAR, name, NEAR, draw.choice(local), False, 0, 0, 0, draw.choice([0.5, 2.0]), (),
                "", remainder_s,
            )  # fmt: skip
            board.record_dispatch(done, draw.choice([0.0, 1e5]), now_s)


def random_caches(names: list[NodeId], draw: Random) -> dict[NodeId, CachedPrefix]:
    """Few different prefixes on no node, on some nodes or on most nodes."""
    share = draw.choice([0.0, 0.05, 0.5, 1.0])
    prefixes = []
    for _ in range(draw.randint(1, 5)):
        tokens = draw.randrange(60) * 64
        pool = draw.choice([None, tokens // 2])
        prefixes.append(Hit(tokens, tokens + draw.randrange(5) * 64, pool, draw.choice([None, 0])))
    return {name: draw.choice(prefixes) for name in names if draw.random() < share}


def random_state(draw: Random) -> ShortTermState:
    rules = SchedulerSection(
        policy=draw.choice(["paper", "adaptive", "local", "remote"]),
        remainders=RemaindersSection(tokens=draw.choice([0, 512, 4096])),
    )
    known = LinkState(LinkHealth(draw.choice(list(LinkVerdict))), draw.choice([None, 1e7]))
    return ShortTermState(rules, {OUT: known}, threshold_factor=draw.choice([1.0, 2.0]))


def random_view(board: Board, names: list[NodeId], draw: Random, now_s: float) -> View:
    held = {NEAR: HeldWork((1.0,) * 8, now_s - 5)} if draw.random() < 0.3 else {}
    view = board.view(now_s, random_caches(names, draw), held)
    return exclude_nodes(view, draw.sample(names, draw.choice([0, 0, 3])))


def test_decisions_are_those_of_a_look_at_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(0)
    kinds = Counter[str]()
    for _ in range(BOARDS):
        board, now_s = random_board(draw), 100.0
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
            remainder = options.remainder_option(request, view, state)
            assert remainder == plain_options.remainder_option(request, view, state)
            kinds["remainder"] += remainder is not None
            kinds["held"] += isinstance(found, Hold)
            kinds["copied"] += isinstance(found, Route) and bool(found.copies)
            kinds["local"] += isinstance(found, Route) and not found.offloaded
            kinds["offloaded"] += isinstance(found, Route) and found.offloaded
    assert len(kinds) == 5 and min(kinds.values()) > 50, kinds
