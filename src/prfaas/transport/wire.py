"""Framing, sans-IO: bytes to frames and back. No sockets here, and no allocation before a check.

    frame    header (64 bytes) | body
    DATA     body = table of pieces (24 bytes each) | the pieces' bytes, one after the other
    others   body = msgpack, small (an OPEN, which lists the segments, may be larger)

A DATA frame carries pieces of one or many segments, so that 40,000 small segments cost no more
frames than one large one. Every frame names its transfer and proves that its sender holds the
grant (`auth`), so any connection may carry any frame and losing one connection loses no state.
The checksum (XXH3, 64 bits) covers the header before it and the whole body.

    0      4        5     6       8           12     16        24           40    56
    magic  version  kind  pieces  body_bytes  flags  sequence  transfer_id  auth  checksum
"""

from __future__ import annotations

import enum
import hashlib
import operator
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import xxhash

from prfaas.errors import WireError

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"PFKV"
VERSION = 1
HEADER_BYTES = 64
PIECE_BYTES = 24
MAX_PIECES = 512  # half of Linux' IOV_MAX: one piece may lie in two buffers
MAX_PAYLOAD_BYTES = 8 << 20
MAX_MANIFEST_BYTES = 16 << 20
MAX_MESSAGE_BYTES = 4 << 10
MAX_ACKS = 32  # frames that one ACK names

_HEADER = struct.Struct("<4sBBHIIQ16s16sQ")
_COVERED_BYTES = HEADER_BYTES - 8  # the header up to its checksum
_PIECE = struct.Struct("<IB3xQII")
assert _HEADER.size == HEADER_BYTES and _PIECE.size == PIECE_BYTES

_WIRE_BYTES = operator.itemgetter(4)  # of a Piece

NO_TRANSFER = bytes(16)
CHECKED = 1  # flag: `checksum` is set; without it the network is trusted, as a bare peer would


class Kind(enum.IntEnum):
    HELLO = 1  # sender -> receiver, first on a connection
    WELCOME = 2
    OPEN = 3  # the manifest of a granted transfer
    OPENED = 4
    DATA = 5
    ACK = 6  # every piece of these frames is in place and verified
    NACK = 7  # it is not: send it again
    PROBE = 8  # "I am still here": renews the lease while nothing is ready to send
    ALIVE = 9
    ABORT = 10  # sender gives up
    ENDED = 11  # the transfer is over: committed, or aborted and why
    MEASURE = 12  # bytes to be thrown away: `prfaas doctor` measures the path with them
    PROGRESS = 13  # so many bytes of a DATA frame have arrived; sent only while a frame is slow


class Codec(enum.IntEnum):
    NONE = 0


_BODY_CAP = {Kind.OPEN: MAX_MANIFEST_BYTES, Kind.MEASURE: MAX_PAYLOAD_BYTES}


class Header(NamedTuple):
    kind: Kind
    pieces: int
    body_bytes: int
    flags: int
    sequence: int  # chosen by the sender; ACK and NACK repeat it
    transfer_id: bytes
    auth: bytes
    checksum: int


class SegmentPiece(NamedTuple):
    """Bytes [offset, offset + raw_bytes) of a segment, which travel as `wire_bytes`. Fields in the
    order of the wire."""

    segment: int  # index in the manifest
    codec: int
    offset: int
    raw_bytes: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame in memory: small ones, as replies are."""

    header: Header
    body: bytes


def auth_of(token: str) -> bytes:
    """What a frame shows instead of the grant's token itself."""
    return hashlib.blake2b(token.encode(), digest_size=16, person=b"prfaas-grant").digest()


def parse_header(data: Buffer) -> Header:
    """Refuses everything that is not a frame of ours within its limits, before a body is read."""
    magic, version, kind, pieces, body_bytes, flags, sequence, transfer_id, auth, checksum = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        raise WireError(f"not this protocol: a frame that begins with {magic!r}")
    if version != VERSION:
        raise WireError(f"protocol version {version}, this side speaks {VERSION}")
    try:
        known = Kind(kind)
    except ValueError:
        raise WireError(f"unknown kind of frame: {kind}") from None
    if flags & ~CHECKED:
        raise WireError(f"unknown flags: {flags:#x}")
    if known is Kind.DATA:
        if not 1 <= pieces <= MAX_PIECES:
            raise WireError(f"{pieces} pieces in a frame, allowed are 1 to {MAX_PIECES}")
        payload_bytes = body_bytes - pieces * PIECE_BYTES
        if not 1 <= payload_bytes <= MAX_PAYLOAD_BYTES:
            raise WireError(f"a payload of {payload_bytes} bytes, limit is {MAX_PAYLOAD_BYTES}")
    elif pieces:
        raise WireError(f"{known.name} frames have no pieces, this one says {pieces}")
    elif body_bytes > _BODY_CAP.get(known, MAX_MESSAGE_BYTES):
        raise WireError(f"a {known.name} of {body_bytes} bytes")
    return Header(known, pieces, body_bytes, flags, sequence, transfer_id, auth, checksum)


def parse_table(table: Buffer, header: Header) -> list[SegmentPiece]:
    """The pieces of a DATA frame; their bytes must be exactly the payload."""
    pieces = list(map(SegmentPiece._make, _PIECE.iter_unpack(table)))
    total = 0
    for _, codec, _, raw_bytes, wire_bytes in pieces:
        if codec != Codec.NONE:
            raise WireError(f"unknown codec {codec}")
        if raw_bytes != wire_bytes or raw_bytes == 0:
            raise WireError(f"{raw_bytes} bytes as {wire_bytes} without a codec")
        total += wire_bytes
    if total != header.body_bytes - len(pieces) * PIECE_BYTES:
        raise WireError(f"pieces of {total} bytes in a body of {header.body_bytes}")
    return pieces


def encode_data(
    pieces: Sequence[SegmentPiece],
    payload: Iterable[Buffer],
    *,
    sequence: int,
    transfer_id: bytes,
    auth: bytes,
    checked: bool,
) -> bytearray:
    """Header and table of a DATA frame; the payload's own buffers follow it on the wire."""
    table_bytes = len(pieces) * PIECE_BYTES
    body_bytes = table_bytes + sum(map(_WIRE_BYTES, pieces))
    head = bytearray(HEADER_BYTES + table_bytes)
    # One call for the whole table: frames of small segments have hundreds of pieces.
    struct.pack_into(
        "<" + "IB3xQII" * len(pieces), head, HEADER_BYTES, *chain.from_iterable(pieces)
    )
    flags = CHECKED if checked else 0
    _HEADER.pack_into(
        head, 0, MAGIC, VERSION, Kind.DATA, len(pieces), body_bytes, flags, sequence,
        transfer_id, auth, 0,
    )  # fmt: skip
    if checked:
        digest = _digest(head, memoryview(head)[HEADER_BYTES:], payload)
        head[_COVERED_BYTES:HEADER_BYTES] = digest.to_bytes(8, "little")
    return head


def encode_message(
    kind: Kind,
    body: bytes = b"",
    *,
    sequence: int = 0,
    transfer_id: bytes = NO_TRANSFER,
    auth: bytes = NO_TRANSFER,
) -> bytes:
    """A whole frame without pieces; always checked."""
    head = bytearray(HEADER_BYTES)
    _HEADER.pack_into(
        head, 0, MAGIC, VERSION, kind, 0, len(body), CHECKED, sequence, transfer_id, auth, 0
    )
    head[_COVERED_BYTES:] = _digest(head, body, ()).to_bytes(8, "little")
    return bytes(head) + body


def intact(head: Buffer, header: Header, body: Buffer, payload: Iterable[Buffer] = ()) -> bool:
    """Whether header and body arrived as they were sent. `body` is a message or a table."""
    if not header.flags & CHECKED:
        return header.kind is Kind.DATA  # messages are always checked
    return _digest(head, body, payload) == header.checksum


def _digest(head: Buffer, body: Buffer, payload: Iterable[Buffer]) -> int:
    digest = xxhash.xxh3_64()
    digest.update(memoryview(head)[:_COVERED_BYTES])
    digest.update(body)
    for part in payload:
        digest.update(part)
    return digest.intdigest()


def encode_sequences(sequences: Sequence[int]) -> bytes:
    """The body of an ACK."""
    return struct.pack(f"<{len(sequences)}Q", *sequences)


def parse_sequences(body: bytes) -> tuple[int, ...]:
    count, rest = divmod(len(body), 8)
    if rest or not 1 <= count <= MAX_ACKS:
        raise WireError(f"an ACK of {len(body)} bytes")
    return struct.unpack(f"<{count}Q", body)


def encode_progress(nbytes: int) -> bytes:
    """The body of a PROGRESS: payload bytes of the frame that have arrived so far."""
    return struct.pack("<Q", nbytes)


def parse_progress(body: bytes) -> int:
    if len(body) != 8:
        raise WireError(f"a PROGRESS of {len(body)} bytes")
    return int.from_bytes(body, "little")


class Decoder:
    """Collects frames from bytes as they come, for the side that receives small ones only."""

    def __init__(self, max_body_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._pending = bytearray()

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that are complete now. After a WireError the decoder is of no more use."""
        self._pending += data
        frames = []
        while len(self._pending) >= HEADER_BYTES:
            header = parse_header(self._pending)
            if header.body_bytes > self._max_body_bytes:
                raise WireError(f"a body of {header.body_bytes} bytes where none is expected")
            end = HEADER_BYTES + header.body_bytes
            if len(self._pending) < end:
                break
            body = bytes(self._pending[HEADER_BYTES:end])
            if not intact(self._pending[:HEADER_BYTES], header, body):
                raise WireError(f"a {header.kind.name} frame that is not intact")
            del self._pending[:end]
            frames.append(Frame(header, body))
        return frames
