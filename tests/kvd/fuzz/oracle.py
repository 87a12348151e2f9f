"""What counts as a defect, apart from wrong answers: errors that no code handles, and leaks."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_THREADS = "prfaas"  # the names of this project's threads begin with it


class FuzzFailure(AssertionError):
    """The kvd has a defect."""


@dataclass
class Complaints(logging.Handler):
    """Collects errors of event loops, threads and destructors, and log records that say ERROR."""

    found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        logging.Handler.__init__(self, logging.ERROR)

    __hash__ = logging.Handler.__hash__

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:  # a filter has lowered the level
            return
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
        self.found.append(text)

    def add(self, what: str, error: BaseException | None) -> None:
        lines = traceback.format_exception(error) if error is not None else []
        self.found.append(f"{what}\n{''.join(lines)}")

    def of_loop(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.add(str(context.get("message")), context.get("exception"))

    def check(self) -> None:
        if self.found:
            raise FuzzFailure("\n".join(self.found[:3]))


@contextmanager
def listening() -> Iterator[Complaints]:
    """Errors of other threads and of destructors become complaints."""
    complaints = Complaints()
    root, project = logging.getLogger(), logging.getLogger("prfaas")
    # Records of less are millions of lines, and a test that keeps them keeps arenas alive.
    level = project.level
    project.setLevel(logging.ERROR)
    hooks = threading.excepthook, sys.unraisablehook
    root.addHandler(complaints)
    threading.excepthook = lambda args: complaints.add(f"thread {args.thread}", args.exc_value)
    sys.unraisablehook = lambda args: complaints.add(str(args.err_msg), args.exc_value)
    try:
        yield complaints
    finally:
        root.removeHandler(complaints)
        project.setLevel(level)
        threading.excepthook, sys.unraisablehook = hooks


@dataclass(frozen=True)
class Resources:
    """What this process holds."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        threads = [t for t in threading.enumerate() if t.name.startswith(_THREADS)]
        return cls(frozenset(threads), open_descriptors("self"))

    def check_returned(self, within_s: float) -> None:
        """Threads may take a moment to end."""
        until_s = time.monotonic() + within_s
        while True:
            now = Resources.now()
            threads = {thread.name for thread in now.threads - self.threads}
            descriptors = now.descriptors - self.descriptors
            if not threads and not descriptors:
                return
            if time.monotonic() > until_s:
                raise FuzzFailure(
                    f"after all clients have left there are more threads {sorted(threads)} "
                    f"or descriptors {sorted(descriptors)}"
                )
            time.sleep(0.01)


def open_descriptors(process: int | str) -> frozenset[tuple[str, str]]:
    """The number of each open descriptor, and what it refers to."""
    found: set[tuple[str, str]] = set()
    folder = f"/proc/{process}/fd"
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):  # the descriptor of this folder itself
            found.add((number, os.readlink(f"{folder}/{number}")))
    return frozenset(found)


def resident_bytes(process: int | str = "self") -> int:
    with open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
