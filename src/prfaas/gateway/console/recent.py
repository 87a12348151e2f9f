"""The latest requests of a gateway as the console shows them, and what all of them add up to. Fed
by the request log.

The requests themselves are in `RequestHistory`, which is bounded. Explanations of routes cost a
little time for each request, so they are recorded only while a console is open, and for some
requests per second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.clock import Clock
from prfaas.console.scene import RequestScene, TtftParts
from prfaas.gateway.api.metrics import PromptRecord, RequestRecord, route_of
from prfaas.gateway.console.ttft import TtftSplit, split_ttft
from prfaas.gateway.following.kept_requests import (
    IN_PROGRESS,
    LATEST,
    KeptRequest,
    RequestHistory,
)
from prfaas.scheduler.explain import Explanation
from prfaas.tracing.epoch import EpochOffset

KEPT = LATEST
EXPLAINED_PER_S = 10
_MOST_FAILURES = 8
_SHOWN_CHARS = 300  # of a reason or a failure
_NO_SPLIT = TtftSplit(0.0, 0.0, 0.0, 0.0)
# Outcomes that are the fault of the deployment, and not of the client.
_FAILED = frozenset({"failed", "broken", "shed"})
_REJECTED = "rejected"  # the client's fault; it was not served, and counts nowhere


class FoundRequest(NamedTuple):
    """What is known of one request."""

    scene: RequestScene
    explanation: Explanation | None  # of its route; None: it was not recorded
    failures: Sequence[str]  # of attempts that have failed, one line each


@dataclass(slots=True)
class HomeCounts:
    """The requests of one PD cluster that have ended, since the start. See `HomeScene`."""

    local: int = 0
    remote: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stateless_tokens: int = 0


class Counts(NamedTuple):
    homes: Mapping[str, HomeCounts]
    ttft: TtftParts


class RecentRequests:
    """A `RequestObserver`, which sees requests after their `history` does."""

    def __init__(
        self, clock: Clock, history: RequestHistory, epoch: Callable[[], float] = time.time
    ) -> None:
        self.watched = False  # a console is open
        self._clock = clock
        self._history = history
        self._to_epoch = EpochOffset(clock, epoch)
        # Requests in progress, by the record's identity, that were shown and whose time to first
        # token is counted.
        self._shown: set[int] = set()
        self._new: deque[KeptRequest] = deque(maxlen=KEPT)  # that have ended
        self._homes: dict[str, HomeCounts] = {}
        self._first_tokens = 0
        self._ttft = _NO_SPLIT
        self._explained = 0  # in the second that began at `_second_s`
        self._second_s = clock.now()

    # Fed by the request log and the router --------------------------------------------------------

    def begin(self, record: RequestRecord) -> None:
        pass

    def end(self, record: RequestRecord, outcome: str, error_text: str, now_s: float) -> None:
        if id(record) in self._shown:
            self._shown.remove(id(record))
        else:
            self._count_first_tokens(record)
        self._count(record, outcome)
        self._new.append(KeptRequest(record, outcome, error_text, now_s))

    def wants_explanation(self) -> bool:
        """Whether the route of the next request is to be explained. A true answer counts."""
        if not self.watched:
            return False
        now_s = self._clock.now()
        if now_s >= self._second_s + 1.0:
            self._second_s, self._explained = now_s, 0
        if self._explained >= EXPLAINED_PER_S:
            return False
        self._explained += 1
        return True

    # Read by the feed and the paths ---------------------------------------------------------------

    def counts(self) -> Counts:
        return Counts(self._homes, TtftParts(self._first_tokens, *self._ttft))

    def take_new(self) -> list[RequestScene]:
        """The requests that have ended since the last call, and those that have their first token
        since then. A request may be there twice: in progress, and later when it has ended."""
        found = list(self._new)
        self._new.clear()
        for kept in self._history.in_progress():
            record = kept.record
            if id(record) not in self._shown and record.trace.first_token_s is not None:
                self._shown.add(id(record))
                self._count_first_tokens(record)
                found.append(kept)
        return self._scenes(found[-KEPT:])

    def kept(self) -> list[RequestScene]:
        """The latest requests, the oldest first; those in progress last."""
        found = reversed(self._history.latest())
        return self._scenes(
            [k for k in found if k.outcome != IN_PROGRESS or id(k.record) in self._shown]
        )

    def find(self, request_id: str) -> FoundRequest | None:
        """The latest request with this id."""
        kept = self._history.find(request_id)
        if kept is None:
            return None
        (scene,) = self._scenes([kept])
        failures = [_shown(failure) for failure in kept.record.trace.failures[:_MOST_FAILURES]]
        if kept.error_text:
            failures.append(_shown(kept.error_text))
        return FoundRequest(scene, kept.explanation, failures)

    # ----------------------------------------------------------------------------------------------

    def _scenes(self, kept: Sequence[KeptRequest]) -> list[RequestScene]:
        to_epoch_s = self._to_epoch.seconds()
        return [request_scene(each, to_epoch_s) for each in kept]

    def _count_first_tokens(self, record: RequestRecord) -> None:
        if not record.stream:
            return  # an answer that does not stream has no first token
        for prompt in record.each_prompt:
            split = split_ttft(prompt.trace)
            if split is not None:
                self._first_tokens += 1
                both = zip(self._ttft, split, strict=True)
                self._ttft = TtftSplit(*[total_s + s for total_s, s in both])

    def _count(self, record: RequestRecord, outcome: str) -> None:
        if outcome == _REJECTED:
            return
        for prompt in record.each_prompt:
            trace = prompt.trace
            counts = self._homes.setdefault(trace.home, HomeCounts())
            if outcome in _FAILED:
                counts.failed += 1
            elif trace.first_token_s is not None:
                if trace.offloaded:
                    counts.remote += 1
                else:
                    counts.local += 1
            if trace.first_token_s is not None:
                counts.prompt_tokens += prompt.tokens
                counts.cached_tokens += trace.cached_tokens
                counts.stateless_tokens += trace.stateless_tokens


def request_scene(kept: KeptRequest, epoch_s: float) -> RequestScene:
    """`epoch_s`: the time since the epoch at 0 of the gateway's clock. Of a list of prompts, the
    split is that of the prompt with the earliest first token."""
    record = kept.record
    trace, usage = record.trace, record.usage
    first = _first_prompt(record)
    split = split_ttft(first.trace) if record.stream else None
    waited, prefill, transfer, decode = split or _NO_SPLIT
    has_ttft = record.stream and trace.first_token_s is not None
    return RequestScene(
        id=record.id,
        at_s=round(trace.arrived_s + epoch_s, 3),
        home=trace.home,
        route=record.route,
        outcome=kept.outcome,
        reason=_shown(trace.reason or kept.error_text),
        prefill=trace.prefill,
        decode=trace.decode,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        output_tokens=0 if usage is None else usage.completion_tokens,
        nbytes=trace.nbytes if route_of(first.trace) != "none" else 0,
        attempts=trace.attempts,
        ttft_s=round(trace.first_token_s - trace.arrived_s, 4)
        if has_ttft and trace.first_token_s is not None
        else None,
        wait_s=round(waited, 4),
        prefill_s=round(prefill, 4),
        transfer_s=round(transfer, 4),
        decode_s=round(decode, 4),
        total_s=round(kept.ended_s - trace.arrived_s, 4),
    )


def _first_prompt(record: RequestRecord) -> PromptRecord:
    prompts = record.each_prompt
    started = [prompt for prompt in prompts if prompt.trace.first_token_s is not None]
    return min(started, key=lambda p: p.trace.first_token_s or 0.0) if started else prompts[0]


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
