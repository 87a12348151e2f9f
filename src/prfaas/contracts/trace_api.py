"""What processes tell of a request that they have served: the JSON body of every response.

    kvd and node   GET /prfaas/v1/traces/TRACE_ID   -> ProcessSpans, for gateways (member key)
    gateway        GET /prfaas/v1/requests          -> KeptRequests, for operators (operator key)
    gateway        GET /prfaas/v1/requests/ID       -> FollowedRequest

`gateway/following/` collects the spans of the processes that have served a request, and
`tracing/diagnosis.py` names the cause of its time to first token.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from prfaas.tracing.spans import MOST_SPANS, Span

TRACES_PATH: Final = "/prfaas/v1/traces/"
TRACE_ID_PATTERN: Final = "[0-9a-f]{32}"
TRACE_PATH: Final = f"{TRACES_PATH}{{trace_id:{TRACE_ID_PATTERN}}}"  # as aiohttp's routes have it
REQUESTS_PATH: Final = "/prfaas/v1/requests"

CauseKind: TypeAlias = Literal[
    "big body",  # it took long to arrive, or to be tokenised
    "full queue",  # it waited for a node, at the router or in the engine's queue
    "no memory",  # the decode node's kvd refused a grant
    "prefix copies",
    "cold cache",  # most of its prompt had to be computed, at the expected pace
    "lost state",  # blocks were cached, but not the state to resume from; or it was lost later
    "slow prefill",  # slower than the route predicted
    "slow link",
    "cut link",
    "busy decode",  # the state had arrived, and the first token came late
    "retry",  # attempts that failed for another reason than those below
    "hung node",  # a node did not answer any more
    "lost node",  # a node died
    "nothing unusual",
]


class Cause(msgspec.Struct, frozen=True):
    kind: CauseKind
    seconds: float  # of the time to first token, or of the whole where there is no first token
    text: str  # one sentence, with the names of nodes and clusters


class RequestSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a list of requests."""

    id: str
    trace_id: str
    at_s: float  # its arrival, since the epoch
    outcome: str  # "in progress" while it has not ended
    route: str
    home: str = ""
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 1
    ttft_s: float | None = None  # of an answer that streams
    total_s: float = 0.0
    tenant: str = ""
    error: str = ""


class KeptRequests(msgspec.Struct, frozen=True):
    """The newest first; the slowest first."""

    latest: tuple[RequestSummary, ...]
    slowest: tuple[RequestSummary, ...]
    failed: tuple[RequestSummary, ...]


class ProcessSpans(msgspec.Struct, frozen=True):
    """Those that the process still has; none where it has forgotten the trace."""

    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=MOST_SPANS)] = ()


class FollowedRequest(msgspec.Struct, frozen=True):
    request: RequestSummary
    # The one that took most of the time first. At least one.
    causes: tuple[Cause, ...]
    # In order of their starts, on the gateway's clock: parents come before their children.
    spans: tuple[Span, ...]
    missing: tuple[str, ...] = ()  # processes that did not answer, or have forgotten: one line each
    explanation: dict[str, Any] | None = None  # as `/prfaas/v1/explain` returns it
