"""Bytes of a payload that a worker reads while the kvd decides where they go.

The decision takes the kvd a fraction of a millisecond per frame, and longer while it serves many
connections. In that time the worker goes on with decrypting. The bytes are copied to their places
afterwards, which costs much less than a connection that stands still.
"""

from __future__ import annotations

from collections.abc import Callable

from prfaas.transport.channel import Channel

AHEAD_BYTES = 1 << 20
_STEP_BYTES = 128 << 10  # between two looks for the order


class ReadAhead:
    """Of one connection; memory is taken when it is first needed. Not thread-safe."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray())
        self._kept = self._buffer[:0]  # read and not passed on

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes

    def fill(self, channel: Channel, nbytes: int, is_decided: Callable[[], bool]) -> None:
        """Reads at most `nbytes`, until `is_decided`. Raises ConnectionLost."""
        assert not self._kept.nbytes
        if not self._buffer.nbytes:
            self._buffer = memoryview(bytearray(AHEAD_BYTES))
        most, at = min(nbytes, AHEAD_BYTES), 0
        while at < most and not is_decided():
            got = channel.receive_some([self._buffer[at : min(at + _STEP_BYTES, most)]])
            at += got
            if not got:
                break
        self._kept = self._buffer[:at]

    def pass_on(self, views: list[memoryview]) -> list[memoryview]:
        """Copies what was read to the first of these places. Returns the places that are left."""
        rest = list(views)
        while self._kept.nbytes and rest:
            size = min(self._kept.nbytes, rest[0].nbytes)
            rest[0][:size] = self._kept[:size]
            self._kept = self._kept[size:]
            rest[0] = rest[0][size:]
            if not rest[0].nbytes:
                del rest[0]
        return rest
