"""What processes tell of a request that they have served: the JSON body of every response.

    kvd and node   GET /prfaas/v1/traces/TRACE_ID   -> ProcessSpans, for gateways (member key)
    gateway        GET /prfaas/v1/requests          -> KeptRequests, for operators (operator key)
    gateway        GET /prfaas/v1/requests/ID       -> FollowedRequest

`gateway/following/` collects the spans of the processes that have served a request, and
`tracing/diagnosis.py` names the cause of its time to first token.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from prfaas.tracing.spans import MOST_SPANS, Span
from prfaas.tracing.summary import Cause as Cause
from prfaas.tracing.summary import CauseKind as CauseKind
from prfaas.tracing.summary import RequestSummary as RequestSummary

TRACES_PATH: Final = "/prfaas/v1/traces/"
TRACE_ID_PATTERN: Final = "[0-9a-f]{32}"
TRACE_PATH: Final = f"{TRACES_PATH}{{trace_id:{TRACE_ID_PATTERN}}}"  # as aiohttp's routes have it
REQUESTS_PATH: Final = "/prfaas/v1/requests"


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
