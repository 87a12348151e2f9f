"""Records of requests, as the request log has them."""

from __future__ import annotations

from typing import Any

from prfaas.contracts.openai import Usage
from prfaas.gateway.api.metrics import RequestRecord
from prfaas.gateway.attempt_trace import AttemptTrace, Wait, begin_call
from prfaas.gateway.following.kept_requests import KeptRequest
from prfaas.gateway.request import RequestTrace
from prfaas.scheduler.request import CacheCopy, Route
from prfaas.tracing.context import TraceContext
from prfaas.tracing.spans import Service, Span
from prfaas.types import ClusterId, NodeId

TRACE_ID = "ab" * 16
EPOCH_S = 1_000_000.0  # at 0 of the gateway's clock


def route(prefill: str = "far0", decode: str = "home1", **more: Any) -> Route:
    far = ClusterId("far") if prefill.startswith("far") else ClusterId("pd")
    made = Route(
        cluster=far,
        prefill=NodeId(prefill),
        decode_cluster=ClusterId("pd"),
        decode=NodeId(decode),
        offloaded=far == "far",
        cached_tokens=64,
        transfer_tokens=1000,
        nbytes=5000,
        prefill_s=2.0,
        copies=(),
        reason="long",
    )
    return made._replace(**more)


def copy(seconds: float = 0.5) -> CacheCopy:
    return CacheCopy(NodeId("home2"), NodeId("far0"), 64, 700, seconds)


def trace(arrived_s: float = 10.0, **more: Any) -> RequestTrace:
    made = RequestTrace(arrived_s, TraceContext(TRACE_ID, "1" * 16, False), **more)
    made.read_s, made.tokenized_s = arrived_s + 0.1, arrived_s + 0.3
    return made


def record(made: RequestTrace, name: str = "r", *, stream: bool = True) -> RequestRecord:
    usage = Usage(prompt_tokens=1000, completion_tokens=7)
    return RequestRecord(name, "/v1/completions", "", made, 1000, usage, stream=stream)


def kept(
    made: RequestTrace, ended_s: float, outcome: str = "completed", error: str = ""
) -> KeptRequest:
    return KeptRequest(record(made), outcome, error, ended_s)


def hand_off(made: RequestTrace, asked_s: float, route: Route) -> AttemptTrace:
    """An attempt that was granted after 0.1 s, prefilled after 3.1 s and committed after 3.5 s."""
    made.asked_s = asked_s
    made.waits.append(Wait(asked_s, "the queue is full", "far"))
    course = made.begin_attempt(route, asked_s + 1.0, 0.25)
    start_s = asked_s + 1.0
    course.grant = begin_call(made.context, start_s)
    course.grant.answered_s = start_s + 0.1
    course.transfer_id = "t-1"
    made.form = "canonical"
    course.prefill = begin_call(made.context, start_s + 0.1)
    course.prefill.answered_s = start_s + 3.1
    made.committed_s = course.committed_s = start_s + 3.5
    course.decode = begin_call(made.context, start_s + 3.6)
    return course


def span_of(
    span_id: str,
    parent_id: str | None,
    start_s: float,
    end_s: float,
    *,
    name: str = "work",
    node: str = "far0",
    service: Service = "node",
    **more: Any,
) -> Span:
    return Span(
        name, TRACE_ID, span_id * 16, start_s, end_s, service, node,
        None if parent_id is None else parent_id * 16, **more,
    )  # fmt: skip
