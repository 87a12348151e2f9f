"""Drawn cases, run through the simulator: what must hold in each of them is in `sim_rules`.

`make test` draws the same few every time, `make promises` many new ones. A failure shows the
smallest case that was found, and `conftest.py` the command that draws it again.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from tests.promises.cases import Case, calm_cases, cases, describe
from tests.promises.draws import Draw, drawn
from tests.promises.sim_backlog import share_of_best
from tests.promises.sim_cases import Run, run_case
from tests.promises.sim_rules import check

# A failure is made smaller for up to five minutes.
pytestmark = pytest.mark.timeout(900)


def test_every_promise_holds(simulated: Draw) -> None:
    @drawn(simulated)
    @given(cases())
    def holds(case: Case) -> None:
        check(run_case(case))

    holds()


def test_a_case_always_does_the_same(simulated_rarely: Draw) -> None:
    @drawn(simulated_rarely)
    @given(cases())
    def repeats(case: Case) -> None:
        one, other = run_case(case), run_case(case)
        assert one.dispatched == other.dispatched
        assert _columns(one) == _columns(other)

    repeats()


def test_the_default_policy_carries_nearly_what_the_best_one_does(simulated_rarely: Draw) -> None:
    """Under a constant backlog, once speeds are learned."""

    @drawn(simulated_rarely)
    @given(calm_cases())
    def carries(case: Case) -> None:
        share = share_of_best(case)
        assert share >= 0.9, f"{share:.3f}\n{describe(case)}"

    carries()


def _columns(run: Run) -> list[bytes]:
    fields = dataclasses.fields(run.requests)
    return [np.asarray(getattr(run.requests, field.name)).tobytes() for field in fields]
