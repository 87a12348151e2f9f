"""Real processes: a shell is child enough."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from prfaas.launch.children import ChildDied, Children, Command
from tests.waiting import wait_until


def shell(script: str, name: str = "one") -> Command:
    return Command(name, ["-c", script], ready=r"at (\S+)")


def children(folder: Path) -> Children:
    return Children(folder, ["/bin/sh"])


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_ready_when_it_says_so_and_ended_on_leaving(tmp_path: Path) -> None:
    heard: list[str] = []

    async with children(tmp_path) as started:
        command = shell("echo hello; echo serving at here; exec sleep 1000")
        command = Command("one", command.arguments, command.ready, heard=heard.append)
        where, pid = await started.started([command]), started.named("one").process.pid
    assert where == {"one": "here"} and heard == ["hello", "serving at here"]
    assert (tmp_path / "one.log").read_text() == "hello\nserving at here\n"
    await asyncio.to_thread(wait_until, lambda: gone(pid))


async def test_one_that_ends_before_it_is_ready(tmp_path: Path) -> None:
    with pytest.raises(ChildDied, match="one ended with code 3.*\nit is broken"):
        async with children(tmp_path) as started:
            await started.started([shell("echo it is broken; exit 3")])


async def test_one_that_dies_is_told_from_one_that_was_ended(tmp_path: Path) -> None:
    async with children(tmp_path) as started:
        await started.started([shell("echo at a; exec sleep 1000", name) for name in "ab"])
        watch = asyncio.create_task(started.until_one_dies())
        await started.end([started.named("a")])
        assert not watch.done()
        started.named("b").process.kill()
        died = await watch
    assert died.name == "b" and "was killed by signal 9" in str(died)


async def test_one_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.launch.children.END_S", 0.05)

    async with children(tmp_path) as started:
        await started.started([shell("trap '' TERM; echo at x; while :; do sleep 1; done")])
        child = started.named("one")
    assert child.process.returncode == -9


async def test_orders_on_standard_input(tmp_path: Path) -> None:
    async with children(tmp_path) as started:
        child = await started.start(shell('read word; echo "at $word"; exec sleep 1000'))
        child.tell("there")
        assert await child.ready() == "there"


async def test_lines_longer_than_the_buffer(tmp_path: Path) -> None:
    async with children(tmp_path) as started:
        script = "head -c 200000 /dev/zero | tr '\\\\0' x; echo; echo at x; exec sleep 1000"
        ready = await started.started([shell(script)])
    assert ready == {"one": "x"}
    assert (tmp_path / "one.log").stat().st_size > 200_000


async def test_one_that_is_killed_is_no_news_and_starts_again_under_its_name(
    tmp_path: Path,
) -> None:
    async with Children(tmp_path, ["/bin/sh"], {"PLACE": "there"}) as started:
        command = shell("echo at $PLACE; exec sleep 1000")
        assert await started.started([command]) == {"one": "there"}
        other = await started.start(shell("exec sleep 1000", "other"))
        first = started.named("one")
        dying = asyncio.create_task(started.until_one_dies())
        await first.kill()
        assert gone(first.process.pid) and list(started) == [other]
        await started.started([command])
        second = started.named("one")
        assert second is not first and list(started) == [other, second]
        assert not dying.done()
        dying.cancel()


async def test_one_that_is_frozen_says_nothing_until_it_is_thawed(tmp_path: Path) -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]

    async with children(tmp_path) as started:
        await started.started([shell("echo at here; exec sleep 1000")])
        child = started.named("one")
        child.freeze()
        wait_until(lambda: state(child.process.pid) == "T")
        child.thaw()
        wait_until(lambda: state(child.process.pid) != "T")
