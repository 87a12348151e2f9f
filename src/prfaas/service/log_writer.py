"""Writes the lines of a log from a thread of its own.

A write waits while the reader of a pipe is stopped, and fails on a full disk. A service must go on
meanwhile: lines wait in a bounded queue, and those beyond its bounds are dropped and counted. When
lines can be written again, one of them says how many are missing.

A copy of the process (`os.fork`) has no threads but one. Its writers begin anew there: with a
thread of their own when the first line comes, and without the lines of the other process, which
writes them itself.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable

MOST_LINES = 10_000
MOST_BYTES = 4 << 20
RETRY_S = 1.0  # between two attempts to say how many lines are missing, while there are no others


class LogWriter:
    """Lines of any thread. Each is one write, so that the lines of processes that share a pipe do
    not mix. The last lines need `flush` before the process ends."""

    def __init__(
        self,
        descriptor: int,
        describe_loss: Callable[[int], bytes],
        *,
        most_lines: int = MOST_LINES,
        most_bytes: int = MOST_BYTES,
        retry_s: float = RETRY_S,
    ) -> None:
        """`describe_loss`: the line that says how many others are missing."""
        self._descriptor = descriptor
        self._describe_loss = describe_loss
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._retry_s = retry_s
        self._begin()
        self._start()
        _WRITERS.add(self)

    def _begin(self) -> None:
        """Without lines. The condition is new as well: at a fork, another thread may hold it."""
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._held_bytes = 0
        self._dropped = 0  # ever
        self._told = 0  # of them, those that a line has told of
        self._writing = False
        self._cut = False  # the latest line was not written to its end
        self._started = False

    def _start(self) -> None:
        threading.Thread(target=self._work, name="prfaas-log", daemon=True).start()
        self._started = True

    @property
    def dropped(self) -> int:
        """How many lines were not written, nor will be."""
        return self._dropped

    def write(self, line: bytes) -> None:
        """Returns at once. `line` ends with a line break."""
        with self._changed:
            full = len(self._lines) >= self._most_lines
            if full or self._held_bytes + len(line) > self._most_bytes:
                self._dropped += 1
                return
            if not self._started:  # a copy of the process, of which most log nothing
                try:
                    self._start()
                except RuntimeError:  # no further thread: the copy is at a limit, or ends
                    self._dropped += 1
                    return
            self._lines.append(line)
            self._held_bytes += len(line)
            self._changed.notify_all()

    def flush(self, within_s: float) -> bool:
        """Waits until all lines are written or dropped, for `within_s` at most. Whether they
        are."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._lines or self._writing), within_s)

    def _work(self) -> None:
        while True:
            line = self._take()
            written = line is None or self._write(line)
            with self._changed:
                self._dropped += not written
                # After the lines that were queued before others were dropped.
                missing = 0 if self._lines else self._dropped - self._told
            if written and missing and self._write(self._describe_loss(missing)):
                self._told += missing
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _take(self) -> bytes | None:
        """The next line; None: there is none, and the loss is to be told."""
        with self._changed:
            untold = self._dropped > self._told
            self._changed.wait_for(lambda: bool(self._lines), self._retry_s if untold else None)
            self._writing = True
            if not self._lines:
                return None
            line = self._lines.popleft()
            self._held_bytes -= len(line)
            return line

    def _write(self, line: bytes) -> bool:
        """Whether all of it is written. Waits while a pipe is full."""
        rest = memoryview(b"\n" + line if self._cut else line)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # another process has made the pipe not wait
                    ready = select.poll()
                    ready.register(self._descriptor, select.POLLOUT)
                    ready.poll()
                else:
                    self._cut = bool(rest)
        except OSError:
            return False
        return True


_WRITERS: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _begin_copies() -> None:
    for writer in list(_WRITERS):
        writer._begin()


os.register_at_fork(after_in_child=_begin_copies)
