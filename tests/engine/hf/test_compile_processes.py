"""Functions are called in a copy of the process first, whatever the copy does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.engine.hf import tuning
from prfaas.engine.hf.compile_processes import CopyingExecutor

FAR_S = 60.0


def compile_into(folder: Path) -> Callable[[], int]:
    """As a compiler with a cache on disk: whoever finds the result does not compute it."""

    def work() -> int:
        kept = folder / "kernel"
        if not kept.exists():
            kept.write_text(str(os.getpid()))
        return int(kept.read_text())

    return work


def test_this_process_finds_what_its_copy_has_kept(tmp_path: Path) -> None:
    with CopyingExecutor(4) as executor:
        compiled_by = executor.submit(compile_into(tmp_path)).result(FAR_S)
    assert compiled_by != os.getpid()
    with pytest.raises(ChildProcessError):
        os.waitpid(compiled_by, os.WNOHANG)  # the copy has ended, and was waited for


def test_an_error_is_that_of_this_process() -> None:
    def work() -> int:
        raise ValueError("a kernel needs too much shared memory")

    with CopyingExecutor(1) as executor, pytest.raises(ValueError, match="shared memory"):
        executor.submit(work).result(FAR_S)


def test_a_copy_that_dies_changes_nothing(tmp_path: Path) -> None:
    own, work = os.getpid(), compile_into(tmp_path)

    def die_in_the_copy() -> int:
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)
        return work()

    with CopyingExecutor(1) as executor:
        assert executor.submit(die_in_the_copy).result(FAR_S) == own


def test_a_copy_that_does_not_end_is_killed(tmp_path: Path) -> None:
    own, work = os.getpid(), compile_into(tmp_path)

    def wait_in_the_copy() -> int:
        if os.getpid() != own:
            signal.pause()
        return work()

    with CopyingExecutor(1, timeout_s=0.05) as executor:
        assert executor.submit(wait_in_the_copy).result(FAR_S) == own


def test_without_room_for_processes_this_one_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(os, "fork", refuse)
    with CopyingExecutor(1) as executor:
        assert executor.submit(compile_into(tmp_path)).result(FAR_S) == os.getpid()


def test_processes_are_used_during_a_start_only() -> None:
    threads = tuning._executor
    with tuning.compiling_in_processes():
        assert tuning._executor is CopyingExecutor
    assert tuning._executor is threads
