from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.kvd_api import shapes_of, spec_of
from prfaas.errors import WireError
from prfaas.kvd.engine_socket.messages import (
    Begin,
    FrameReader,
    NumberedCall,
    Pin,
    Ready,
    SegmentName,
    decode_answer,
    decode_call,
    frame,
)
from prfaas.types import Grant, TransferId
from tests.cache.builders import SPECS

GRANT = Grant(TransferId("x"), "token", "h:1", {"full0": 4}, 10, 1.0, (8,))
CALLS = [
    NumberedCall(1, Begin((b"a", b"b"), 9, (8,), GRANT)),
    NumberedCall(0, Ready(3, (SegmentName("full0", 1, 0, 4), SegmentName("linear0", 2, 0, 9)))),
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
