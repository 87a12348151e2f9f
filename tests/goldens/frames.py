"""The bytes of frames: one of each kind between kvds, and of calls and answers of engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prfaas.kvd.engine_socket.messages import (
    Attach,
    Begin,
    Done,
    NumberedAnswer,
    NumberedCall,
    Refused,
    TransferEnded,
    frame,
)
from prfaas.transport import wire
from prfaas.transport.messages import Ended, Hello, Manifest, ManifestSegment, Reason, encode
from prfaas.transport.wire import Kind, SegmentPiece
from prfaas.types import BlockHash, TransferId
from tests.goldens.canonical import Golden

TRANSFER = bytes(range(16))
TOKEN = "token-of-a-grant"
PAYLOAD = bytes(range(64))
PIECES = (SegmentPiece(0, 0, 0, 40, 40), SegmentPiece(3, 0, 4096, 24, 24))


def goldens() -> Iterator[Golden]:
    yield Golden("between_kvds.json", {name: data.hex() for name, data in _wire()})
    yield Golden("engine_socket.json", {name: data.hex() for name, data in _engine_socket()})


def _wire() -> Iterator[tuple[str, bytes]]:
    hello = encode(Hello("prfaas of a test", 1 << 20, progress=True))
    manifest = Manifest(4096, (ManifestSegment("full0/0/0-64", 4096),), b"label")
    bodies = {
        Kind.HELLO: hello,
        Kind.WELCOME: hello,
        Kind.OPEN: encode(manifest),
        Kind.ACK: wire.encode_sequences((7, 8, 9)),
        Kind.NACK: encode(Reason("damaged")),
        Kind.ABORT: encode(Reason("the engine has failed")),
        Kind.ENDED: encode(Ended(True)),
        Kind.MEASURE: bytes(16),
        Kind.PROGRESS: wire.encode_progress(1 << 40),
    }
    sent: dict[str, Any] = {"transfer_id": TRANSFER, "auth": wire.auth_of(TOKEN)}
    for kind in Kind:
        if kind is not Kind.DATA:
            body = bodies.get(kind, b"")
            yield kind.name, wire.encode_message(kind, body, sequence=5, **sent)
    yield "ENDED, failed", wire.encode_message(Kind.ENDED, encode(Ended(False, "why")), **sent)
    for checked in (True, False):
        head = wire.encode_data(PIECES, [PAYLOAD], sequence=6, checked=checked, **sent)
        yield f"DATA, {'with' if checked else 'without'} a checksum", bytes(head) + PAYLOAD


def _engine_socket() -> Iterator[tuple[str, bytes]]:
    hashes = (BlockHash(bytes(32)), BlockHash(bytes(range(32))))
    yield "begin", frame(NumberedCall(1, Begin(hashes, 100, (64,), tail=b"tail")))
    yield "attach", frame(NumberedCall(2, Attach(TransferId("transfer"))))
    yield "done", frame(NumberedAnswer(1, Done()))
    yield "refused", frame(NumberedAnswer(2, Refused("input", "the problem")))
    yield "ended", frame(NumberedAnswer(0, TransferEnded(3, "")))
