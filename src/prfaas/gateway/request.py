"""The seam between `api` (OpenAI over HTTP) and the backend (routing, hand-off, retries).

No sockets and no HTTP here. A request that has been read, validated and tokenised is a
`GatewayRequest`; the backend returns the decode engine's answer, event by event, from the first
token on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from prometheus_client.core import Metric

from prfaas.contracts.gateway_api import GatewayReport
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.contracts.openai import TENANT_HEADER
from prfaas.gateway.attempt_trace import AttemptTrace, Wait
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.request import Route
from prfaas.tracing.context import TraceContext, new_span_id, new_trace, parse_traceparent
from prfaas.tracing.spans import Span
from prfaas.types import Form

# Attempts of one request that are kept. A request that finds the decode nodes full makes many.
MOST_COURSES = 32


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """One request. `fields` is the client's body without `prompt`, `cache_salt` and
    `kv_transfer_params`. It reaches the decode engine unchanged (messages, tools, reasoning,
    structured output, ...), except that streams always request their usage."""

    id: str  # names the request in logs, at the nodes (X-Request-Id) and to the client
    path: Literal["/v1/completions", "/v1/chat/completions"]
    token_ids: TokenIds
    fields: Mapping[str, Any]
    salt: str  # the tenant's; prompts with different salts do not share a cache
    stream: bool
    conversation: bool  # more turns are likely, so a state at the last boundary is worth keeping
    prompt_logprobs: bool = False
    adapter: str = ""
    multimodal: bool = False
    n: int = 1  # choices, which share one prefill
    tenant: str = ""  # whose request it is; tenants share the nodes fairly
    tenant_tag: str = ""  # names the tenant to nodes and kvds
    cluster: str = ""  # the PD cluster at which it arrives, as the client names it

    @property
    def headers(self) -> dict[str, str]:
        """Of every call to a node for this request."""
        tagged = {TENANT_HEADER: self.tenant_tag} if self.tenant_tag else {}
        return {"X-Request-Id": self.id, **tagged}


@dataclass(slots=True)
class RequestTrace:
    """The course of one request, filled in as it happens, then logged and counted once. The log and
    the metrics read the latest attempt here; `courses` has every attempt."""

    arrived_s: float
    # Of the request's own span. The prompts of a list have the one of their request.
    context: TraceContext = field(default_factory=lambda: new_trace(sampled=False))
    parent_id: str | None = None  # the client's span, where the client has sent one
    home: str = ""  # the PD cluster at which the request has arrived
    cluster: str = ""  # of the prefill node
    prefill: str = ""
    decode: str = ""
    offloaded: bool = False
    alone: bool = False  # the decode node prefills for itself
    reason: str = ""
    cached_tokens: int = 0
    form: Form | Literal[""] = ""  # of the hand-off's state; empty: no hand-off, or none granted
    nbytes: int = 0  # of all its hand-offs that have arrived, as the receiving kvds report
    attempts: int = 0
    waited_s: float = 0.0  # until its prefill began; 0 without a hand-off
    # Times on the gateway's clock; None: the request did not get that far.
    read_s: float | None = None  # the body has arrived
    tokenized_s: float | None = None  # the prompt has been checked and tokenised
    asked_s: float | None = None  # the router was asked for nodes, and has not placed it yet
    waits: list[Wait] = field(default_factory=list)  # for what the router has held it since then
    routed_s: float | None = None
    granted_s: float | None = None
    prefilled_s: float | None = None  # the prefill node of a hand-off has answered
    committed_s: float | None = None
    first_token_s: float | None = None  # of a stream: its first event is written to the client
    failures: list[str] = field(default_factory=list)  # of failed attempts, one line each
    explains: bool = False  # the route is explained, whatever the rate of explanations
    # Of the latest attempt, with all alternatives as they were then. None: it was not recorded.
    explanation: Explanation | None = None
    # Tokens whose blocks some node has, but without a state to resume from.
    stateless_tokens: int = 0
    courses: list[AttemptTrace] = field(default_factory=list)

    @classmethod
    def begin(
        cls, now_s: float, traceparent: str | None, tracestate: str = "", *, samples: bool
    ) -> RequestTrace:
        """Of a request that has just arrived. `samples`: this gateway exports its spans. A
        `tracestate` belongs to the trace of its `traceparent`, and counts with a valid one only."""
        caller = None if traceparent is None else parse_traceparent(traceparent)
        if caller is None:
            return cls(now_s, new_trace(sampled=samples))
        context = caller._replace(
            span_id=new_span_id(), sampled=caller.sampled or samples, state=tracestate
        )
        return cls(now_s, context, caller.span_id)

    def begin_attempt(
        self,
        route: Route,
        now_s: float,
        transfer_s: float | None = None,
    ) -> AttemptTrace:
        """`transfer_s`: see `PlacementRequest`."""
        self.attempts += 1
        self.routed_s = now_s
        self.granted_s, self.prefilled_s, self.committed_s, self.form = None, None, None, ""
        self.cluster, self.prefill, self.decode = route.cluster, route.prefill, route.decode
        self.offloaded, self.reason = route.offloaded, route.reason
        self.alone = route.alone
        self.cached_tokens = route.cached_tokens
        asked_s = now_s if self.asked_s is None else self.asked_s
        self.asked_s = None
        if len(self.courses) >= MOST_COURSES:
            # The first and the latest ones tell most.
            del self.courses[MOST_COURSES // 2]
        begun = AttemptTrace(route, new_span_id(), asked_s, now_s, self.waits, transfer_s)
        self.waits = []
        self.courses.append(begun)
        return begun

    @property
    def course(self) -> AttemptTrace:
        """The latest attempt. There must be one."""
        return self.courses[-1]

    def summarise(self, traces: Sequence[RequestTrace]) -> None:
        """Makes this the trace of a list of prompts: sums, and what all of them have in common."""
        self.home = _common(trace.home for trace in traces)
        self.cluster = _common(trace.cluster for trace in traces)
        self.prefill = _common(trace.prefill for trace in traces)
        self.decode = _common(trace.decode for trace in traces)
        self.reason = _common(trace.reason for trace in traces)
        forms = {trace.form for trace in traces}
        self.form = forms.pop() if len(forms) == 1 else ""
        self.cached_tokens = sum(trace.cached_tokens for trace in traces)
        self.nbytes = sum(trace.nbytes for trace in traces)
        self.attempts = sum(trace.attempts for trace in traces)
        if self.first_token_s is None:  # no stream
            started = [trace.first_token_s for trace in traces if trace.first_token_s is not None]
            self.first_token_s = min(started, default=None)
        self.failures = [failure for trace in traces for failure in trace.failures]

    def handed_off_cached(self) -> int | None:
        """The prompt tokens that the prefill of a hand-off has not computed, as its node reports
        them, or as the route expects until the report is here. None without a hand-off."""
        return self.cached_tokens if self.form else None


def _common(values: Iterable[str]) -> str:
    found = set(values)
    return found.pop() if len(found) == 1 else ""


class Upstream(Protocol):
    """The decode engine's answer. For a stream every item is a list of whole events
    (`data: ...\\n\\n`) that arrived together, and the first item has arrived already. Otherwise
    the only item is the whole JSON body."""

    def events(self) -> AsyncIterator[Sequence[bytes]]:
        """Yields the answer's items. Raises `StreamBroken`."""


class CollectedSpans(NamedTuple):
    spans: list[Span]
    missing: list[str]  # processes that did not answer or have forgotten the trace, one line each


class Backend(Protocol):
    def answer(
        self, request: GatewayRequest, trace: RequestTrace
    ) -> AbstractAsyncContextManager[Upstream]:
        """Entering the context waits for the first token or raises `RequestError`. Leaving it, also
        by cancellation, releases what is still under way: grant, prefill, transfer, decode."""

    def explain(self, request: GatewayRequest) -> dict[str, Any]:
        """Where the request would go now and why, with the predicted TTFT of every alternative.
        Dispatches nothing."""

    def unready_reason(self) -> str:
        """Why no request can be served now; empty when requests can be."""

    def state(self) -> dict[str, Any]: ...

    def metrics(self) -> Iterable[Metric]:
        """The backend's metrics for Prometheus."""

    def plan(self) -> dict[str, Any]: ...

    async def register(self, heartbeat: Heartbeat) -> None:
        """Adds the kvd of the heartbeat to the fleet, once it has proved that it is a member.
        Raises `RequestError`."""

    def gateway_report(self, after: int) -> GatewayReport | None:
        """This gateway for the other gateways of the deployment, with the lengths of its requests
        after the one of this number. None: the deployment has no other gateways."""

    async def collect_spans(self, trace_id: str, nodes: Collection[str]) -> CollectedSpans:
        """The spans of a trace that these nodes and their kvds still have, on their own clocks."""

    def describe(self, explanation: Explanation) -> dict[str, Any]:
        """The explanation of a route, as `explain` returns it."""

    async def drain(self, cluster: str, drained: bool) -> dict[str, Any]:
        """Drains a cluster, which then gets no new requests, or ends that. Returns the order, and
        whether a majority of the kvds keeps it. Raises `RequestError` for a cluster that is not in
        the deployment."""
