"""Framing, sans-IO: bytes to frames and back. No sockets; sizes are checked before allocation.

    frame    header (64 bytes) | body
    DATA     body = table of pieces (24 bytes each) | the pieces' bytes, one after the other
    others   body = msgpack, small (an OPEN, which lists the segments, may be larger)

A DATA frame carries pieces of one or many segments, so 40,000 small segments need no more frames
than one large segment. Every frame has its transfer's id and a proof that the sender holds the
grant (`auth`). Any connection may therefore carry any frame, and a lost connection loses no state.
The checksum (XXH3, 64 bits) covers the header up to the checksum and the whole body.

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
MAX_PIECES = 512  # half of Linux's IOV_MAX: one piece may lie in two buffers
MAX_PAYLOAD_BYTES = 8 << 20
MAX_MANIFEST_BYTES = 16 << 20
MAX_MESSAGE_BYTES = 4 << 10
MAX_HELLO_BYTES = 512  # the only body of a peer that has shown no grant, except for a path check's
MAX_ACKS = 32  # maximum number of sequences in one ACK

_HEADER = struct.Struct("<4sBBHIIQ16s16sQ")
_COVERED_BYTES = HEADER_BYTES - 8  # the header without its checksum
_PIECE = struct.Struct("<IB3xQII")
assert _HEADER.size == HEADER_BYTES and _PIECE.size == PIECE_BYTES

_WIRE_BYTES = operator.itemgetter(4)  # of a SegmentPiece

NO_TRANSFER = bytes(16)
CHECKED = 1  # flag: `checksum` is set; without it the receiver trusts the network


class Kind(enum.IntEnum):
    HELLO = 1  # sender -> receiver, the first frame of a connection
    WELCOME = 2
    OPEN = 3  # the manifest of a granted transfer
    OPENED = 4
    DATA = 5
    ACK = 6  # every piece of these frames is in place and verified
    NACK = 7  # the frame is not in place: the sender must resend it
    PROBE = 8  # renews the grant while no segment is ready to send
    ALIVE = 9
    ABORT = 10  # the sender ends the transfer
    ENDED = 11  # the transfer has ended: committed, or aborted with a reason
    MEASURE = 12  # bytes that the receiver discards, for the path check (`prfaas doctor`)
    PROGRESS = 13  # how many bytes of a slow DATA frame have arrived so far


class Codec(enum.IntEnum):
    NONE = 0


_BODY_CAP = {
    Kind.HELLO: MAX_HELLO_BYTES,
    Kind.OPEN: MAX_MANIFEST_BYTES,
    Kind.MEASURE: MAX_PAYLOAD_BYTES,
}


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
    """Bytes [offset, offset + raw_bytes) of a segment, encoded as `wire_bytes` bytes. The fields
    are in wire order."""

    segment: int  # index in the manifest
    codec: int
    offset: int
    raw_bytes: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole small frame in memory, such as a response."""

    header: Header
    body: bytes


def auth_of(token: str) -> bytes:
    """The digest of a grant's token that every frame carries instead of the token."""
    return hashlib.blake2b(token.encode(), digest_size=16, person=b"prfaas-grant").digest()


def parse_header(data: Buffer) -> Header:
    """Raises WireError unless this is a valid header within the limits; no body is read before."""
    magic, version, kind, pieces, body_bytes, flags, sequence, transfer_id, auth, checksum = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        raise WireError(f"not this protocol: the frame begins with {magic!r}")
    if version != VERSION:
        raise WireError(f"the peer uses protocol version {version}, this side uses {VERSION}")
    try:
        known = Kind(kind)
    except ValueError:
        raise WireError(f"unknown frame kind {kind}") from None
    if flags & ~CHECKED:
        raise WireError(f"unknown flags {flags:#x}")
    if known is Kind.DATA:
        if not 1 <= pieces <= MAX_PIECES:
            raise WireError(f"a frame has {pieces} pieces; the limit is 1 to {MAX_PIECES}")
        payload_bytes = body_bytes - pieces * PIECE_BYTES
        if not 1 <= payload_bytes <= MAX_PAYLOAD_BYTES:
            raise WireError(
                f"a payload has {payload_bytes} bytes; the limit is 1 to {MAX_PAYLOAD_BYTES}"
            )
    elif pieces:
        raise WireError(f"a {known.name} frame must have no pieces, but it has {pieces}")
    elif body_bytes > _BODY_CAP.get(known, MAX_MESSAGE_BYTES):
        raise WireError(f"a {known.name} frame with a body of {body_bytes} bytes is too large")
    return Header(known, pieces, body_bytes, flags, sequence, transfer_id, auth, checksum)


def parse_table(table: Buffer, header: Header) -> list[SegmentPiece]:
    """The pieces of a DATA frame. Their sizes must add up to the payload."""
    pieces = list(map(SegmentPiece._make, _PIECE.iter_unpack(table)))
    total = 0
    for _, codec, _, raw_bytes, wire_bytes in pieces:
        if codec != Codec.NONE:
            raise WireError(f"unknown codec {codec}")
        if raw_bytes != wire_bytes or raw_bytes == 0:
            raise WireError(
                f"a piece of {raw_bytes} bytes is sent as {wire_bytes} bytes without a codec"
            )
        total += wire_bytes
    if total != header.body_bytes - len(pieces) * PIECE_BYTES:
        raise WireError(
            f"the pieces have {total} bytes, which does not match a body of {header.body_bytes}"
        )
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
    """Header and table of a DATA frame; the payload follows them on the wire."""
    head = encode_data_head(
        pieces, sequence=sequence, transfer_id=transfer_id, auth=auth, checked=checked
    )
    if checked:
        seal(head, payload)
    return head


def encode_data_head(
    pieces: Sequence[SegmentPiece],
    *,
    sequence: int,
    transfer_id: bytes,
    auth: bytes,
    checked: bool,
) -> bytearray:
    """As `encode_data`, but the checksum of a `checked` frame is not set yet: the process that
    reads the payload sets it with `seal`."""
    table_bytes = len(pieces) * PIECE_BYTES
    body_bytes = table_bytes + sum(map(_WIRE_BYTES, pieces))
    head = bytearray(HEADER_BYTES + table_bytes)
    # One call packs the whole table: frames of small segments have hundreds of pieces.
    struct.pack_into(
        "<" + "IB3xQII" * len(pieces), head, HEADER_BYTES, *chain.from_iterable(pieces)
    )
    flags = CHECKED if checked else 0
    _HEADER.pack_into(
        head, 0, MAGIC, VERSION, Kind.DATA, len(pieces), body_bytes, flags, sequence,
        transfer_id, auth, 0,
    )  # fmt: skip
    return head


def seal(head: bytearray, payload: Iterable[Buffer]) -> None:
    """Sets the checksum of a checked DATA frame, which covers its payload, too."""
    digest = _digest(head, memoryview(head)[HEADER_BYTES:], payload)
    head[_COVERED_BYTES:HEADER_BYTES] = digest.to_bytes(8, "little")


def encode_message(
    kind: Kind,
    body: bytes = b"",
    *,
    sequence: int = 0,
    transfer_id: bytes = NO_TRANSFER,
    auth: bytes = NO_TRANSFER,
) -> bytes:
    """A whole frame without pieces; it always has a checksum."""
    head = bytearray(HEADER_BYTES)
    _HEADER.pack_into(
        head, 0, MAGIC, VERSION, kind, 0, len(body), CHECKED, sequence, transfer_id, auth, 0
    )
    head[_COVERED_BYTES:] = _digest(head, body, ()).to_bytes(8, "little")
    return bytes(head) + body


def intact(head: Buffer, header: Header, body: Buffer, payload: Iterable[Buffer] = ()) -> bool:
    """Whether the checksum matches. `body` is a message or a table of pieces."""
    if not header.flags & CHECKED:
        return header.kind is Kind.DATA  # messages always have a checksum
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
        raise WireError(f"an ACK body has {len(body)} bytes")
    return struct.unpack(f"<{count}Q", body)


def encode_progress(nbytes: int) -> bytes:
    """The body of a PROGRESS: how many payload bytes of the frame have arrived so far."""
    return struct.pack("<Q", nbytes)


def parse_progress(body: bytes) -> int:
    if len(body) != 8:
        raise WireError(f"a PROGRESS body has {len(body)} bytes")
    return int.from_bytes(body, "little")


class Decoder:
    """Collects frames from a stream of bytes, for the side that receives only small frames."""

    def __init__(self, max_body_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._pending = bytearray()

    def feed(self, data: Buffer) -> list[Frame]:
        """Returns the frames that are complete now. The decoder is unusable after a WireError."""
        self._pending += data
        frames = []
        while len(self._pending) >= HEADER_BYTES:
            header = parse_header(self._pending)
            if header.body_bytes > self._max_body_bytes:
                raise WireError(
                    f"a {header.kind.name} body of {header.body_bytes} bytes is too large"
                )
            end = HEADER_BYTES + header.body_bytes
            if len(self._pending) < end:
                break
            body = bytes(self._pending[HEADER_BYTES:end])
            if not intact(self._pending[:HEADER_BYTES], header, body):
                raise WireError(f"the checksum of a {header.kind.name} frame does not match")
            del self._pending[:end]
            frames.append(Frame(header, body))
        return frames
