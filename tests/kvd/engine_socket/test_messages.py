from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.kvd_api import MAX_HEADS, GroupShape, shapes_of, spec_of
from prfaas.errors import WireError
from prfaas.kvd.engine_socket.messages import (
    Begin,
    FrameReader,
    InvalidCall,
    NumberedCall,
    Pin,
    Ready,
    SegmentName,
    decode_answer,
    decode_call,
    frame,
)
from prfaas.kvspec import KVSpec, Segment
from prfaas.types import Grant, TransferId
from tests.cache.builders import SPECS

GRANT = Grant(TransferId("x"), "token", "h:1", {"full0": 4}, 10, 1.0, (8,))
CALLS = [
    NumberedCall(1, Begin((b"a", b"b"), 9, (8,), GRANT)),
    NumberedCall(0, Ready(3, (SegmentName("full0", 1, 0, 4), SegmentName("linear0", 2, 0, 9)))),
    NumberedCall(0, Ready(3, (SegmentName("full0", 1, 0, 4, 6, 2),))),
    NumberedCall(2, Pin((b"h" * 32,))),
]


@given(st.lists(st.integers(1, 30), min_size=1))
def test_frames_survive_any_cut(sizes: list[int]) -> None:
    stream = b"".join(frame(call) for call in CALLS)
    frames, decoded, at = FrameReader(), [], 0
    while at < len(stream):
        for size in sizes:
            decoded += [decode_call(body) for body in frames.feed(stream[at : at + size])]
            at += size
    assert decoded == CALLS


def test_invalid_frames_are_refused() -> None:
    with pytest.raises(WireError, match="a frame of"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(WireError, match="not a call"):
        decode_call(b"\xc1")
    with pytest.raises(WireError, match="not an answer"):
        decode_answer(b"GET / HTTP/1.1")


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_survives_the_socket(name: str) -> None:
    assert spec_of(shapes_of(SPECS[name])) == SPECS[name]


def test_a_spec_with_heads_survives_the_socket() -> None:
    spec = KVSpec(tuple(replace(group, heads=7) for group in SPECS["all"].groups))
    assert spec_of(shapes_of(spec)) == spec


@pytest.mark.parametrize("heads", [0, -1, MAX_HEADS + 1, "4", None])
def test_a_group_without_a_possible_number_of_heads_is_refused(heads: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\[5\]"):
        msgspec.convert(["full", "full0", [0], 8, 0, heads], GroupShape)


@pytest.mark.parametrize(
    ("first_head", "heads", "written"),
    [(0, 0, None), (0, 2, range(2)), (3, 2, range(3, 5)), (3, 0, range(3, 3))],
)
def test_heads_of_a_segment(first_head: int, heads: int, written: range | None) -> None:
    segment, found = SegmentName("full0", 1, 0, 4, first_head, heads).share
    assert (segment, found) == (Segment("full0", 1, 0, 4), written)
    assert found is None or (found.start, found.stop) == (first_head, first_head + heads)


@pytest.mark.parametrize("wrong", [(-1, 1), (0, -1), (0, MAX_HEADS + 1), (1 << 40, 1), ("0", 1)])
def test_heads_outside_the_limits_are_an_invalid_call(wrong: tuple[Any, int]) -> None:
    body = msgspec.msgpack.encode(
        [0, {"type": "ready", "lease_id": 3, "segments": [["full0", 1, 0, 4, *wrong]]}]
    )
    assert isinstance(decode_call(body).call, InvalidCall)
