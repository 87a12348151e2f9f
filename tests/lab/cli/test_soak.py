"""What `python -m prfaas_lab soak` refuses before it starts a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.runner import Result

Run = Callable[..., Result]
CONFIGS = Path(__file__).parents[3] / "configs"


def test_a_fault_that_the_deployment_cannot_have(lab: Run, tmp_path: Path) -> None:
    for fault, file in (("planner-killed", "case_study"), ("gateway-killed", "two_by_two")):
        logs = tmp_path / file
        given = ("--fault", fault, "--deployment", CONFIGS / f"{file}.toml", "--logs", logs)
        result = lab("soak", *given)
        assert result.code == 2 and "--fault" in result.err and fault in result.err
        assert "wan-cut" in result.err, "the names that are possible"
        assert not list(logs.glob("*.log"))
