"""Driving an engine in tests: jobs whose events are kept, sinks and sources that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from prfaas.engine.api import Engine, EngineJob, Event, Finished, JobFailed, Prefilled, Token
from prfaas.engine.memory import MemorySegments
from prfaas.kvspec import KVSpec, Segment
from tests.waiting import PATIENCE_S


class Watched:
    """One job and what came of it. `on_event` runs on the engine's thread, after the event is
    kept."""

    def __init__(
        self, engine: Engine, job: EngineJob, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self.events: list[Event] = []
        self.threads: set[int] = set()
        self._on_event = on_event
        self._first = threading.Event()
        self._ended = threading.Event()
        self.refused = engine.submit(job, self._emit)

    def _emit(self, event: Event) -> None:
        self.threads.add(threading.get_ident())
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)
        if isinstance(event, Token):
            self._first.set()
        if isinstance(event, Finished | JobFailed):
            self._ended.set()

    def until_token(self) -> None:
        assert self._first.wait(PATIENCE_S), "no token came"

    def result(self) -> list[Event]:
        assert self._ended.wait(PATIENCE_S), f"never ended: {self.events}"
        return list(self.events)

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.result() if isinstance(event, Token)]

    @property
    def prefilled(self) -> Prefilled:
        (event,) = (event for event in self.result() if isinstance(event, Prefilled))
        return event

    @property
    def error(self) -> Exception:
        last = self.result()[-1]
        assert isinstance(last, JobFailed), last
        return last.error


class GatedSegments(MemorySegments):
    """Holds the engine inside its first `buffers` until opened: work under way, for as long as a
    test needs it."""

    def __init__(self, spec: KVSpec) -> None:
        super().__init__(spec)
        self.reached = threading.Event()
        self._open = threading.Event()

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        self.reached.set()
        assert self._open.wait(PATIENCE_S), "the test did not open the gate"
        return super().buffers(segment)

    def open(self) -> None:
        self._open.set()


class BrokenSink(MemorySegments):
    """Fails on the segments whose bytes are asked for, or declared ready, after `good` of them."""

    def __init__(self, spec: KVSpec, *, good: int, at: str) -> None:
        super().__init__(spec)
        self._good = good
        self._at = at

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        self._fail("buffers")
        return super().buffers(segment)

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        self._fail("ready")
        super().ready(segment, heads)

    def _fail(self, at: str) -> None:
        if at == self._at:
            self._good -= 1
            if self._good < 0:
                raise OSError("the arena is gone")
