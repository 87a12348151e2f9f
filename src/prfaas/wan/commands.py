"""Commands for the relay's loop from other threads: the loop runs them between two rounds."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable


class LoopCommands:
    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._pending: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        selector.register(self._wake_out, selectors.EVENT_READ, self._run_pending)

    def run(self, action: Callable[[], None], timeout_s: float) -> bool:
        """Returns when the loop has run the action, or False after the timeout."""
        done = threading.Event()
        self._pending.append((action, done))
        self.wake_loop()
        return done.wait(timeout_s)

    def wake_loop(self) -> None:
        try:
            self._wake_in.send(b"!")
        except OSError:
            pass  # full: the loop wakes anyway; closed: the loop has ended

    def close(self) -> None:
        self._wake_in.close()
        self._wake_out.close()

    def _run_pending(self) -> None:
        self._wake_out.recv(4096)
        while self._pending:
            action, done = self._pending.popleft()
            action()
            done.set()
