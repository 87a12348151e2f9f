"""`prfaas gateway`, which also counts the CPU time that its console takes.

\b
    python bench/_console_gateway.py TOTALS gateway FILE --console

Writes the seconds so far into the file TOTALS, as JSON, several times a second: `scenes` (making
scenes, comparing and encoding them), `streams` (the handlers of open streams, with what the kernel
takes for their sockets) and `explanations` (of routes, which are recorded while a console is open).
The difference of the process's CPU times with and without consoles says the same, but the gateway's
other work varies by more than the consoles take.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import coroutine
from typing import Any

from prfaas.cli.main import main
from prfaas.gateway.console.feed import Feed
from prfaas.gateway.console.paths import ConsolePaths
from prfaas.gateway.homes.decisions import Decisions

EVERY_S = 0.1
SPENT_S: Counter[str] = Counter()


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        began_s = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            SPENT_S[name] += time.thread_time() - began_s  # type: ignore[assignment]

    return call


def timed_steps(name: str, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Counts the steps of a coroutine, and not the time in which it waits."""

    @coroutine
    def drive(steps: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            began_s = time.thread_time()
            try:
                waited_for = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                SPENT_S[name] += time.thread_time() - began_s  # type: ignore[assignment]
            try:
                value, error = (yield waited_for), None
            except BaseException as thrown:
                value, error = None, thrown

    async def call(*arguments: Any) -> Any:
        return await drive(function(*arguments))

    return call


def write_totals(file: Path) -> None:
    unfinished = file.with_suffix(".unfinished")
    while True:
        unfinished.write_text(json.dumps(dict(SPENT_S)))
        os.replace(unfinished, file)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    totals = Path(sys.argv.pop(1))
    Feed.step = timed("scenes", Feed.step)  # type: ignore[method-assign]
    ConsolePaths._stream = timed_steps("streams", ConsolePaths._stream)  # type: ignore[method-assign]
    Decisions.explain_choice = timed(  # type: ignore[method-assign]
        "explanations", Decisions.explain_choice
    )
    threading.Thread(target=write_totals, args=(totals,), daemon=True).start()
    main()
