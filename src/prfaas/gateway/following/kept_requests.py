"""The requests that a gateway keeps for operators: the latest, the slowest and the failed ones.

It is always on, so it does little for each request: it keeps the record that the request log has
filled in anyway. Summaries and spans are made when an operator asks for them. Every list is bounded
in its number of requests and in the characters of their texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final, NamedTuple

from prfaas.clock import Clock
from prfaas.gateway.api.metrics import RequestRecord
from prfaas.gateway.request import RequestTrace
from prfaas.scheduler.explain import Explanation

LATEST: Final = 200
FAILED: Final = 100
SLOWEST: Final = 50  # of answers that stream, and as many of those that do not
# The slowest requests are those of the last one to two windows: a slow hour of last month would
# otherwise hide a slow hour of today.
WINDOW_S: Final = 1800.0
MOST_CHARS: Final = 1 << 20  # of one list
IN_PROGRESS: Final = "in progress"
_REJECTED = "rejected"  # the client's fault
_FAILED = frozenset({"failed", "broken", "shed"})
_ATTEMPT_CHARS = 300  # ids and names of nodes
_REQUEST_CHARS = 300
# Of a request without errors and with one prompt, at most about.
_USUAL_CHARS = 1_000


class KeptRequest(NamedTuple):
    """One request. Its record still changes while the request is in progress."""

    record: RequestRecord
    outcome: str
    error_text: str
    ended_s: float  # now, while it is in progress

    @property
    def explanation(self) -> Explanation | None:
        """Of its route, or of the first of its prompts that has one. None: none was recorded."""
        explained = (prompt.trace.explanation for prompt in self.record.each_prompt)
        return next((found for found in explained if found is not None), None)

    @property
    def waited_s(self) -> float:
        """Until the first token of a stream, or until the whole answer."""
        trace = self.record.trace
        first_s = trace.first_token_s if self.record.stream else None
        return (self.ended_s if first_s is None else first_s) - trace.arrived_s


class RequestHistory:
    """A `RequestObserver`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_flight: dict[int, RequestRecord] = {}  # by the record's identity: ids may repeat
        self._latest = _Newest(LATEST)
        self._failed = _Newest(FAILED)
        self._streams = _Slowest(clock.now())
        self._others = _Slowest(clock.now())

    def begin(self, record: RequestRecord) -> None:
        self._in_flight[id(record)] = record

    def end(self, record: RequestRecord, outcome: str, error_text: str, now_s: float) -> None:
        del self._in_flight[id(record)]
        kept = KeptRequest(record, outcome, error_text, now_s)
        trace = record.trace
        usual = not (error_text or trace.failures or record.prompts) and len(trace.courses) < 2
        chars = _USUAL_CHARS if usual else _count_chars(kept)
        self._latest.add(kept, chars)
        if outcome in _FAILED and record.prompt_tokens:
            # A request that was refused before it was read is left out: a client beyond its limit
            # would fill the list.
            self._failed.add(kept, chars)
        if outcome != _REJECTED:
            slow = self._streams if record.stream else self._others
            slow.add(kept, chars, now_s)

    def latest(self) -> list[KeptRequest]:
        """The newest first; those in progress before those that have ended."""
        return [*reversed(self.in_progress()), *self._latest][:LATEST]

    def failed(self) -> list[KeptRequest]:
        return list(self._failed)

    def slowest(self) -> list[KeptRequest]:
        now_s = self._clock.now()
        found = [*self._streams.kept(now_s), *self._others.kept(now_s)]
        return sorted(found, key=lambda kept: -kept.waited_s)

    def find(self, name: str) -> KeptRequest | None:
        """The newest request with this id, or with this trace id."""
        kept: list[KeptRequest] = [*reversed(self.in_progress()), *self._latest]
        kept += [*self._failed, *self.slowest()]
        for each in kept:
            if name in (each.record.id, each.record.trace.context.trace_id):
                return each
        return None

    def in_progress(self) -> list[KeptRequest]:
        """The oldest first."""
        now_s = self._clock.now()
        return [KeptRequest(record, IN_PROGRESS, "", now_s) for record in self._in_flight.values()]


class _Newest:
    """The newest requests. Iterates over them, the newest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: deque[tuple[KeptRequest, int]] = deque()
        self._chars = 0

    def add(self, kept: KeptRequest, chars: int) -> None:
        self._kept.append((kept, chars))
        self._chars += chars
        while len(self._kept) > self._most or self._chars > MOST_CHARS:
            self._chars -= self._kept.popleft()[1]

    def __iter__(self) -> Iterator[KeptRequest]:
        return (kept for kept, _ in reversed(self._kept))


class _Slow(NamedTuple):
    """Ordered by the first two fields; no two have the same number."""

    waited_s: float
    number: int
    kept: KeptRequest
    chars: int


class _Slowest:
    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._heap: list[_Slow] = []  # of this window; the fastest is the first
        self._before: list[_Slow] = []  # of the window before
        self._chars = 0
        self._number = 0

    def add(self, kept: KeptRequest, chars: int, now_s: float) -> None:
        if now_s >= self._since_s + WINDOW_S:
            self._turn(now_s)
        waited_s = kept.waited_s
        if len(self._heap) >= SLOWEST and waited_s <= self._heap[0].waited_s:
            return  # the usual case
        self._number += 1
        heappush(self._heap, _Slow(waited_s, self._number, kept, chars))
        self._chars += chars
        while len(self._heap) > SLOWEST or self._chars > MOST_CHARS:
            self._chars -= heappop(self._heap).chars

    def kept(self, now_s: float) -> list[KeptRequest]:
        self._turn(now_s)
        slowest = sorted((*self._heap, *self._before), reverse=True)
        return [slow.kept for slow in slowest[:SLOWEST]]

    def _turn(self, now_s: float) -> None:
        if now_s < self._since_s + WINDOW_S:
            return
        follows = now_s < self._since_s + 2 * WINDOW_S
        self._before = self._heap if follows else []
        self._since_s, self._heap, self._chars = now_s, [], 0


def _count_chars(kept: KeptRequest) -> int:
    record = kept.record
    chars = _REQUEST_CHARS + len(kept.error_text) + _chars_of(record.trace)
    for prompt in record.prompts:
        chars += _chars_of(prompt.trace)
    return chars


def _chars_of(trace: RequestTrace) -> int:
    chars = len(trace.reason) + sum(len(wait.reason) for wait in trace.waits)
    for course in trace.courses:
        chars += _ATTEMPT_CHARS + len(course.failure)
        chars += sum(len(wait.reason) for wait in course.waits)
    if trace.failures:
        chars += sum(map(len, trace.failures))
    return chars
