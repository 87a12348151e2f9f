"""The tiny model that several commands may want at once on a new machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prfaas.errors import InputError
from prfaas.launch import preparation
from prfaas.launch.preparation import LaunchOptions, tiny_deployment
from tests.waiting import PATIENCE_S

URL = "http://engine"


class Made:
    """Stands for `prfaas model make`, the engine and `prfaas profile`, and counts the commands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[str] = []
        self.measuring = threading.Event()
        self.go_on = threading.Event()
        monkeypatch.setattr(preparation, "_prfaas", self._run)
        monkeypatch.setattr(preparation, "single_engine", self._engine)

    @asynccontextmanager
    async def _engine(self, *_: object) -> AsyncIterator[str]:
        yield URL

    def _run(self, *arguments: str) -> None:
        self.commands.append(arguments[0])
        if arguments[0] == "model":
            folder = Path(arguments[2])
            folder.mkdir()
            (folder / "config.json").write_text("{}")
        else:
            assert arguments[1:3] == ("--url", URL)
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
                asyncio.run(tiny_deployment(tmp_path / "cache", LaunchOptions("hf"), say))[1]
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
    asyncio.run(tiny_deployment(tmp_path / "cache", LaunchOptions("hf"), say))  # nothing again
    assert made.commands == ["model", "profile"]


async def test_a_lock_that_is_never_given_back_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Made(monkeypatch)
    monkeypatch.setattr(preparation, "MAKE_S", 0.0)
    lock = tmp_path / "tiny-kimi-linear.lock"
    async with preparation._exclusive(lock, lambda what: None):
        with pytest.raises(InputError, match="another process has held the lock"):
            await tiny_deployment(tmp_path, LaunchOptions("hf"), lambda what: None)


async def test_a_killed_holder_gives_the_lock_back(tmp_path: Path) -> None:
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
    async with preparation._exclusive(lock, lambda what: None):
        pass


def _hold(lock: Path, taken: object) -> None:
    async def hold() -> None:
        async with preparation._exclusive(lock, lambda what: None):
            taken.set()  # type: ignore[attr-defined]
            await asyncio.sleep(PATIENCE_S)

    asyncio.run(hold())
