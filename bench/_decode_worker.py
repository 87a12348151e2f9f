"""Times greedy decode steps of an embedded engine, one measurement per line of standard input.

\b
    PYTHONPATH=CHECKOUT/src python bench/_decode_worker.py MODEL LARGEST_BATCH

Prints one line when the engine is loaded. A line with a batch size on standard input is answered
with one line of JSON: the median step in milliseconds, of the wall clock and of the engine thread's
processor time. Only uses names of the engine that older checkouts have as well.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from prfaas.engine.api import Engine, EngineJob, Event, Finished, JobFailed, Sampling, Token
from prfaas.engine.hf import HFEngine, load_model

PROMPT_TOKENS = 128
STEPS = 24  # while all sequences run
WAIT_S = 300.0  # for one sequence; only a hang takes so long


class TimedSequence:
    """One sequence and the times of its tokens, taken on the engine's thread."""

    def __init__(self, engine: Engine, job: EngineJob) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.error: Exception | None = None
        self._ended = threading.Event()
        assert engine.submit(job, self._emit) is None, "the engine refused a sequence"

    def _emit(self, event: Event) -> None:
        if isinstance(event, Token):
            self.wall_s.append(time.perf_counter())
            self.cpu_s.append(time.thread_time())
        elif isinstance(event, JobFailed):
            self.error = event.error
            self._ended.set()
        elif isinstance(event, Finished):
            self._ended.set()

    def wait(self) -> None:
        assert self._ended.wait(WAIT_S), "a sequence did not end"
        if self.error is not None:
            raise self.error


def median_step_ms(times_s: Sequence[Sequence[float]]) -> float:
    """Of the steps while all sequences run: from the first token of the sequence that started last
    until the end of the one that ended first."""
    last = max(times_s, key=lambda times: times[0])
    until_s = min(times[-1] for times in times_s)
    together = [at_s for at_s in last if at_s <= until_s]
    return 1e3 * statistics.median(b - a for a, b in zip(together, together[1:], strict=False))


def measure(engine: Engine, batch: int) -> dict[str, float]:
    # A sequence decodes once for each sequence after it before the last one begins.
    sampling = Sampling(batch + STEPS, ignore_eos=True)
    prompts = [[(n + 7 * i) % 256 for i in range(PROMPT_TOKENS)] for n in range(batch)]
    sequences = [
        TimedSequence(engine, EngineJob(str(n), ids, sampling)) for n, ids in enumerate(prompts)
    ]
    for one in sequences:
        one.wait()
    return {
        "wall_ms": median_step_ms([one.wall_s for one in sequences]),
        "cpu_ms": median_step_ms([one.cpu_s for one in sequences]),
    }


def main(model: Path, largest_batch: int) -> None:
    engine = HFEngine(load_model(model), max_running=largest_batch)
    try:
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(measure(engine, int(line))), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
