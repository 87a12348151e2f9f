"""State in plain memory: written once, read in any cut, refused where it is not."""

from __future__ import annotations

import pytest

from prfaas.engine.memory import MemorySegments
from prfaas.errors import EngineError, InputError
from prfaas.kvspec import FullAttention, KVSpec, LinearState, Segment

SPEC = KVSpec((FullAttention("full0", (0,), 2), LinearState("linear0", (1,), 6)))


def filled() -> MemorySegments:
    state = MemorySegments(SPEC)
    for start, stop in ((0, 4), (4, 10)):
        segment = Segment("full0", 0, start, stop)
        (view,) = state.buffers(segment)
        view[:] = bytes(range(2 * start, 2 * stop))
        state.ready(segment)
    return state


def test_any_range_across_segments() -> None:
    state = filled()
    for start, stop in ((0, 10), (3, 5), (4, 10), (9, 10)):
        data = b"".join(state.views(Segment("full0", 0, start, stop)))
        assert data == bytes(range(2 * start, 2 * stop))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match="full0/0/0-11: token 10 is missing"):
        filled().views(Segment("full0", 0, 0, 11))
    with pytest.raises(EngineError, match="linear0/1/0-10 is missing"):
        filled().views(Segment("linear0", 1, 0, 10))


def test_a_segment_that_is_not_ready_is_not_served() -> None:
    state = filled()
    state.buffers(Segment("full0", 0, 10, 12))
    with pytest.raises(EngineError, match="token 10 is missing"):
        state.views(Segment("full0", 0, 8, 12))


def test_carried_elsewhere() -> None:
    state = filled()
    copy = MemorySegments.load(SPEC, state.dump())
    assert copy.segments == state.segments and copy.nbytes == state.nbytes == 20
    assert copy.dump() == state.dump()


def test_a_share_of_the_heads_is_not_the_segment() -> None:
    spec = KVSpec((FullAttention("full0", (0,), 8, heads=4),))
    segment = Segment("full0", 0, 0, 4)
    sink = MemorySegments(spec)
    sink.buffers(segment)
    with pytest.raises(InputError, match="write whole segments"):
        sink.ready(segment, range(2))
    assert sink.nbytes == 0
    sink.ready(segment, range(4))
    assert sink.nbytes == 32
