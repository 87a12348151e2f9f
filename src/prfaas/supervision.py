"""Loops that outlive their failures: a repeated step that fails is logged, counted and tried again.

A process polls its peers and judges itself in loops that run until it ends. A failure in one of
them must not end the others, nor the process. An expected failure is a `PeerError`, which is logged
once per change of state. Any other exception is a defect of this process. It is logged with its
traceback, once per distinct message and at a bounded rate, because the step comes again in a moment
and usually fails in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

from prfaas.clock import Clock
from prfaas.errors import PeerError

log = logging.getLogger(__name__)

SHOWN_CHARS = 500  # of a message that a peer may have written
KEPT_MESSAGES = 256  # distinct messages that are remembered as logged
TRACEBACKS_PER_MINUTE = 10


class Failures:
    """Counts unexpected failures by loop, and logs them sparingly. One per process."""

    def __init__(self, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()  # by the name of the loop
        self._clock = clock
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._minute_s = clock.now()
        self._in_minute = 0
        self._left_out = 0

    def record(self, loop: str, error: Exception) -> None:
        """Counts the failure and logs it, unless it was logged before or too many were logged in
        the last minute. `loop` is one of a few fixed names, never a peer's text."""
        self.counts[loop] += 1
        key = (loop, f"{type(error).__name__}: {one_line(str(error))}")
        if key in self._logged:
            self._logged.move_to_end(key)
            return
        now = self._clock.now()
        if now >= self._minute_s + 60.0:
            self._minute_s, self._in_minute = now, 0
        if self._in_minute >= TRACEBACKS_PER_MINUTE:
            self._left_out += 1
            return
        self._in_minute += 1
        self._logged[key] = None
        while len(self._logged) > KEPT_MESSAGES:
            self._logged.popitem(last=False)
        left_out, self._left_out = self._left_out, 0
        log.error(
            "%s failed unexpectedly and goes on: %s%s",
            loop,
            key[1],
            f" ({left_out} other failures were not logged)" if left_out else "",
            exc_info=error,
        )

    def contain(self, loop: str, part: Callable[[], object]) -> None:
        """Calls one part of a step. Its failure is recorded and does not keep the caller from the
        next part."""
        try:
            part()
        except Exception as error:
            self.record(loop, error)


async def repeat(
    step: Callable[[], Awaitable[object]],
    every_s: float,
    failures: Failures,
    *,
    loop: str,
    peer: str = "",
    retry_s: float | None = None,
    on_failure: Callable[[Exception], None] | None = None,
) -> None:
    """Awaits `step`, then waits for `every_s`, until cancelled. No exception of a step ends it.

    `loop` names the loop in the metric and the log. `peer` says whose `PeerError`s these are; they
    are logged when the first one comes after a success. After a failure the next step comes after
    `retry_s`, or `every_s` when that is not given. `on_failure` is called after every failure.
    """
    after_failure_s = every_s if retry_s is None else retry_s
    answered = True
    while True:
        wait_s = every_s
        try:
            await step()
            answered = True
        except Exception as error:
            wait_s = after_failure_s
            if not isinstance(error, PeerError):
                failures.record(loop, error)
            elif answered:
                log.warning("%s: %s", peer or loop, one_line(str(error)))
                answered = False
            if on_failure is not None:
                failures.contain(loop, partial(on_failure, error))
        await asyncio.sleep(wait_s)


def one_line(text: str, most_chars: int = SHOWN_CHARS) -> str:
    """A peer's text for a log line: shortened, without line ends and control characters."""
    shown = "".join(c if c.isprintable() else " " for c in text[: most_chars + 1])
    return shown if len(shown) <= most_chars else f"{shown[:most_chars]}..."
