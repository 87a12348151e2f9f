"""Loops that outlive their failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from prfaas.errors import ConnectionLost, PeerError
from prfaas.supervision import (
    KEPT_MESSAGES,
    SHOWN_CHARS,
    TRACEBACKS_PER_MINUTE,
    Failures,
    one_line,
    repeat,
)
from prfaas_lab.testing.clock import FakeClock
from tests.waiting import PATIENCE_S


class Script:
    """A step that raises the next of `outcomes`, and succeeds where it is None or there is none."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self._outcomes = list(outcomes)
        self.done = asyncio.Event()
        self.calls = 0

    async def __call__(self) -> None:
        self.calls += 1
        if not self._outcomes:
            self.done.set()
            return
        outcome = self._outcomes.pop(0)
        if outcome is not None:
            raise outcome


@asynccontextmanager
async def repeated(script: Script, failures: Failures, **options: object) -> AsyncIterator[None]:
    """Entered when the script has been played, while the loop goes on."""
    task = asyncio.create_task(repeat(script, 0.0, failures, loop="test", **options))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await script.done.wait()
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def test_a_loop_goes_on_after_every_kind_of_failure() -> None:
    failures = Failures(FakeClock())
    outcomes = [ValueError("a"), PeerError("b"), RecursionError(), MemoryError(), TimeoutError()]
    script = Script(*outcomes, AssertionError("c"), ExceptionGroup("d", [ValueError("e")]))
    async with repeated(script, failures):
        assert failures.counts == {"test": 6}, "a peer's failure is not a defect"


async def test_a_peers_failure_is_logged_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    lost = ConnectionLost("refused")
    script = Script(lost, lost, None, None, lost, ConnectionLost("reset"), None)
    async with repeated(script, Failures(FakeClock()), peer="the kvd of x does not answer"):
        lines = [record.getMessage() for record in caplog.records]
    assert lines == ["the kvd of x does not answer: refused"] * 2


async def test_a_defect_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(FakeClock())
    async with repeated(Script(*[ValueError("same")] * 5, KeyError("other")), failures):
        assert failures.counts["test"] == 6
    first, second = caplog.records
    assert "ValueError: same" in first.getMessage() and first.exc_info is not None
    assert "KeyError" in second.getMessage()


async def test_an_interval_follows_every_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without a pause between its steps has one after a failure."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr("prfaas.supervision.asyncio.sleep", recorded)
    script = Script(None, ValueError("a"), PeerError("b"), None)
    async with repeated(script, Failures(FakeClock()), retry_s=7.0):
        assert slept[:4] == [0.0, 7.0, 7.0, 0.0]


async def test_the_callback_of_a_failure_cannot_end_the_loop() -> None:
    failures, seen = Failures(FakeClock()), []

    def on_failure(error: Exception) -> None:
        seen.append(str(error))
        raise KeyError(str(error))

    async with repeated(Script(ValueError("a"), PeerError("b")), failures, on_failure=on_failure):
        assert seen == ["a", "b"] and failures.counts["test"] == 3


def test_the_rate_of_tracebacks_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    failures = Failures(clock)
    for number in range(1000):
        failures.record("test", ValueError(str(number)))
    assert len(caplog.records) == TRACEBACKS_PER_MINUTE
    clock.advance(60.0)
    failures.record("test", ValueError("later"))
    left_out = 1000 - TRACEBACKS_PER_MINUTE
    assert f"({left_out} other failures were not logged)" in caplog.records[-1].getMessage()
    assert failures.counts["test"] == 1001


def test_the_memory_of_messages_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    failures = Failures(clock)
    for number in range(2 * KEPT_MESSAGES):
        clock.advance(60.0)
        failures.record("test", ValueError(str(number)))
    assert len(caplog.records) == 2 * KEPT_MESSAGES
    clock.advance(60.0)
    failures.record("test", ValueError("0"))
    assert len(caplog.records) == 2 * KEPT_MESSAGES + 1, "the oldest is forgotten"


def test_the_parts_of_a_step_do_not_depend_on_each_other() -> None:
    failures, called = Failures(FakeClock()), []

    def fails() -> None:
        raise ValueError("broken")

    parts: list[Callable[[], object]] = [fails, lambda: called.append(1)]
    for part in parts:
        failures.contain("test", part)
    assert called == [1] and failures.counts == {"test": 1}


def test_a_peers_text_is_one_short_line() -> None:
    assert one_line("a\nb\x1b[31m\u2028c") == "a b [31m c"
    assert len(one_line("x" * 10_000)) == SHOWN_CHARS + 3
