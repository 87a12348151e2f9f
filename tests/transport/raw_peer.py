"""A peer that sends arbitrary bytes to a listener, frame by frame or byte by byte."""

from __future__ import annotations

import socket

from prfaas.transport.listener import Listener
from prfaas.transport.messages import HELLO, Manifest, ManifestSegment, encode
from prfaas.transport.wire import Decoder, Frame, Kind, encode_message
from tests.waiting import PATIENCE_S

GREETING = encode_message(Kind.HELLO, encode(HELLO))


class Raw:
    def __init__(
        self, listener: Listener, *, greet: bool = True, source: str | None = None
    ) -> None:
        """`source` is the address of this peer's host."""
        self._sock = socket.create_connection(
            listener.address, PATIENCE_S, None if source is None else (source, 0)
        )
        self._decoder = Decoder()
        self._frames: list[Frame] = []
        if greet:
            self.send(GREETING)
            assert self.answer().header.kind is Kind.WELCOME

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def answer(self) -> Frame:
        while not self._frames:
            data = self._sock.recv(65536)
            assert data, "closed without an answer"
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def assert_cut_off(self) -> None:
        """Asserts that the listener closed the connection without an answer."""
        try:
            assert self._sock.recv(65536) == b""
        except ConnectionResetError:
            pass


def manifest(*sizes: int) -> Manifest:
    return Manifest(64 << 10, tuple(ManifestSegment(f"s{i}", n) for i, n in enumerate(sizes)))
