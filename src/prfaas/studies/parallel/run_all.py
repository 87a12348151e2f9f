"""Runs the cases of a study: sweeps, seeds, points of a grid.

Cases are independent, and each carries its own seed: results come in the order of the cases, and
do not depend on the number of workers or on where they run. joblib starts the processes and hands
out the cases.
"""

from __future__ import annotations

import functools
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from prfaas.errors import CaseFailed, InputError
from prfaas.studies.parallel.clusters import connected
from prfaas.studies.parallel.numeric_threads import one_numeric_thread
from prfaas.studies.parallel.packed_case import (
    Outcome,
    PackedCase,
    installed_versions,
    pack,
    run_packed,
    unpack,
)
from prfaas.studies.parallel.workers import HERE, Workers

Case = TypeVar("Case")
Result = TypeVar("Result")

# A worker process takes about so long to start and to import what a case needs.
WORTH_A_PROCESS_S = 4.0


def run_all(
    function: Callable[[Case], Result],
    cases: Mapping[str, Case],
    workers: Workers = HERE,
    *,
    progress: Callable[[float], None] | None = None,
    expected_s: float = math.inf,
) -> dict[str, Result]:
    """The result of every case, by name, in the order of the cases. The first case that fails ends
    the study: an `InputError` stays one, everything else is a `CaseFailed`; both name the case.

    `progress` is called with the number of finished cases. `expected_s` is the time that all cases
    are expected to take together; a short study does not start processes."""
    found: dict[str, Result] = {}
    for name, result in as_finished(function, cases, workers, expected_s=expected_s):
        found[name] = result
        if progress is not None:
            progress(len(found))
    return {name: found[name] for name in cases}


def as_finished(
    function: Callable[[Case], Result],
    cases: Mapping[str, Case],
    workers: Workers = HERE,
    *,
    expected_s: float = math.inf,
) -> Iterator[tuple[str, Result]]:
    """Like `run_all`, but yields each result when it is there, in no particular order."""
    if workers.cluster is None:
        short = len(cases) < 2 or expected_s < WORTH_A_PROCESS_S
        if short or min(workers.local_count(), len(cases)) == 1:
            yield from _run_here(function, cases)
            return
    for outcome in _run_elsewhere(pack(function), cases, workers):
        if outcome.input_error is not None:
            raise _named(outcome.name, outcome.input_error)
        if outcome.failure:
            problem = f"the case {outcome.name!r} failed: {outcome.failure}"
            raise CaseFailed(problem, outcome.trace)
        yield outcome.name, unpack(outcome.result)


def _run_here(
    function: Callable[[Case], Result], cases: Mapping[str, Case]
) -> Iterator[tuple[str, Result]]:
    for name, case in cases.items():
        try:
            with one_numeric_thread():
                result = function(case)
        except InputError as error:
            raise _named(name, error) from None
        except Exception as error:
            problem = f"the case {name!r} failed: {type(error).__name__}: {error}"
            raise CaseFailed(problem, traceback.format_exc()) from error
        yield name, result


def _run_elsewhere(
    function: bytes, cases: Mapping[str, Any], workers: Workers
) -> Iterator[Outcome]:
    import joblib

    with ExitStack() as stack:
        backend: dict[str, Any]
        if workers.cluster is None:
            call = functools.partial(run_packed, function)
            count = workers.local_count()
            backend = {"backend": "loky", "inner_max_num_threads": 1}
            versions = None
        else:
            connection = stack.enter_context(connected(workers.cluster, function))
            call = functools.partial(_call_cluster, connection.call)
            count = workers.count or connection.cores
            backend = {"backend": "threading"}
            versions = installed_versions()
        running: list[str] = []

        def calls() -> Iterator[Any]:
            for name, case in cases.items():
                running.append(name)
                yield joblib.delayed(call)(PackedCase(name, pack(case), versions))

        # No case is handed out before a worker is free, so that an error can name what was running.
        with joblib.parallel_config(**backend):
            parallel = joblib.Parallel(
                n_jobs=min(count, len(cases)),
                batch_size=1,
                pre_dispatch="n_jobs",
                return_as="generator_unordered",
            )
            outcomes = parallel(calls())
        stack.callback(_end, outcomes)
        while True:
            try:
                outcome = next(outcomes)
            except StopIteration:
                return
            except Exception as error:
                raise _worker_lost(running, error) from error
            running.remove(outcome.name)
            yield outcome


def _call_cluster(call: Callable[[PackedCase], Outcome], packed: PackedCase) -> Outcome:
    """Runs in a thread that waits for the case."""
    try:
        return call(packed)
    except Exception as error:
        return Outcome(packed.name, failure=_first_line(error))


def _end(outcomes: Any) -> None:
    """Ends the workers. joblib warns about cases that are then given up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        outcomes.close()


def _worker_lost(running: Sequence[str], error: Exception) -> CaseFailed:
    names = ", ".join(map(repr, running))
    which = f"the case {names}" if len(running) == 1 else f"one of the cases {names}"
    return CaseFailed(f"a worker process died while it ran {which}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _named(name: str, error: InputError) -> InputError:
    return InputError(f"the case {name!r}: {error}")
