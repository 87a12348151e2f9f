"""One request through the backend, real kvds and real nodes: its spans in every process."""

from __future__ import annotations

import asyncio
import time

from prfaas.clock import MonotonicClock
from prfaas.gateway.following.alignment import join_spans
from prfaas.gateway.following.kept_requests import KeptRequest
from prfaas.gateway.following.paths import nodes_of
from prfaas.gateway.following.request_spans import request_spans
from prfaas.tracing import spans as names
from prfaas.tracing.spans import Span
from tests.gateway.backends import THRESHOLD, answered, gateway_request, prompt, serving
from tests.gateway.conftest import Hosts
from tests.gateway.following.builders import record

LONG = 2 * THRESHOLD


def only(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


async def test_a_hand_off_is_followed_through_every_process(emulated: Hosts) -> None:
    async with serving(emulated.deployment()) as backend:
        found = await answered(backend, gateway_request(prompt(LONG, "followed")))
        clock = MonotonicClock()
        kept = KeptRequest(record(found.trace), "completed", "", clock.now())
        nodes = nodes_of(kept)
        assert nodes == ["far0", found.trace.decode]
        trace_id = found.trace.context.trace_id
        own = request_spans(kept, "m", time.time() - clock.now())
        wanted = {
            *(names.KVD_GRANT, names.KVD_RECEIVE, names.KVD_SEND, names.NODE_REQUEST),
            *(names.NODE_PREFILL, names.NODE_DECODE),
        }

        async def collect() -> list[Span]:
            """The spans of a process that has just ended its work may be a moment late."""
            while True:
                collected = await backend.collect_spans(trace_id, nodes)
                sides = [s for s in collected.spans if s.name == names.NODE_REQUEST]
                if len(sides) == 2 and wanted <= {span.name for span in collected.spans}:
                    assert collected.missing == []
                    return collected.spans
                await asyncio.sleep(0.02)

        spans = join_spans(own, await asyncio.wait_for(collect(), 60.0))
        by_id = {span.span_id: span for span in spans}
        for span in spans:
            assert span.trace_id == trace_id and not span.error
            assert span.parent_id in by_id or span.name == names.REQUEST
        assert by_id[only(spans, names.KVD_GRANT).parent_id or ""].name == names.GRANT
        assert by_id[only(spans, names.KVD_RECEIVE).parent_id or ""].node in ("", nodes[1])
        assert only(spans, names.KVD_SEND).node == "far0"
        served = {
            by_id[span.parent_id or ""].name: span.node
            for span in spans
            if span.name == names.NODE_REQUEST
        }
        assert served == {names.PREFILL: "far0", names.DECODE: found.trace.decode}
        for span in spans:
            if span.kind == "server" and span.parent_id in by_id:
                call = by_id[span.parent_id or ""]
                assert span.start_s < call.end_s and call.start_s < span.end_s
