"""The tiny model that several commands may want at once on a new machine."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from prfaas.errors import InputError
from prfaas.launch import preparation
from prfaas.launch.preparation import LaunchOptions, tiny_deployment
from tests.waiting import PATIENCE_S


class Made:
    """Stands for `prfaas model make` and `prfaas profile`, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[str] = []
        self.measuring = threading.Event()
        self.go_on = threading.Event()
        monkeypatch.setattr(preparation, "_prfaas", self._run)

    def _run(self, *arguments: str) -> None:
        self.commands.append(arguments[0])
        if arguments[0] == "model":
            folder = Path(arguments[2])
            folder.mkdir()
            (folder / "config.json").write_text("{}")
        else:
            self.measuring.set()
            assert self.go_on.wait(PATIENCE_S), "the test forgot the profile"
            Path(arguments[arguments.index("--out") + 1]).write_text("")


def test_one_process_makes_the_model_and_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)
    said: list[str] = []
    waits = threading.Event()

    def say(what: str) -> None:
        said.append(what)
        if what.startswith("waiting"):
            waits.set()

    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                tiny_deployment(tmp_path / "cache", LaunchOptions("hf"), say)[1]
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert made.measuring.wait(PATIENCE_S) and waits.wait(PATIENCE_S)
    made.go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert made.commands == ["model", "profile"]
    assert len(found) == 3 and len(set(found)) == 1 and found[0].is_file()
    tiny_deployment(tmp_path / "cache", LaunchOptions("hf"), say)  # nothing is made again
    assert made.commands == ["model", "profile"]


def test_a_lock_that_is_never_given_back_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Made(monkeypatch)
    monkeypatch.setattr(preparation, "MAKE_S", 0.0)
    lock = tmp_path / "tiny-kimi-linear.lock"
    with preparation._exclusive(lock, lambda what: None):
        with pytest.raises(InputError, match="another process has held the lock"):
            tiny_deployment(tmp_path, LaunchOptions("hf"), lambda what: None)


def test_a_killed_holder_gives_the_lock_back(tmp_path: Path) -> None:
    lock = tmp_path / "one.lock"
    spawn = multiprocessing.get_context("spawn")
    taken = spawn.Event()
    holder = spawn.Process(target=_hold, args=(lock, taken))
    holder.start()
    try:
        assert taken.wait(PATIENCE_S)
    finally:
        holder.kill()
        holder.join(PATIENCE_S)
    with preparation._exclusive(lock, lambda what: None):
        pass


def _hold(lock: Path, taken: object) -> None:
    with preparation._exclusive(lock, lambda what: None):
        taken.set()  # type: ignore[attr-defined]
        threading.Event().wait(PATIENCE_S)
