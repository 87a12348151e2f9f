"""Runs one job of an engine and waits for it, and a sink for state that nobody needs."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prfaas.engine.api import Engine, EngineJob, Event, Finished, JobFailed, Prefilled, Token
from prfaas.errors import EngineError
from prfaas.kvspec import KVSpec, Segment, segment_bytes
from prfaas.types import NotNow

PATIENCE_S = 300.0  # between two events


@dataclass(frozen=True, slots=True)
class JobOutcome:
    tokens: tuple[int, ...]
    prefilled: Prefilled | None  # None: the job was cancelled before
    finished: Finished
    logits: npt.NDArray[np.float32] | None  # [tokens, vocab], when the job wanted them


class RunningJob:
    """A submitted job. Call `result` once."""

    def __init__(self, engine: Engine, job: EngineJob) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        self._job = job
        refused = engine.submit(job, self._events.put)
        if isinstance(refused, NotNow):
            raise EngineError(f"the engine refused the job: {refused.reason}")

    def next_event(self, timeout_s: float = PATIENCE_S) -> Event:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineError(f"job {self._job.id}: no event within {timeout_s:g} s") from None

    def result(self, timeout_s: float = PATIENCE_S) -> JobOutcome:
        """Waits for the end of the job. Raises the error that the job failed with."""
        tokens: list[Token] = []
        prefilled: Prefilled | None = None
        while True:
            match self.next_event(timeout_s):
                case Token() as token:
                    tokens.append(token)
                case Prefilled() as prefilled:
                    pass
                case JobFailed(error):
                    raise error
                case Finished() as finished:
                    rows = [token.logits for token in tokens if token.logits is not None]
                    logits = np.stack(rows) if rows else None
                    ids = tuple(token.id for token in tokens)
                    return JobOutcome(ids, prefilled, finished, logits)


def run(engine: Engine, job: EngineJob, timeout_s: float = PATIENCE_S) -> JobOutcome:
    return RunningJob(engine, job).result(timeout_s)


class ScratchSink:
    """One block of memory that every segment overwrites: for measurements that need no result."""

    def __init__(self, spec: KVSpec, nbytes: int) -> None:
        self._spec = spec
        self._memory = memoryview(bytearray(nbytes))
        self._at = 0
        self.nbytes = 0  # ready so far

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        size = segment_bytes(self._spec, segment)
        assert size <= self._memory.nbytes, f"{segment.name} is larger than the scratch memory"
        if self._at + size > self._memory.nbytes:
            self._at = 0
        view = self._memory[self._at : self._at + size]
        self._at += size
        return (view,)

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        self.nbytes += segment_bytes(self._spec, segment)
