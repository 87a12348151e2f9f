"""The spans that a node records of its requests, and the path that shows them."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import msgspec
import pytest

from prfaas.contracts.readiness import NodeReady
from prfaas.contracts.trace_api import TRACES_PATH, ProcessSpans
from prfaas.engine.api import Sampling
from prfaas.engine.emulated.pace import Scales
from prfaas.node.job_builder import TokenizedRequest
from prfaas.node.request_runner import ActiveRequest
from prfaas.node.request_spans import TRACED_CHOICES, Step, steps
from prfaas.tracing.context import TRACEPARENT, TraceContext, new_trace
from prfaas.tracing.server_span import DISCONNECTED
from prfaas.tracing.spans import (
    CACHED_TOKENS,
    INPUT_TOKENS,
    KVD_GRANT,
    MODEL,
    NODE_DECODE,
    NODE_LEASE,
    NODE_PREFILL,
    NODE_QUEUE,
    NODE_REQUEST,
    OUTPUT_TOKENS,
    TTFT,
    Span,
)
from tests.engine.emulated.builders import emulated
from tests.node.hosts import Process, call
from tests.node.local_api import BYTES, LocalApi, local_api
from tests.node.test_server import GRANT, PROMPT, node_server
from tests.tracing.otlp_receiver import receiver_thread
from tests.waiting import HANG_S, wait_until

STEPS = [NODE_LEASE, NODE_QUEUE, NODE_PREFILL, NODE_DECODE]


async def spans_of(node: LocalApi, trace: TraceContext) -> list[Span]:
    async with node.http.get(TRACES_PATH + trace.trace_id) as answer:
        assert answer.status == 200
        return list(msgspec.json.decode(await answer.read(), type=ProcessSpans).spans)


async def wait_for_spans(node: LocalApi, trace: TraceContext, count: int) -> list[Span]:
    """In the order of their ends. A request that is given up ends a little later than its call."""
    async with asyncio.timeout(HANG_S):
        while True:
            found = await spans_of(node, trace)
            if len(found) >= count:
                return found
            await asyncio.sleep(0.002)


async def post(node: LocalApi, trace: TraceContext, **fields: Any) -> int:
    headers = {TRACEPARENT: trace.traceparent}
    async with node.http.post("/v1/completions", json=fields, headers=headers) as answer:
        await answer.read()
        return answer.status


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_its_steps_below_it(stream: bool) -> None:
    trace = new_trace(sampled=False)
    async with node_server() as node:
        fields = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
        assert await post(node, trace, **fields, stream=stream) == 200
        *found, request = await wait_for_spans(node, trace, 5)
    assert [span.name for span in found] == STEPS
    assert (request.name, request.kind, request.parent_id) == (
        *(NODE_REQUEST, "server"),
        trace.span_id,
    )
    assert {span.parent_id for span in found} == {request.span_id}
    for before, after in zip(found, found[1:], strict=False):
        assert before.end_s <= after.start_s + 1e-6
    assert request.start_s <= found[0].start_s and found[-1].end_s <= request.end_s
    assert not any(span.error for span in (*found, request))
    attributes = dict(request.attributes)
    assert 0.0 < float(attributes.pop(TTFT)) <= request.seconds
    assert attributes == {
        **{MODEL: "made-up", INPUT_TOKENS: 100, CACHED_TOKENS: 0},
        OUTPUT_TOKENS: 5,
    }
    assert found[2].attributes == {INPUT_TOKENS: 100, CACHED_TOKENS: 0}
    assert found[3].attributes == {OUTPUT_TOKENS: 5}


async def test_a_request_without_a_trace_is_served() -> None:
    async with node_server() as node:
        assert (await node.complete(prompt=PROMPT, max_tokens=1))[0] == 200


async def test_many_choices_have_few_spans() -> None:
    trace = new_trace(sampled=False)
    async with node_server() as node:
        fields = {"prompt": [1, 2, 3], "max_tokens": 1, "n": TRACED_CHOICES + 3, "seed": 1}
        assert await post(node, trace, **fields) == 200
        found = await wait_for_spans(node, trace, 1 + len(STEPS) * TRACED_CHOICES)
    assert len(found) == 1 + len(STEPS) * TRACED_CHOICES
    assert found[-1].name == NODE_REQUEST


async def test_a_refused_request_has_the_reason() -> None:
    trace = new_trace(sampled=False)
    params = {"do_remote_decode": True, "grant": GRANT}
    async with node_server() as node:
        assert await post(node, trace, prompt=PROMPT, max_tokens="x") == 400
        status = await post(node, trace, prompt=PROMPT, max_tokens=1, kv_transfer_params=params)
        assert status == 503
        malformed, lease, handoff = await wait_for_spans(node, trace, 3)
    assert malformed.name == handoff.name == NODE_REQUEST and "max_tokens" in malformed.error
    assert lease.name == NODE_LEASE and "no kvd here" in lease.error
    assert handoff.error == lease.error and handoff.attributes["prfaas.transfer.id"] == "t-1"


async def test_a_client_that_leaves_is_named() -> None:
    """The request ends in the step that it was in."""
    trace = new_trace(sampled=False)
    engine = emulated(scales=Scales(time=100.0))
    async with asyncio.timeout(HANG_S), local_api(engine, BYTES) as node:
        call = asyncio.create_task(post(node, trace, prompt=PROMPT, max_tokens=1))
        await asyncio.to_thread(wait_until, lambda: engine.stats().prefilling == 1)
        call.cancel()
        found = {span.name: span for span in await wait_for_spans(node, trace, 4)}
    assert set(found) == {NODE_REQUEST, NODE_LEASE, NODE_QUEUE, NODE_PREFILL}
    assert found[NODE_REQUEST].error == found[NODE_PREFILL].error == DISCONNECTED
    assert not found[NODE_QUEUE].error


async def test_a_request_that_waits_is_in_the_queue() -> None:
    trace = new_trace(sampled=False)
    engine = emulated(scales=Scales(time=100.0))
    async with asyncio.timeout(HANG_S), local_api(engine, BYTES) as node:
        first = asyncio.create_task(node.complete(prompt=PROMPT, max_tokens=1))
        await asyncio.to_thread(wait_until, lambda: engine.stats().prefilling == 1)
        call = asyncio.create_task(post(node, trace, prompt=PROMPT, max_tokens=1))
        await asyncio.to_thread(wait_until, lambda: engine.stats().waiting == 1)
        call.cancel()
        found = {span.name: span for span in await wait_for_spans(node, trace, 3)}
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert set(found) == {NODE_REQUEST, NODE_LEASE, NODE_QUEUE}
    assert found[NODE_QUEUE].error == DISCONNECTED


def choice(**times_s: float) -> ActiveRequest:
    request = TokenizedRequest("id", PROMPT, Sampling())
    active = ActiveRequest(request, lambda event: None, 1.0, lambda id: None)
    for name, time_s in times_s.items():
        setattr(active, name, time_s)
    return active


@pytest.mark.parametrize(
    "times_s, expected",
    [
        ({}, [Step(NODE_LEASE, 1.0, 9.0, "lost")]),
        (
            {"leased_s": 2.0},
            [Step(NODE_LEASE, 1.0, 2.0, ""), Step(NODE_QUEUE, 2.0, 9.0, "lost")],
        ),
        (
            {"leased_s": 2.0, "computed_s": 3.0},  # the pool had all of it
            [Step(NODE_LEASE, 1.0, 2.0, "lost")],
        ),
        (
            {"leased_s": 2.0, "began_s": 3.0, "computed_s": 4.0},  # of a prefill
            [
                Step(NODE_LEASE, 1.0, 2.0, ""),
                Step(NODE_QUEUE, 2.0, 3.0, ""),
                Step(NODE_PREFILL, 3.0, 4.0, "lost"),
            ],
        ),
    ],
)
def test_a_choice_ends_in_the_step_that_it_was_in(
    times_s: dict[str, float], expected: list[Step]
) -> None:
    assert steps(choice(**times_s), 9.0, "lost") == expected


def test_a_node_and_its_own_kvd_send_spans_to_one_collector() -> None:
    trace = new_trace(sampled=True)
    with receiver_thread() as receiver:
        engine = (
            "--engine",
            "emulated",
            "--model",
            "case-study-1t",
            "--accelerator",
            "h200",
        )
        node = Process("node", *engine, "--otlp-endpoint", receiver.url)
        try:
            url = node.ready(NodeReady).http
            card = call("GET", f"{url}/v1/models")[1]["data"][0]["prfaas"]
            body = json.dumps({"prompt": [7] * 70, "max_tokens": 1}).encode()
            headers = {TRACEPARENT: trace.traceparent, "Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:
                assert answer.status == 200
            # The kvd reads the header before it refuses the body.
            request = urllib.request.Request(f"{card['kvd_url']}/v1/open", b"[]", headers)
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(request, timeout=HANG_S)
            wait_until(lambda: len({span.service for span in receiver.of(trace.trace_id)}) == 2)
            found = {span.service: span for span in receiver.of(trace.trace_id)}
        finally:
            node.stop()
    assert set(found) == {"prfaas-node", "prfaas-kvd"}
    assert found["prfaas-node"].node == found["prfaas-kvd"].node != ""
    assert found["prfaas-kvd"].name == KVD_GRANT and found["prfaas-kvd"].error
