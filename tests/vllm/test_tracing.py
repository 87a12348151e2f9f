"""One request through the gateway, two kvds and two vLLM servers: one trace at the collector."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.tracing import spans as names
from prfaas.tracing.context import TraceContext, new_trace
from prfaas_lab.testing.vllm_server import await_health
from tests.gateway.backends import deployment
from tests.gateway.processes import gateway_process
from tests.tracing.otlp_receiver import OtlpReceiver, ReceivedSpan, receiver_thread
from tests.vllm import kvds
from tests.vllm.cases import PROMPTS, UNCACHED
from tests.vllm.servers import connected_server
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.timeout(900)  # servers start and stop within it

VLLM_SPAN = "llm_request"  # vLLM's name
GATEWAY, KVD, PREFILL, DECODE = "prfaas-gateway", "prfaas-kvd", "vllm-p", "vllm-d"
EXPECTED = {
    (GATEWAY, names.REQUEST, "client"),
    (GATEWAY, names.ATTEMPT, names.REQUEST),
    (GATEWAY, names.GRANT, names.ATTEMPT),
    (GATEWAY, names.PREFILL, names.ATTEMPT),
    (GATEWAY, names.COMMIT, names.ATTEMPT),
    (GATEWAY, names.DECODE, names.ATTEMPT),
    (KVD, names.KVD_GRANT, names.GRANT),
    (KVD, names.KVD_RECEIVE, names.GRANT),
    (KVD, names.KVD_SEND, names.GRANT),
    (PREFILL, VLLM_SPAN, names.PREFILL),
    (DECODE, VLLM_SPAN, names.DECODE),
}


@dataclass(frozen=True, slots=True)
class Traced:
    gateway_url: str
    receiver: OtlpReceiver


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    """A prefill server far away, and a decode server at home."""
    model = tmp_path / "falcon-h1"
    make_checkpoint(model, "falcon-h1")
    with ExitStack() as stack:
        receiver = stack.enter_context(receiver_thread())
        options = ("--otlp-endpoint", receiver.url)
        servers, nodes = [], []
        for core, name in enumerate("pd"):
            kvd = kvds.start(tmp_path / f"{name}.kvd", options=("--node", name, *options))
            stack.callback(kvds.stop, kvd)
            flags = (*UNCACHED, "--otlp-traces-endpoint", f"{receiver.url}/v1/traces")
            environment = {
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_SERVICE_NAME": f"vllm-{name}",
                "OTEL_BSP_SCHEDULE_DELAY": "200",  # milliseconds between two batches
            }
            server = connected_server(
                tmp_path, name, model, kvd.socket, core=core, flags=flags, env=environment
            )
            stack.callback(server.stop)
            servers.append(server)
            nodes.append({"url": server.url, "kvd_url": kvd.url})
        await_health(*servers)
        far, home = nodes
        made = deployment([home], [far], prefill=0, policy="remote")
        gateway = stack.enter_context(gateway_process(tmp_path, made, *options))
        yield Traced(gateway.url, receiver)


def ask(url: str, prompt: list[int], caller: TraceContext) -> int:
    """The status. The gateway refuses requests until its first polls have found the nodes."""
    body = json.dumps({"prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True})
    headers = {"Content-Type": "application/json", "traceparent": caller.traceparent}
    request = urllib.request.Request(f"{url}/v1/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=HANG_S) as response:
        answer = response.read()
        assert answer.rstrip().endswith(b"[DONE]"), answer
        return int(response.status)


def described(spans: list[ReceivedSpan], caller: TraceContext) -> set[tuple[str, str, str]]:
    by_id = {span.span_id: span.name for span in spans} | {caller.span_id: "client"}
    return {(span.service, span.name, by_id.get(span.parent_id or "", "none")) for span in spans}


def test_one_trace_has_the_spans_of_every_process(traced: Traced) -> None:
    caller = new_trace(sampled=True)
    assert ask(traced.gateway_url, PROMPTS["all"][-1], caller) == 200
    found: list[ReceivedSpan] = []

    def is_complete() -> bool:
        found[:] = traced.receiver.of(caller.trace_id)
        return described(found, caller) >= EXPECTED

    try:
        wait_until(is_complete)
    except AssertionError:
        assert described(found, caller) >= EXPECTED
    sent, received = (
        next(span for span in found if span.name == name)
        for name in (names.KVD_SEND, names.KVD_RECEIVE)
    )
    assert (sent.node, received.node) == ("p", "d")
    # The grant has passed through vLLM's connector.
    assert sent.attributes[names.TRANSFER_ID] == received.attributes[names.TRANSFER_ID]
    decode = next(span for span in found if (span.service, span.name) == (DECODE, VLLM_SPAN))
    assert decode.kind == "server"
    assert decode.attributes["gen_ai.usage.completion_tokens"] == 4
