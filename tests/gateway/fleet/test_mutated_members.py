"""Thousands of mutated responses of one member: the gateway lives, and the others stay in use."""

from __future__ import annotations

import random

import msgspec
import pytest

from prfaas.contracts.kvd_api import EngineReport, EventPage, KvdReport
from prfaas.errors import MalformedResponse
from prfaas.gateway.client.report_checks import check_page, check_report
from prfaas.types import HashEvent, LinkStats, NodeId
from prfaas_lab.testing.clock import FakeClock
from prfaas_lab.testing.hostile import FLOATS, INTEGERS, STRINGS, mutate_bytes, mutate_json
from tests.gateway.backends import until
from tests.gateway.fleet.test_hostile_members import gateway
from tests.gateway.fleet.test_polling import (
    CARD,
    EVENTS,
    HEALTH,
    LOAD,
    METRICS,
    MODELS,
    PROMPT,
    STATS,
)
from tests.gateway.fleets import A, B, C, F, fleet_and_router, member_of, step
from tests.gateway.reports import appear, report

NAME = "bad"
LINKS = (
    LinkStats("a:7400", 1.0, 4, 1e9, 500, 300, 0.1, 0.0, 0.02, 2e9, 3, 100),
    LinkStats("b:7400", 2.0, 0, 0.0, 0, 0),
)
HASHES = tuple(PROMPT.at(64)[:3])
EVENT = HashEvent(0, NodeId(NAME), "full", 64, HASHES, "stored")
REPORT = msgspec.to_builtins(
    msgspec.structs.replace(
        report(NAME, links=LINKS, native="vllm-a"),
        engines=(EngineReport("e", "http://127.0.0.1:1", 1),),
        next_seq={NodeId(NAME): 3, NodeId("e"): 1},
        incoming={"granted": 1},
    )
)
PAGES = [
    msgspec.to_builtins(EventPage(NodeId(NAME), "first", 1, (EVENT,))),
    msgspec.to_builtins(
        EventPage(NodeId(NAME), "first", 1, (), {"full": HASHES, "state": HASHES[2:]})
    ),
]
REFUSED = (MalformedResponse, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def test_a_mutated_report_is_refused_or_harmless() -> None:
    """What the checks accept, the fleet, the router and the state can hold."""
    draw, clock, accepted = random.Random(1), FakeClock(), 0
    fleet, router = fleet_and_router(clock)
    for _ in range(1500):
        clock.advance(0.5)
        for node in (A, B, C):
            appear(fleet, member_of(fleet, node), node, clock.now())
        bad = next(m for m in fleet.members if m.cluster == fleet.remotes[0])
        try:
            found = msgspec.json.decode(mutate_json(REPORT, draw), type=KvdReport)
            fleet.record_report(bad, check_report(found))
            accepted += 1
        except REFUSED as error:
            fleet.record_problem(bad, "kvd", error)
        step(fleet, router)
        assert {A, B, C} <= {n for n in (A, B, C, F) if n in fleet.board}
        assert all(fleet.board.node(node).usable for node in (A, B, C))
        assert not fleet.failures.counts, "nothing came as a surprise"
        links = fleet.board.view(clock.now(), {}, {}).links
        assert msgspec.json.encode([link.stats for link in links.values()])
        assert msgspec.json.encode([m.report for m in fleet.members])
    assert 100 < accepted < 1400, "the mutations are neither all harmless nor all refused"


def test_a_mutated_page_of_events_is_refused_or_harmless() -> None:
    draw, accepted = random.Random(2), 0
    for _ in range(1500):
        try:
            page = msgspec.json.decode(mutate_json(draw.choice(PAGES), draw), type=EventPage)
            check_page(page, NodeId(NAME))
        except REFUSED:
            continue
        accepted += 1
        assert page.node == NAME and all(event.node == NAME for event in page.events)
        assert msgspec.json.encode(page)
    assert 100 < accepted < 1400


def hostile_metrics(draw: random.Random) -> bytes:
    value = draw.choice((*map(str, (*INTEGERS, *FLOATS)), *STRINGS))
    labels = draw.choice(("", "{", '{a="b"}', "{" * 5000, '{a="}"}'))
    name = draw.choice(("running", "waiting", "other"))
    page = [*LOAD.splitlines(), f"vllm:num_requests_{name}{labels} {value}"]
    draw.shuffle(page)
    data = "\n".join(page).encode()
    return mutate_bytes(data, draw) if draw.random() < 0.2 else data


async def test_mutated_responses_of_one_member_leave_the_gateway_alive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draw = random.Random(0)
    async with gateway() as one:
        bad = one.hostile
        for number in range(60):
            await bad.kvd.script(STATS, mutate_json(REPORT, draw))
            await bad.kvd.script(EVENTS, mutate_json(draw.choice(PAGES), draw))
            card, health = mutate_json(CARD, draw), mutate_json(CARD, draw)
            await bad.engine.script(MODELS, card, draw.choice([200, 200, 302, 500]))
            await bad.engine.script(METRICS, hostile_metrics(draw), draw.choice([200, 200, 500]))
            await bad.engine.script(HEALTH, health, draw.choice([200, 204, 302, 503]))
            await bad.kvd.requested(STATS, len(bad.kvd.bodies[STATS]) + 2)
            if number % 20 == 0:
                await one.check_alive()
        await one.check_alive()
        assert not one.backend.fleet.failures.counts, caplog.text
        await bad.answer()
        await until(lambda: bool(one.state("bad").get("in_use")))
    assert all(len(record.getMessage()) < 2000 for record in caplog.records)
