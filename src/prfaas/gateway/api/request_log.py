"""The log line and the metrics of every request, written once when the request ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from prfaas.clock import Clock
from prfaas.errors import InputError, RequestError, StreamBroken
from prfaas.gateway.api.metrics import ApiMetrics, PromptRecord, RequestRecord, route_of
from prfaas.gateway.following.request_line import fitting
from prfaas.gateway.request import RequestTrace
from prfaas.service.logging import with_fields

_LOG = logging.getLogger("prfaas.gateway.requests")
_ERROR_CHARS = 500  # of an error: it may quote the request
_MOST_FAILURES = 8  # of failed attempts


class RequestObserver(Protocol):
    """Sees every request, such as the console does."""

    def begin(self, record: RequestRecord) -> None:
        """The request has arrived. Its record is filled in as it proceeds."""

    def end(self, record: RequestRecord, outcome: str, error_text: str, now_s: float) -> None: ...


class RequestLog:
    def __init__(
        self,
        metrics: ApiMetrics,
        clock: Clock,
        observer: RequestObserver | None = None,
        *,
        samples: bool = False,
    ) -> None:
        """`samples`: the spans of every request are exported."""
        self.metrics = metrics
        self._samples = samples
        self.now = clock.now
        self._observer = observer

    @contextmanager
    def record(
        self,
        request_id: str,
        path: str,
        tenant: str,
        traceparent: str | None = None,
        tracestate: str = "",
    ) -> Iterator[RequestRecord]:
        """The record of a request that has arrived. Leaving the block logs and counts the request;
        the exception that leaves it determines the outcome. `traceparent` and `tracestate`: the
        client's headers."""
        trace = RequestTrace.begin(self.now(), traceparent, tracestate, samples=self._samples)
        record = RequestRecord(request_id, path, tenant, trace)
        self.metrics.in_flight.inc()
        if self._observer is not None:
            self._observer.begin(record)
        outcome, error_text = "failed", ""  # for every exception that is not handled below
        try:
            yield record
            outcome, error_text = record.cut_short or ("completed", "")
        except RequestError as error:
            outcome, error_text = _outcome(error.status), error.message
            raise
        except InputError as error:
            outcome, error_text = "rejected", str(error)
            raise
        except StreamBroken as error:
            outcome, error_text = "broken", str(error)
            raise
        except (asyncio.CancelledError, ConnectionError):
            # A client that leaves after the last event has its answer.
            outcome = "completed" if record.delivered else "cancelled"
            raise
        finally:
            now_s = self.now()
            self.metrics.in_flight.dec()
            self.metrics.count(record, outcome, now_s)
            if self._observer is not None:
                self._observer.end(record, outcome, _shown(error_text), now_s)
            if _LOG.isEnabledFor(logging.INFO):
                fields, line = fitting(_fields(record, outcome, error_text, now_s))
                message = f"request {outcome}"
                _LOG.info("%s", line, extra=with_fields(message, event="request", **fields))


def _outcome(status: int) -> str:
    if status in (429, 503):
        return "shed"
    return "rejected" if status < 500 else "failed"


def _fields(record: RequestRecord, outcome: str, error_text: str, now_s: float) -> dict[str, Any]:
    trace, usage = record.trace, record.usage
    # An answer that does not stream has no first token.
    first_s = trace.first_token_s if record.stream else None
    fields: dict[str, Any] = {
        "id": record.id,
        "trace_id": trace.context.trace_id,
        "path": record.path,
        "outcome": outcome,
        "route": record.route,
        "reason": trace.reason,
        "home": trace.home,
        "cluster": trace.cluster,
        "prefill": trace.prefill,
        "decode": trace.decode,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        "output_tokens": usage.completion_tokens if usage is not None else None,
        "form": trace.form,
        "bytes": trace.nbytes,
        "attempts": trace.attempts,
        "ttft_s": None if first_s is None else round(first_s - trace.arrived_s, 6),
        "total_s": round(now_s - trace.arrived_s, 6),
    }
    if record.prompts:
        fields["prompts"] = [_prompt_fields(prompt) for prompt in record.prompts]
    if record.tenant:
        fields["tenant"] = record.tenant
    if error_text:
        fields["error"] = _shown(error_text)
    if trace.failures:
        fields["failures"] = [_shown(failure) for failure in trace.failures[:_MOST_FAILURES]]
    return fields


def _prompt_fields(prompt: PromptRecord) -> dict[str, Any]:
    """One prompt of a list. A list has at most `MAX_PROMPTS`."""
    trace, usage = prompt.trace, prompt.usage
    return {
        "route": route_of(trace),
        "reason": trace.reason,
        "home": trace.home,
        "cluster": trace.cluster,
        "prefill": trace.prefill,
        "decode": trace.decode,
        "prompt_tokens": prompt.tokens,
        "cached_tokens": trace.cached_tokens,
        "output_tokens": usage.completion_tokens if usage is not None else None,
        "form": trace.form,
        "bytes": trace.nbytes,
        "attempts": trace.attempts,
    }


def _shown(text: str) -> str:
    return text if len(text) <= _ERROR_CHARS else f"{text[:_ERROR_CHARS]}..."
