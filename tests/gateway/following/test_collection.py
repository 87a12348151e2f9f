"""Spans of nodes and kvds that are loopback HTTP servers, some of which lie."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from prfaas.contracts.trace_api import TRACES_PATH, ProcessSpans
from prfaas.gateway.client.node_client import Card
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.following import collection
from prfaas.gateway.following.collection import MOST_ATTRIBUTES, MOST_NODES, SpanCollector
from prfaas.http_client.client import open_client
from prfaas.tracing.spans import MOST_SPANS, MOST_TEXT, Span
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.fleets import FARS, HOMES, B, F, fleet_and_router, member_of
from tests.gateway.following.builders import TRACE_ID, span_of
from tests.gateway.peers import Peer, peer

WHAT = f"GET {TRACES_PATH}{TRACE_ID}"


@dataclass(slots=True)
class Case:
    """`b` has a kvd and a node that answer as they are scripted; `f` has addresses that do not
    exist."""

    fleet: Fleet
    kvd: Peer
    node: Peer
    collector: SpanCollector


@asynccontextmanager
async def case() -> AsyncIterator[Case]:
    async with peer() as kvd, peer() as node, open_client() as http:
        homes = [HOMES[0], {"url": node.url, "kvd_url": kvd.url}, HOMES[2]]
        nowhere = [{"url": "http://127.0.0.1:1", "kvd_url": "http://127.0.0.1:1"}]
        assert len(nowhere) == len(FARS)
        fleet, _ = fleet_and_router(FakeClock(), homes=homes, fars=nowhere)
        yield Case(fleet, kvd, node, SpanCollector(fleet, http))


async def test_kvds_and_nodes_are_asked() -> None:
    async with case() as one:
        of_kvd = span_of("a", "1", 1.0, 2.0, service="kvd", node="b", kind="server")
        of_node = span_of("b", "1", 1.0, 2.0, service="node", node="b", kind="server")
        await one.kvd.script(WHAT, ProcessSpans((of_kvd,)))
        await one.node.script(WHAT, ProcessSpans((of_node,)))
        found = await one.collector.collect(TRACE_ID, [B, B])
        assert found == ([of_kvd, of_node], [])


async def test_what_does_not_answer_is_named() -> None:
    async with case() as one:
        await one.kvd.script(WHAT, ProcessSpans())
        await one.node.script(WHAT, {"error": {"message": "no\nsuch path"}}, status=404)
        found = await one.collector.collect(TRACE_ID, [B, F, "gone"])
        assert found.spans == []
        left, kvd, node, *unreachable = found.missing
        assert left == "gone has left"
        assert kvd == "kvd of b: it has no spans of this trace any more"
        assert node == "node of b: no such path"
        assert [line.partition(":")[0] for line in unreachable] == ["kvd of f", "node of f"]
        many = [f"node {number}" for number in range(MOST_NODES + 3)]
        found = await one.collector.collect(TRACE_ID, many)
        assert found.missing[0] == "3 more nodes were not asked"
        assert len(found.missing) == MOST_NODES + 1


async def test_a_silent_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "COLLECT_S", 0.05)
    async with case() as one:
        answered = span_of("a", "1", 1.0, 2.0, service="kvd", node="b")
        await one.kvd.script(WHAT, ProcessSpans((answered,)))
        found = await one.collector.collect(TRACE_ID, [B])
        assert found.spans == [answered]
        (line,) = found.missing
        assert line.startswith("node of b: ")


async def test_vllm_is_not_asked() -> None:
    async with case() as one:
        one.fleet.record_card(member_of(one.fleet, B), Card("m", None))
        await one.kvd.script(WHAT, ProcessSpans())
        found = await one.collector.collect(TRACE_ID, [B])
        assert len(found.missing) == 1 and not one.node.bodies
        member_of(one.fleet, B).card = None
        assert "node of b: its engine has left" in (
            (await one.collector.collect(TRACE_ID, [B])).missing
        )


async def test_a_process_speaks_for_itself_only() -> None:
    async with case() as one:
        good = span_of("a", "1", 1.0, 2.0, service="kvd", node="b")
        forged = msgspec.structs.replace(
            good, service="gateway", node="a", error="two\nlines\x1b[2J", name="\x07bell"
        )
        others = msgspec.structs.replace(good, trace_id="12" * 16)
        odd_times = [
            msgspec.structs.replace(good, start_s=start_s, end_s=end_s)
            for start_s, end_s in ((2.0, 1.0), (-1.0, 1.0), (1.0, 1e300))
        ]
        await one.kvd.script(WHAT, ProcessSpans((forged, others, *odd_times)))
        await one.node.script(WHAT, ProcessSpans())
        (found,) = (await one.collector.collect(TRACE_ID, [B])).spans
        assert (found.service, found.node) == ("kvd", "b")
        assert (found.error, found.name) == ("two lines [2J", " bell")


async def test_texts_and_numbers_of_attributes_are_bounded() -> None:
    long = {f"{number}": "x" * 1000 for number in range(100)}
    span = span_of("a", "1", 1.0, 2.0, service="kvd", node="b", attributes=long)
    found = collection.checked(span, "b", "kvd")
    assert len(found.attributes) == MOST_ATTRIBUTES
    assert all(len(str(value)) <= MOST_TEXT for value in found.attributes.values())


@pytest.mark.parametrize(
    "answer",
    [
        b"not JSON",
        b"{}" + b" " * (collection.PAGE_BYTES + 1),
        {"spans": [{"name": "x"}]},
        {"spans": [[1]]},
        {"spans": "x"},
        [],
    ],
    ids=["not JSON", "too long", "no span", "a list", "a text", "no object"],
)
async def test_answers_that_are_wrong_are_refused(answer: Any) -> None:
    async with case() as one:
        await one.kvd.script(WHAT, answer)
        await one.node.script(WHAT, answer)
        found = await one.collector.collect(TRACE_ID, [B])
        assert found.spans == [] and len(found.missing) == 2
        assert all(len(line) < 300 and line.isprintable() for line in found.missing)


async def test_too_many_spans_are_refused() -> None:
    async with case() as one:
        made: list[Span] = [span_of("a", "1", 1.0, 2.0)] * (MOST_SPANS + 1)
        await one.kvd.script(WHAT, {"spans": made})
        await one.node.script(WHAT, {"spans": made[:-1]})
        found = await one.collector.collect(TRACE_ID, [B])
        assert len(found.spans) == MOST_SPANS and len(found.missing) == 1
