"""Mutated frames through the wire format: `python -m tests.transport.fuzz [FRAMES]`.

A parser may refuse (WireError) or accept; anything else is a bug, and so is memory beyond the caps.
"""

from __future__ import annotations

import random
import sys
import time
import tracemalloc
from typing import NamedTuple

from prfaas.errors import WireError
from prfaas.transport.messages import (
    HELLO,
    Ended,
    Hello,
    Manifest,
    ManifestSegment,
    Reason,
    decode,
    encode,
)
from prfaas.transport.wire import (
    HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    PIECE_BYTES,
    Decoder,
    Kind,
    SegmentPiece,
    auth_of,
    encode_data,
    encode_message,
    encode_sequences,
    intact,
    parse_header,
    parse_sequences,
    parse_table,
)
from prfaas_lab.testing.hostile import mutate_bytes

BODIES: dict[Kind, type[object]] = {
    Kind.HELLO: Hello,
    Kind.WELCOME: Hello,
    Kind.OPEN: Manifest,
    Kind.ENDED: Ended,
    Kind.NACK: Reason,
    Kind.ABORT: Reason,
}


class Outcome(NamedTuple):
    refused: int
    accepted: int
    peak_bytes: int


def seeds() -> list[bytes]:
    ids = {"transfer_id": bytes(range(16)), "auth": auth_of("x")}
    parts = [b"a" * 100, b"b" * 7, b"c" * 4096]
    pieces = [SegmentPiece(i, 0, 4096 * i, len(p), len(p)) for i, p in enumerate(parts)]
    data = encode_data(pieces, parts, sequence=3, checked=True, **ids) + b"".join(parts)
    manifest = Manifest(1 << 20, tuple(ManifestSegment(f"s{i}", 10 + i) for i in range(9)))
    return [
        bytes(data),
        encode_message(Kind.HELLO, encode(HELLO)),
        encode_message(Kind.OPEN, encode(manifest), **ids),  # type: ignore[arg-type]
        encode_message(Kind.ACK, encode_sequences([1, 2, 3]), **ids),  # type: ignore[arg-type]
        encode_message(Kind.NACK, encode(Reason("why")), **ids),  # type: ignore[arg-type]
        encode_message(Kind.ENDED, encode(Ended(True)), **ids),  # type: ignore[arg-type]
        encode_message(Kind.PROBE, **ids),  # type: ignore[arg-type]
    ]


def read(frame: bytes) -> None:
    """Everything that either end does with bytes of the other, sockets aside."""
    Decoder(MAX_MANIFEST_BYTES).feed(frame)
    if len(frame) < HEADER_BYTES:
        return
    header = parse_header(frame)
    body = frame[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    if header.kind is Kind.DATA:
        table = body[: header.pieces * PIECE_BYTES]
        if len(table) == header.pieces * PIECE_BYTES:
            parse_table(table, header)
            intact(frame[:HEADER_BYTES], header, table, [body[len(table) :]])
    elif header.kind is Kind.ACK:
        parse_sequences(body)
    elif header.kind in BODIES:
        decode(body, BODIES[header.kind])


def fuzz_wire(frames: int, random_source: random.Random) -> Outcome:
    originals = seeds()
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(frames):
            try:
                read(mutate_bytes(random_source.choice(originals), random_source, HEADER_BYTES))
            except WireError:
                refused += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, f"{peak} bytes allocated for frames of a few kilobytes"
    return Outcome(refused, frames - refused, peak)


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    started = time.monotonic()
    outcome = fuzz_wire(wanted, random.Random(seed))
    took = time.monotonic() - started
    sys.stdout.write(f"{wanted:,} frames, seed {seed}, {took:.0f} s: {outcome}\n")
