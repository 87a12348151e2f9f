"""A Python file in the current folder, such as a checkpoint's, is not run by processes that prfaas
starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from prfaas.interpreter import module_command
from prfaas.launch.attached_process import attached_prefix
from prfaas.tracing.otlp.sender_process import MODULE as SENDER

DEADLINE_S = 120


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with modules that would hide those of Python and of prfaas's dependencies. Each
    leaves a file that says that it has run."""
    for name in ("click", "msgspec", "tempfile", "prfaas"):
        marker = tmp_path / f"{name}.ran"
        code = f"from pathlib import Path; Path({str(marker)!r}).touch()\nraise SystemExit(9)\n"
        (tmp_path / f"{name}.py").write_text(code)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*attached_prefix(), "--version"], id="attached"),
        pytest.param(module_command(SENDER), id="sender"),
        pytest.param(module_command("prfaas", "--version"), id="module"),
    ],
)
def test_modules_of_the_current_folder_are_not_run(planted: Path, command: list[str]) -> None:
    source = str(Path(__file__).parent.parent / "src")
    done = subprocess.run(
        command,
        cwd=planted,
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert not sorted(planted.glob("*.ran")), done.stderr.decode()
    assert done.returncode == 0, done.stderr.decode()
