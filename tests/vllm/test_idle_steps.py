"""An engine whose requests only wait makes few steps: its processes spin between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from prfaas.integrations.vllm.idle_steps import MOST_PAUSE_S
from prfaas.integrations.vllm.steps import StepOrders
from prfaas.integrations.vllm.worker_forms import WorkerForms
from prfaas.integrations.vllm.worker_side import WorkerResults
from prfaas_lab.testing.clock import FakeClock

STEP_S = 0.001  # of the engine, without a pause


class Side:
    """A worker's side of one form, with results as a test makes them."""

    def __init__(self, news: threading.Event) -> None:
        self._news = news
        self._loaded: set[str] = set()

    def begin_step(self, orders: StepOrders) -> None: ...

    def settle(self) -> None: ...

    def take_results(self, finished: set[str]) -> WorkerResults:
        loaded, self._loaded = self._loaded, set()
        return WorkerResults(set(), loaded, set())

    def end_load(self, name: str) -> None:
        self._loaded.add(name)
        self._news.set()


class Waits(threading.Event):
    """Advances the clock instead of waiting; `during` happens in the next wait that takes time."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock
        self.during: Callable[[], None] | None = None

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if timeout and self.during is not None:
            self.during()
            self.during = None
        elif not self.is_set():
            self._clock.advance(timeout)
        return self.is_set()


class Worker:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.waits = Waits(self.clock)
        self.side = Side(self.waits)
        sides: Any = {"native": self.side}
        self._forms = WorkerForms(sides, self.waits, self.clock)

    def step(self, *, computes: bool = False) -> set[str]:
        """The requests that are reported as loaded."""
        self.clock.advance(STEP_S)
        self._forms.begin_step(StepOrders(computes=computes))
        return self._forms.take_results(set()).loaded

    def idle_steps(self, seconds: float) -> int:
        end_s, steps = self.clock.now() + seconds, 0
        while self.clock.now() < end_s:
            assert not self.step()
            steps += 1
        return steps


def test_steps_that_compute_and_report_nothing_become_rare() -> None:
    worker = Worker()
    assert worker.idle_steps(0.1) < 30
    assert worker.idle_steps(10.0) <= 10.0 / (STEP_S + MOST_PAUSE_S) + 1


def test_a_load_that_ends_in_a_pause_is_reported_in_that_step() -> None:
    worker = Worker()
    worker.idle_steps(1.0)
    worker.waits.during = lambda: worker.side.end_load("r")
    began_s = worker.clock.now()
    assert worker.step() == {"r"}
    assert worker.clock.now() == began_s + STEP_S


def test_a_result_that_came_before_is_reported_without_a_pause() -> None:
    worker = Worker()
    worker.idle_steps(1.0)
    worker.side.end_load("r")
    began_s = worker.clock.now()
    assert worker.step() == {"r"}
    assert worker.clock.now() == began_s + STEP_S


def test_steps_that_compute_are_not_held_up() -> None:
    """Neither they nor the first empty one after them: a load takes no longer than it did."""
    worker = Worker()
    worker.idle_steps(1.0)
    began_s = worker.clock.now()
    assert not worker.step(computes=True)
    assert not worker.step()
    assert worker.clock.now() == began_s + STEP_S + STEP_S


def test_a_result_during_a_computing_step_is_not_lost() -> None:
    worker = Worker()
    worker.side.end_load("one")
    assert worker.step(computes=True) == {"one"}
    worker.side.end_load("two")
    worker.waits.set()
    assert worker.step(computes=True) == {"two"}
