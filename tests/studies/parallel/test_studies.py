"""The project's own studies: identical results from one, two and three workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.studies.parallel import run_all as module
from tests.cli.runner import run

ROOT = Path(__file__).parents[3]
CASE_STUDY = ROOT / "configs" / "case_study.toml"
Command = Callable[..., Any]


@pytest.fixture
def prfaas(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The JSON of a command, whose cases run in processes even though they are short."""
    monkeypatch.setattr(module, "WORTH_A_PROCESS_S", 0.0)

    def called(*arguments: object) -> Any:
        done = run(capsys, monkeypatch, *arguments, "--json")
        assert done.code == 0, done.err
        found = done.json
        found.pop("wall_s", None)
        return found

    return called


def same_for_all(study: Callable[[int], Any]) -> Any:
    one, two, three = (json.dumps(study(count)) for count in (1, 2, 3))
    assert one == two == three
    return json.loads(one)


def test_a_sweep(prfaas: Command) -> None:
    sweep = "links.0.gbps=5,8,10,20,50"
    found = same_for_all(
        lambda count: prfaas("plan", CASE_STUDY, "--sweep", sweep, "--workers", count)
    )
    assert [point["value"] for point in found["sweep"]] == [5, 8, 10, 20, 50]


@pytest.mark.slow
def test_a_simulation_of_policies_and_baselines(prfaas: Command) -> None:
    compared = ("--policy", "paper", "adaptive", "--baseline", "naive", "homogeneous")
    found = same_for_all(
        lambda count: prfaas(
            *("simulate", CASE_STUDY, "--requests", 400, *compared, "--workers", count)
        )
    )
    assert list(found["runs"]) == ["paper", "adaptive", "naive", "homogeneous"]
