"""Writes long request bodies in pieces, as fast as the peer takes them.

A body may have 60 MB, in several buffers. They are neither joined nor handed to the transport at
once: with TLS, every byte costs time on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

Buffer: TypeAlias = bytes | memoryview
RequestBody: TypeAlias = bytes | tuple[Buffer, ...]
_PIECE_BYTES = 1 << 18  # and not more than this in one iteration of the event loop


def body_bytes(body: RequestBody) -> int:
    return len(body) if isinstance(body, bytes) else sum(map(len, body))


class PacedWriter(asyncio.Protocol):
    """The writing half of a connection, whose `connection_made` sets `_transport`."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[memoryview] = deque()
        self._full = False  # the transport wants no more bytes now

    def _write_paced(self, parts: Iterable[Buffer]) -> None:
        """The parts must not change until they have been sent."""
        for part in parts:
            view = memoryview(part)
            self._unsent.extend(
                view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES)
            )
        self._write_pieces()

    def _write_pieces(self) -> None:
        written = 0
        while self._unsent and not self._full:
            if written >= _PIECE_BYTES:
                self._loop.call_soon(self._write_pieces)
                return
            written += len(self._unsent[0])
            self._transport.write(self._unsent.popleft())

    # Callbacks of the transport -------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._write_pieces()
