"""A worker's side of each form: the orders of a step go to the form that they name.

The order of the forms does not matter. Requests that load nothing concern no form; the first one
answers for them. Orders to end a request do not name its form: every form confirms the end, after
its own copies.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from prfaas.clock import Clock, MonotonicClock
from prfaas.integrations.vllm.caches.layer_copies import LayerCopies
from prfaas.integrations.vllm.idle_steps import IdlePace
from prfaas.integrations.vllm.steps import StepOrders
from prfaas.integrations.vllm.worker_side import WorkerResults, WorkerSide
from prfaas.types import Form


class WorkerForms:
    def __init__(
        self, sides: Mapping[Form, WorkerSide], news: threading.Event, clock: Clock | None = None
    ) -> None:
        """The sides set `news` when they have something to report."""
        self._sides = sides
        self._first = next(iter(sides))
        self._news = news
        self._clock = clock or MonotonicClock()
        self._pace = IdlePace()
        self._computes = True  # the current step

    def set_copies(self, form: Form, copies: LayerCopies) -> None:
        self._sides[form].set_copies(copies)

    def begin_step(self, orders: StepOrders) -> None:
        self._computes = orders.computes
        for form, side in self._sides.items():
            side.begin_step(self._of(form, orders))

    def start_loads(self, orders: StepOrders) -> None:
        for form, side in self._sides.items():
            side.start_loads(self._of(form, orders))

    def save_layer(self, layer: str) -> None:
        for side in self._sides.values():
            side.save_layer(layer)

    def end_step(self) -> None:
        for side in self._sides.values():
            side.end_step()

    def take_results(self, finished: set[str]) -> WorkerResults:
        """A step that computes nothing waits a while for results, see `idle_steps`."""
        self._news.clear()
        results = self._take_results(finished)
        idle = not self._computes and not any(results)
        pause_s = self._pace.pause_s(idle, self._clock.now())
        if idle and self._news.wait(pause_s):
            results = self._take_results(finished)
        return results

    def take_counts(self) -> dict[str, float]:
        counts: Counter[str] = Counter()
        for side in self._sides.values():
            counts.update(side.take_counts())
        return dict(counts)

    def close(self) -> None:
        for side in self._sides.values():
            side.close()

    def _take_results(self, finished: set[str]) -> WorkerResults:
        for side in self._sides.values():  # before one of them gives results away
            side.settle()
        results = [side.take_results(finished) for side in self._sides.values()]
        return WorkerResults(*(set[str]().union(*sets) for sets in zip(*results, strict=True)))

    def _of(self, form: Form, orders: StepOrders) -> StepOrders:
        found = orders.in_form(form)
        found.ended = orders.ended
        if form == self._first:
            found.failed = orders.failed
        return found
