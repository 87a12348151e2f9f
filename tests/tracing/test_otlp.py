"""One offloaded request through the real processes of a deployment: its spans at a collector, the
same spans at the gateway, and what `prfaas trace` prints of them."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from prfaas.clock import MonotonicClock
from prfaas.config import load_deployment
from prfaas.contracts.trace_api import REQUESTS_PATH, FollowedRequest
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import RunningDeployment, launched_gateway, launched_hosts
from prfaas.launch.preparation import (
    EMULATED_BLOCK_TOKENS,
    LaunchOptions,
    prepare_launch,
)
from prfaas.tracing import spans as names
from prfaas.tracing.context import TraceContext, new_trace
from prfaas.tracing.epoch import EpochOffset
from tests.tracing.otlp_receiver import OtlpReceiver, ReceivedSpan, open_receiver

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
SCALES = Scales(0.02, 0.002, 0.02)
PROMPT_TOKENS = 20_000
HANDOFF_TOKENS = PROMPT_TOKENS // EMULATED_BLOCK_TOKENS * EMULATED_BLOCK_TOKENS
REQUESTS = 4
TIMED_REQUESTS = 40
CLOCK_S = 0.001  # each process compares its two clocks for itself

# Every span of an offloaded request: its process, its name and the name of its parent.
GATEWAY, KVD, NODE = "prfaas-gateway", "prfaas-kvd", "prfaas-node"
PREFILL_NODE, DECODE_NODE = "prfaas-0", "pd"
EXPECTED = {
    (GATEWAY, names.REQUEST, "client"),
    (GATEWAY, names.READ, names.REQUEST),
    (GATEWAY, names.TOKENIZE, names.REQUEST),
    (GATEWAY, names.WAIT, names.REQUEST),
    (GATEWAY, names.ATTEMPT, names.REQUEST),
    (GATEWAY, names.GRANT, names.ATTEMPT),
    (GATEWAY, names.PREFILL, names.ATTEMPT),
    (GATEWAY, names.COMMIT, names.ATTEMPT),
    (GATEWAY, names.DECODE, names.ATTEMPT),
    (KVD, names.KVD_GRANT, names.GRANT),
    (KVD, names.KVD_RECEIVE, names.GRANT),
    (KVD, names.KVD_SEND, names.GRANT),
    (NODE, names.NODE_REQUEST, names.PREFILL),
    (NODE, names.NODE_REQUEST, names.DECODE),
    (NODE, names.NODE_LEASE, names.NODE_REQUEST),
    (NODE, names.NODE_QUEUE, names.NODE_REQUEST),
    (NODE, names.NODE_PREFILL, names.NODE_REQUEST),
    (NODE, names.NODE_DECODE, names.NODE_REQUEST),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One streamed request, as its client sees it."""

    caller: TraceContext
    request_id: str
    began_s: float  # since the epoch
    first_event_s: float


@dataclass(frozen=True, slots=True)
class Traced:
    live: RunningDeployment
    receiver: OtlpReceiver
    http: aiohttp.ClientSession
    to_epoch: EpochOffset

    async def ask(self, seed: int, *, sampled: bool = True) -> Asked:
        """A prompt that no node has seen."""
        caller = new_trace(sampled=sampled)
        prompt = random.Random(seed).choices(range(256), k=PROMPT_TOKENS)
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "stream": True}).encode()
        headers = {"Content-Type": "application/json", "traceparent": caller.traceparent}
        began_s = time.monotonic()
        async with self.http.post(
            f"{self.live.gateway_url}/v1/completions", data=body, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
            await response.content.readuntil(b"\n\n")
            first_event_s = time.monotonic()
            await response.read()
        to_epoch_s = self.to_epoch.seconds()
        return Asked(
            caller,
            response.headers["X-Request-Id"],
            began_s + to_epoch_s,
            first_event_s + to_epoch_s,
        )

    async def exported(self, asked: Asked) -> list[ReceivedSpan]:
        """Once every process has sent its spans."""

        def is_complete(_: list[ReceivedSpan]) -> bool:
            found = self.receiver.of(asked.caller.trace_id)
            return described(found, asked.caller) >= EXPECTED

        await self.receiver.wait_until(is_complete)
        return self.receiver.of(asked.caller.trace_id)

    async def followed(self, asked: Asked) -> FollowedRequest:
        url = f"{self.live.gateway_url}{REQUESTS_PATH}/{asked.request_id}"
        async with self.http.get(url) as response:
            body = await response.read()
            assert response.status == 200, body
        return msgspec.json.decode(body, type=FollowedRequest)


@asynccontextmanager
async def traced_deployment(folder: Path) -> AsyncIterator[Traced]:
    """One node prefills far away, and a cluster of two decodes."""
    stated = load_deployment(CASE_STUDY)
    sizes = {"prfaas": 8, "pd": 16}
    clusters = [
        msgspec.structs.replace(cluster, gpus=sizes[cluster.name]) for cluster in stated.clusters
    ]
    plan = prepare_launch(
        msgspec.structs.replace(stated, clusters=clusters),
        CASE_STUDY,
        LaunchOptions("emulated", SCALES),
        folder,
    )
    async with open_receiver() as receiver, aiohttp.ClientSession() as http:
        options = ("--otlp-endpoint", receiver.url)
        engines = replace(plan.engines, options=options)
        async with (
            launched_hosts(plan.deployment, engines, folder, attached_prefix()) as hosts,
            launched_gateway(hosts, plan.deployment, (*options, "--policy", "remote")) as live,
        ):
            yield Traced(live, receiver, http, EpochOffset(MonotonicClock()))


def described(spans: list[ReceivedSpan], caller: TraceContext) -> set[tuple[str, str, str]]:
    """Each span with its service, its name and the name of its parent."""
    by_id = {span.span_id: span.name for span in spans} | {caller.span_id: "client"}
    return {(span.service, span.name, by_id.get(span.parent_id or "", "none")) for span in spans}


def the(spans: list[ReceivedSpan], name: str, node: str = "") -> ReceivedSpan:
    (span,) = (one for one in spans if one.name == name and one.node.startswith(node))
    return span


@pytest.mark.slow
async def test_a_trace_of_an_offloaded_request(tmp_path: Path) -> None:
    async with traced_deployment(tmp_path) as traced:
        await traced.ask(0)  # connections are made
        asked = [await traced.ask(seed) for seed in range(1, 1 + REQUESTS)]
        for one in asked:
            spans = await traced.exported(one)
            assert described(spans, one.caller) == EXPECTED
            check_spans(spans)
            check_first_token(one, spans)
            await check_followed(traced, one, spans)
        for seed in range(100, 100 + TIMED_REQUESTS):
            timed = await traced.ask(seed)
            check_first_token(timed, await traced.exported(timed))
        await check_command(traced, asked[-1])
        await check_unsampled(traced)


def check_spans(spans: list[ReceivedSpan]) -> None:
    assert not [span for span in spans if span.error]
    request = the(spans, names.REQUEST)
    assert request.kind == "server"
    assert request.attributes[names.INPUT_TOKENS] == PROMPT_TOKENS
    assert {span.kind for span in spans if span.name in (names.GRANT, names.DECODE)} == {"client"}
    # Each process under the name of its host.
    sent, received = the(spans, names.KVD_SEND), the(spans, names.KVD_RECEIVE)
    assert sent.node == PREFILL_NODE and received.node.startswith(DECODE_NODE)
    assert the(spans, names.KVD_GRANT).node == received.node
    # Both kvds name the same transfer.
    assert sent.attributes[names.TRANSFER_ID] == received.attributes[names.TRANSFER_ID]
    assert 0 < sent.attributes[names.NBYTES] <= received.attributes[names.NBYTES]
    # The clocks of these processes are one clock. A parent of another process has begun before.
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent_id or "")
        assert parent is None or parent.start_s <= span.start_s + CLOCK_S, (parent, span)
    prefill = the(spans, names.NODE_PREFILL, PREFILL_NODE)
    assert prefill.attributes[names.INPUT_TOKENS] == HANDOFF_TOKENS
    lease = the(spans, names.NODE_LEASE, PREFILL_NODE)
    queue = the(spans, names.NODE_QUEUE, PREFILL_NODE)
    assert lease.end_s <= queue.start_s + 1e-6 and queue.end_s <= prefill.start_s + 1e-6
    assert lease.attributes[names.TRANSFER_ID] == sent.attributes[names.TRANSFER_ID]
    # The kvd sends while the engine computes. The last bytes may have gone before the node hears
    # that its engine has ended, by as much as its event loop is late.
    assert sent.start_s - CLOCK_S < prefill.end_s
    assert prefill.start_s < sent.end_s + CLOCK_S
    assert the(spans, names.NODE_DECODE).attributes[names.OUTPUT_TOKENS] >= 1


async def check_followed(traced: Traced, asked: Asked, spans: list[ReceivedSpan]) -> None:
    """The gateway tells an operator the same, without a collector."""
    followed = await traced.followed(asked)
    assert followed.missing == () and followed.request.trace_id == asked.caller.trace_id
    exported = {(one.name, one.span_id, one.parent_id, one.service) for one in spans}
    kept = {
        (one.name, one.span_id, one.parent_id, f"prfaas-{one.service}") for one in followed.spans
    }
    assert kept == exported
    assert followed.request.ttft_s == pytest.approx(
        the(spans, names.REQUEST).attributes[names.TTFT], abs=1e-6
    )


def check_first_token(asked: Asked, spans: list[ReceivedSpan]) -> None:
    """The gateway's first token lies between the decode node's and the client's, and its arrival
    between the client's start and the prefill node's, however busy the machine is."""
    request = the(spans, names.REQUEST)
    first_token_s = request.start_s + request.attributes[names.TTFT]
    arrivals = (asked.began_s, request.start_s, the(spans, names.NODE_LEASE, PREFILL_NODE).start_s)
    first_tokens = (the(spans, names.NODE_DECODE).start_s, first_token_s, asked.first_event_s)
    for earlier_s, later_s in (*pairwise(arrivals), *pairwise(first_tokens)):
        assert earlier_s <= later_s + CLOCK_S, (arrivals, first_tokens)


async def check_command(traced: Traced, asked: Asked) -> None:
    """`prfaas trace` prints a row for each of these spans."""
    command = [sys.executable, "-m", "prfaas", "trace", asked.request_id]
    process = await asyncio.create_subprocess_exec(
        *command, "--gateway", traced.live.gateway_url, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    lines = printed.decode().splitlines()
    for span in await traced.exported(asked):
        assert any(span.name in line for line in lines), (span.name, lines)


async def check_unsampled(traced: Traced) -> None:
    """A gateway that exports samples every request, also that of a client that does not."""
    asked = await traced.ask(99, sampled=False)
    spans: list[Any] = await traced.exported(asked)
    assert described(spans, asked.caller) == EXPECTED
