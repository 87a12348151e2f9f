"""The messages in process on all cores: each core has a process with cases of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

from tests.kvd.fuzz.in_process import Outcome, fuzz_in_process

CASES = 100_000  # of one core: each has other cases


def fuzz_on_all_cores(messages: int, seed: int, show: Callable[[float], None]) -> Outcome:
    cores = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    counts = context.Array("Q", cores)
    total = Outcome()
    with ProcessPoolExecutor(cores, context, _share, (counts,)) as pool:
        parts = [pool.submit(_fuzz, -(-messages // cores), seed, core) for core in range(cores)]
        waiting: set[Future[Outcome]] = set(parts)
        while waiting:
            ended, waiting = wait(waiting, timeout=0.5)
            show(sum(counts[:]))
            for part in ended:
                outcome = part.result()  # raises FuzzFailure
                total.messages += outcome.messages
                total.valid += outcome.valid
                total.cases += outcome.cases
                total.answers += outcome.answers
    return total


_counts: Any = None  # in a process of the pool: the messages of each core


def _share(counts: Any) -> None:
    global _counts
    _counts = counts


def _fuzz(messages: int, seed: int, core: int) -> Outcome:
    def show(done: float) -> None:
        _counts[core] = int(done)

    return fuzz_in_process(messages, seed, first_case=core * CASES, show=show)
