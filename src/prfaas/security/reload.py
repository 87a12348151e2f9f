"""Credentials that a running process reads again on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import Protocol

from prfaas.errors import InputError

log = logging.getLogger(__name__)


class Reloadable(Protocol):
    def reload(self) -> None:
        """Reads its files again. Raises InputError, and changes nothing, when one is wrong."""


_deferred = False


def defer_hangup() -> None:
    """A SIGHUP before `reload_on_hangup` does not end the process; the credentials are then read
    again when the process has started."""

    def remember(*_: object) -> None:
        global _deferred
        _deferred = True

    signal.signal(signal.SIGHUP, remember)


def reload_on_hangup(parts: Sequence[Reloadable | None]) -> None:
    """From now on SIGHUP reloads every part. The process goes on with the old credentials of a part
    whose files are wrong."""

    def reload() -> None:
        failed = 0
        for part in parts:
            try:
                if part is not None:
                    part.reload()
            except InputError as error:
                failed += 1
                log.error("the old credentials stay in use: %s", error)
        if not failed:
            log.info("keys and certificates have been read again")

    global _deferred
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    if _deferred:
        _deferred = False
        reload()
