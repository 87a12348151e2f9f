from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.emulated.content import Content
from prfaas.errors import EngineError
from prfaas.kvspec import Segment, handoff_segments, segment_bytes
from tests.engine.emulated.builders import SPEC

PROMPT = st.lists(st.integers(0, 2**31), min_size=2, max_size=80)


@given(tokens=PROMPT, data=st.data())
def test_bytes_depend_on_every_token_up_to_theirs_and_on_no_other(
    tokens: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[at] += 1
    one, other = Content(SPEC, tokens), Content(SPEC, changed)
    for group, layer in (("full0", 3), ("full1", 7), ("window0", 1)):
        for token in range(len(tokens)):
            segment = Segment(group, layer, token, token + 1)
            assert (one.of(segment) == other.of(segment)).all() == (token < at)
    for length in range(1, len(tokens) + 1):
        state = Segment("linear0", 0, 0, length)
        assert (one.of(state) == other.of(state)).all() == (length <= at)
    assert one.tokens(4, 1000, 0) != other.tokens(4, 1000, 0)


@given(tokens=PROMPT, cut=st.integers(1, 79))
def test_a_segment_is_its_pieces_one_after_another(tokens: list[int], cut: int) -> None:
    content, cut = Content(SPEC, tokens), min(cut, len(tokens) - 1)
    whole = content.of(Segment("full1", 7, 0, len(tokens))).tobytes()
    pieces = (Segment("full1", 7, 0, cut), Segment("full1", 7, cut, len(tokens)))
    assert whole == b"".join(content.of(piece).tobytes() for piece in pieces)


def test_no_two_layers_or_lengths_are_alike_and_sizes_are_the_specs() -> None:
    content = Content(SPEC, range(200))
    segments = list(handoff_segments(SPEC, 200, chunk_tokens=64))
    filled = [content.of(segment).tobytes() for segment in segments]
    assert [len(data) for data in filled] == [segment_bytes(SPEC, s) for s in segments]
    assert len({data[:8] for data in filled}) == len(filled)


def test_buffers_in_pieces_are_filled_and_checked_in_order() -> None:
    content, segment = Content(SPEC, range(200)), Segment("full0", 3, 10, 20)
    room = bytearray(segment_bytes(SPEC, segment))
    views = [memoryview(room)[:7], memoryview(room)[7:100], memoryview(room)[100:]]
    assert content.write(segment, views) == len(room)
    assert bytes(room) == content.of(segment).tobytes()
    content.check(segment, views)
    with pytest.raises(EngineError, match="full0/3/10-20"):
        content.check(segment, views[::-1])
    with pytest.raises(EngineError, match="full0/3/10-20"):
        content.check(segment, views[:-1])
    with pytest.raises(EngineError, match="the buffers have 7 of"):
        content.write(segment, views[:1])
