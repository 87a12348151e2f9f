"""Reads the responses of an HTTP connection, just enough to see their status and body."""

from __future__ import annotations

import re
from collections.abc import Iterator

_HEAD = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[^\n]*\r\n(.*?)\r\n\r\n", re.DOTALL)
_LENGTH = re.compile(rb"content-length: ([0-9]+)", re.IGNORECASE)


class Responses:
    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Status and body of each response that is complete."""
        self._pending += data
        while (head := _HEAD.match(self._pending)) is not None:
            length = _LENGTH.search(head[2])
            stop = head.end() + (int(length[1]) if length else 0)
            if len(self._pending) < stop:
                return
            body, self._pending = self._pending[head.end() : stop], self._pending[stop:]
            status = int(head[1])
            if status != 100:
                yield status, body
