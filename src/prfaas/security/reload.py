"""Credentials that a running process reads again: on SIGHUP, and where its files have changed.

An orchestrator that replaces the files of a Secret sends no signal, so a process can watch them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from prfaas.errors import InputError

log = logging.getLogger(__name__)


class Reloadable(Protocol):
    def files(self) -> Sequence[Path]:
        """The files that `reload` reads."""

    def reload(self) -> None:
        """Reads its files again. Raises InputError, and changes nothing, when one is wrong."""


_deferred = False


def defer_hangup() -> None:
    """A SIGHUP before `reloading` does not end the process; the credentials are then read again
    when the process has started."""

    def remember(*_: object) -> None:
        global _deferred
        _deferred = True

    signal.signal(signal.SIGHUP, remember)


@asynccontextmanager
async def reloading(parts: Sequence[Reloadable | None], poll_s: float = 0.0) -> AsyncIterator[None]:
    """From now on SIGHUP reloads every part, and so does a change of a file that is seen every
    `poll_s`; 0: no file is watched. The process goes on with the old credentials of a part whose
    files are wrong."""
    present = [part for part in parts if part is not None]
    watch = FileWatch(present)

    def reload() -> None:
        if reload_all(present):
            log.info("keys and certificates have been read again")

    async def poll() -> None:
        while True:
            await asyncio.sleep(poll_s)
            if watch.has_changed():
                reload()

    global _deferred
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    if _deferred:
        _deferred = False
        reload()
    task = asyncio.create_task(poll()) if poll_s > 0 else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


def reload_all(parts: Sequence[Reloadable]) -> bool:
    """Whether all have been read."""
    failed = 0
    for part in parts:
        try:
            part.reload()
        except InputError as error:
            failed += 1
            log.error("the old credentials stay in use: %s", error)
    return not failed


class FileWatch:
    """The contents of the files at the latest look, as digests. Files of a Secret keep their times
    and their size when they are replaced by others, so contents are compared."""

    def __init__(self, parts: Sequence[Reloadable]) -> None:
        self._parts = parts
        # Nothing yet: a file may have been replaced since the process has read it.
        self._seen: dict[Path, bytes | None] = {}

    def has_changed(self) -> bool:
        """Whether a file differs from the latest look. A wrong file is not reported twice."""
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def _look(self) -> dict[Path, bytes | None]:
        paths = {path for part in self._parts for path in part.files()}
        return {path: _digest(path) for path in paths}


def _digest(path: Path) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None  # a file that is being replaced
