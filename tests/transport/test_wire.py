from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import WireError
from prfaas.transport.messages import HELLO, Hello, Manifest, ManifestSegment, decode, encode
from prfaas.transport.wire import (
    HEADER_BYTES,
    MAX_ACKS,
    MAX_MANIFEST_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PIECES,
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
from tests.transport.fuzz import fuzz_wire

ID, AUTH = bytes(range(16)), auth_of("secret")


def data(payloads: list[bytes], *, checked: bool = True) -> tuple[bytearray, list[SegmentPiece]]:
    pieces = [SegmentPiece(i, 0, i * 4096, len(part), len(part)) for i, part in enumerate(payloads)]
    head = encode_data(pieces, payloads, sequence=7, transfer_id=ID, auth=AUTH, checked=checked)
    return head, pieces


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=20), st.booleans())
def test_data_frames_are_read_back(payloads: list[bytes], checked: bool) -> None:
    head, pieces = data(payloads, checked=checked)
    header = parse_header(head)
    table = head[HEADER_BYTES:]
    assert (header.kind, header.sequence, header.transfer_id, header.auth) == (
        Kind.DATA, 7, ID, AUTH,
    )  # fmt: skip
    assert parse_table(table, header) == pieces
    assert header.body_bytes == len(table) + sum(map(len, payloads))
    assert intact(head[:HEADER_BYTES], header, table, payloads)


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_any_flipped_bit_is_noticed(payloads: list[bytes], draw: st.DataObject) -> None:
    head, _ = data(payloads)
    frame = bytearray(head + b"".join(payloads))
    bit = draw.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    try:
        header = parse_header(frame)
        body = frame[HEADER_BYTES:]
        if len(body) != header.body_bytes:
            return  # the receiver would wait for other bytes, and the checksum then fails
        table = body[: header.pieces * PIECE_BYTES]
        if header.kind is not Kind.DATA or not header.flags:
            return  # flags and kind: refused below, by the receiver's rules for that kind
        parse_table(table, header)
        assert not intact(frame[:HEADER_BYTES], header, table, [body[len(table) :]])
    except WireError:
        pass


def test_messages_come_out_of_any_cut_of_the_stream() -> None:
    frames = [
        encode_message(Kind.WELCOME, encode(HELLO)),
        encode_message(Kind.ACK, encode_sequences([1, 2]), transfer_id=ID),
        encode_message(Kind.ALIVE, transfer_id=ID),
    ]
    stream = b"".join(frames)
    for size in (1, 3, 63, 64, 65, len(stream)):
        decoder = Decoder()
        seen = []
        for at in range(0, len(stream), size):
            seen += decoder.feed(stream[at : at + size])
        assert [frame.header.kind for frame in seen] == [Kind.WELCOME, Kind.ACK, Kind.ALIVE]
        assert decode(seen[0].body, Hello) == HELLO
        assert parse_sequences(seen[1].body) == (1, 2)


def altered(frame: bytes, at: int, value: bytes) -> bytes:
    return frame[:at] + value + frame[at + len(value) :]


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"HTTP", "not this protocol"),
        (4, b"\x02", "version 2, this side uses 1"),
        (5, b"\x63", "unknown frame kind 99"),
        (12, b"\x02", "unknown flags"),
        (6, b"\x01", "must have no pieces"),
        (
            8,
            (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"),
            "a PROBE frame with a body of 4097 bytes is too large",
        ),
    ],
)
def test_headers_that_are_refused(at: int, value: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        parse_header(altered(encode_message(Kind.PROBE), at, value))


@pytest.mark.parametrize(
    ("pieces", "body_bytes"),
    [
        (0, 100),
        (MAX_PIECES + 1, 100_000),
        (1, PIECE_BYTES),
        (1, PIECE_BYTES + MAX_PAYLOAD_BYTES + 1),
        (1, 2**32 - 1),
        (MAX_PIECES, 10),
    ],
)
def test_data_beyond_its_limits_is_refused_before_anything_is_read(
    pieces: int, body_bytes: int
) -> None:
    head, _ = data([b"x"])
    frame = altered(bytes(head), 6, pieces.to_bytes(2, "little"))
    with pytest.raises(WireError):
        parse_header(altered(frame, 8, body_bytes.to_bytes(4, "little")))


@pytest.mark.parametrize(
    "piece",
    [
        SegmentPiece(0, 1, 0, 5, 5),
        SegmentPiece(0, 0, 0, 5, 4),
        SegmentPiece(0, 0, 0, 0, 0),
        SegmentPiece(0, 0, 0, 6, 6),
    ],
)
def test_tables_that_do_not_add_up(piece: SegmentPiece) -> None:
    head, _ = data([b"12345"])
    header = parse_header(head)
    table = encode_data([piece], [], sequence=0, transfer_id=ID, auth=AUTH, checked=False)
    with pytest.raises(WireError):
        parse_table(table[HEADER_BYTES:], header)


def test_messages_are_never_trusted_unchecked() -> None:
    frame = altered(encode_message(Kind.PROBE), 12, b"\0")
    header = parse_header(frame)
    assert not intact(frame, header, b"")
    with pytest.raises(WireError, match="checksum of a PROBE frame does not match"):
        Decoder().feed(frame)


def test_bodies_that_are_not_messages() -> None:
    for body in (b"\xc1", b"\x81\xa8software\xa1\xff"):
        with pytest.raises(WireError, match="not a Hello"):
            decode(body, Hello)
    for quantum, segments in ((1, [["a", 1]]), (1 << 20, []), (1 << 20, [["a", 0]]), (4096, [5])):
        raw = msgspec.msgpack.encode({"quantum_bytes": quantum, "segments": segments})
        with pytest.raises(WireError, match="not a Manifest"):
            decode(raw, Manifest)
    with pytest.raises(WireError, match="an ACK body has 9 bytes"):
        parse_sequences(b"123456789")
    with pytest.raises(WireError):
        parse_sequences(encode_sequences(range(MAX_ACKS + 1)))


def test_forty_thousand_segments_fit_a_manifest() -> None:
    segments = tuple(ManifestSegment(f"full0/{i}/0-2048", 32768) for i in range(40_000))
    assert len(encode(Manifest(1 << 20, segments))) < MAX_MANIFEST_BYTES


def test_mutated_frames_neither_crash_nor_allocate() -> None:
    assert fuzz_wire(frames=20_000, random_source=random.Random(1)).refused > 10_000
