"""One request from its arrival to its line in the log: whatever becomes of it, it is told once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from prfaas.clock import Clock
from prfaas.errors import InputError, RequestError, StreamBroken
from prfaas.gateway.api.metrics import ApiMetrics, RequestRecord, route_of

_LOG = logging.getLogger("prfaas.gateway.requests")


@contextmanager
def accounting(account: RequestRecord, metrics: ApiMetrics, clock: Clock) -> Iterator[None]:
    metrics.in_flight.inc()
    outcome, said = "failed", ""  # unless something better is known
    try:
        yield
        outcome, said = account.cut_short or ("completed", "")
    except RequestError as refusal:
        outcome, said = _outcome(refusal.status), refusal.message
        raise
    except InputError as error:
        outcome, said = "rejected", str(error)
        raise
    except StreamBroken as error:
        outcome, said = "broken", str(error)
        raise
    except (asyncio.CancelledError, ConnectionError):
        # A client that leaves after the last event has its answer.
        outcome = "completed" if account.delivered else "cancelled"
        raise
    finally:
        now_s = clock.now()
        metrics.in_flight.dec()
        metrics.ended(account, outcome, now_s)
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("%s", _line(account, outcome, said, now_s))


def _outcome(status: int) -> str:
    if status in (429, 503):
        return "shed"
    return "rejected" if status < 500 else "failed"


def _line(account: RequestRecord, outcome: str, said: str, now_s: float) -> str:
    story, usage = account.story, account.usage
    first = story.first_token_s
    told = {
        "id": account.id,
        "path": account.path,
        "outcome": outcome,
        "route": route_of(story),
        "reason": story.reason,
        "cluster": story.cluster,
        "prefill": story.prefill,
        "decode": story.decode,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": story.cached_tokens,
        "output_tokens": usage.completion_tokens if usage is not None else None,
        "bytes": story.nbytes,
        "attempts": story.attempts,
        "ttft_s": None if first is None else round(first - story.arrived_s, 6),
        "total_s": round(now_s - story.arrived_s, 6),
    }
    if account.tenant:
        told["tenant"] = account.tenant
    if said:
        told["error"] = said
    if story.failures:
        told["failures"] = story.failures
    return msgspec.json.encode(told).decode()
