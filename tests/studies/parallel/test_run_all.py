"""Cases of a study: the same results from any number of workers, and errors that name the case."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from prfaas.errors import CaseFailed, InputError
from prfaas.studies.parallel import clusters
from prfaas.studies.parallel.run_all import as_finished, run_all
from prfaas.studies.parallel.workers import Workers, parse_cluster
from tests.studies.parallel.cases import (
    bad_input,
    broken,
    deadly,
    draw,
    numeric_threads,
    process,
    slow_first,
)

ROOT = Path(__file__).parents[3]
SEEDS = {f"seed {seed}": seed for seed in range(7)}
TWO = Workers(count=2)


def test_results_do_not_depend_on_the_number_of_workers() -> None:
    one, two, three = (run_all(draw, SEEDS, Workers(count=count)) for count in (1, 2, 3))
    assert one == two == three
    assert list(one.values()) == [draw(seed) for seed in range(7)]


def test_results_come_in_the_order_of_the_cases() -> None:
    assert list(run_all(slow_first, SEEDS, Workers(count=3)).items()) == list(SEEDS.items())


def test_results_come_when_they_are_there() -> None:
    found = dict(as_finished(slow_first, SEEDS, Workers(count=3)))
    assert found == SEEDS


def test_cases_run_in_other_processes() -> None:
    pids = set(run_all(process, SEEDS, TWO).values())
    assert len(pids) <= 2 and os.getpid() not in pids


@pytest.mark.parametrize(
    ("workers", "cases", "expected_s"),
    [(Workers(count=1), 7, 1e9), (TWO, 1, 1e9), (TWO, 7, 0.1)],
    ids=["one worker", "one case", "short study"],
)
def test_no_process_is_started_for_little_work(
    workers: Workers, cases: int, expected_s: float
) -> None:
    few = dict(list(SEEDS.items())[:cases])
    assert set(run_all(process, few, workers, expected_s=expected_s).values()) == {os.getpid()}


def test_there_may_be_no_cases() -> None:
    assert run_all(process, {}, TWO) == {}


@pytest.mark.parametrize("count", [1, 2])
def test_numeric_libraries_have_one_thread(count: int) -> None:
    with threadpool_limits(limits=2):
        assert 2 in numeric_threads(0)
        for threads in run_all(numeric_threads, SEEDS, Workers(count=count)).values():
            assert threads and set(threads) == {1}
        assert 2 in numeric_threads(0), "this process has its threads back"


@pytest.mark.parametrize("count", [1, 2])
def test_progress_counts_finished_cases(count: int) -> None:
    shown: list[float] = []
    run_all(draw, SEEDS, Workers(count=count), progress=shown.append)
    assert shown == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_the_input_stays_one(count: int) -> None:
    with pytest.raises(InputError) as caught:
        run_all(bad_input, SEEDS, Workers(count=count))
    assert str(caught.value) == "the case 'seed 3': seed: is 3; give another one"


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_names_its_case(count: int) -> None:
    with pytest.raises(CaseFailed, match="the case 'seed 3' failed: .*OwnError: this and that"):
        run_all(broken, SEEDS, Workers(count=count))


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_shows_where_it_was_raised(count: int) -> None:
    with pytest.raises(CaseFailed) as caught:
        run_all(broken, SEEDS, Workers(count=count))
    assert 'raise OwnError("this", "that")' in caught.value.trace
    assert caught.value.text().endswith("OwnError: this and that")


def test_a_dead_worker_ends_the_study_and_names_its_case() -> None:
    with pytest.raises(CaseFailed, match=r"a worker process died .*'seed 3'.*TerminatedWorker"):
        run_all(deadly, SEEDS, TWO)
    assert run_all(process, SEEDS, TWO), "the next study has new workers"


def test_results_that_came_before_an_error_are_handed_out() -> None:
    found = []
    with pytest.raises(CaseFailed):
        for name, _ in as_finished(broken, SEEDS, Workers(count=1)):
            found.append(name)
    assert found == ["seed 0", "seed 1", "seed 2"]


SCRIPT = """
from typing import NamedTuple
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import Workers

class Point(NamedTuple):
    x: int

FACTOR = 3

def scaled(point):
    return Point(FACTOR * point.x)

found = run_all(scaled, {str(x): Point(x) for x in range(4)}, Workers(count=2))
assert all(type(point) is Point for point in found.values())
print([point.x for point in found.values()])
"""


def test_functions_and_classes_of_a_script_travel(tmp_path: Path) -> None:
    """A benchmark is a script: no worker can import it."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("[0, 3, 6, 9]\n", "")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ray:auto", "auto"),
        ("ray:10.0.0.1:6379", "10.0.0.1:6379"),
        ("ray://head:10001", "ray://head:10001"),
    ],
)
def test_addresses_of_clusters(text: str, address: str) -> None:
    assert parse_cluster(text) == address


@pytest.mark.parametrize(
    "text", ["", "auto", "ray", "ray:", "ray://", "dask://head", "slurm://head"]
)
def test_other_addresses_are_errors(text: str) -> None:
    with pytest.raises(InputError, match="--cluster: .* of a Ray cluster; give ray:auto"):
        parse_cluster(text)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "find_spec", {"ray": None}.__getitem__)
    some = Workers(cluster=parse_cluster("ray://127.0.0.1:1"))
    with pytest.raises(InputError, match=r"pip install 'prfaas\[ray\]'"):
        run_all(draw, SEEDS, some)
