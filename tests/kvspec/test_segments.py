import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.kvspec import (
    FullAttention,
    KVSpec,
    LinearState,
    Segment,
    SlidingWindow,
    all_heads,
    block_bytes,
    block_slices,
    handoff_segments,
    segment_bytes,
)

specs = st.builds(
    lambda full, window, linear, size: KVSpec(
        (
            FullAttention("full0", tuple(range(full)), 3),
            SlidingWindow("window0", tuple(range(50, 50 + window)), 5, window=size),
            LinearState("linear0", tuple(range(90, 90 + linear)), 11),
        )
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 40),
)
SPEC = KVSpec((FullAttention("full0", (3, 7), 10), LinearState("linear0", (1, 2), 100)))


@given(specs, st.integers(1, 200), st.integers(1, 64), st.integers(0, 200))
def test_a_handoff_is_exactly_kv_bytes(spec: KVSpec, tokens: int, chunk: int, skip: int) -> None:
    skip = min(skip, tokens)
    segments = list(handoff_segments(spec, tokens, chunk_tokens=chunk, skip_tokens={"full0": skip}))
    assert len({s.name for s in segments}) == len(segments)
    assert sum(segment_bytes(spec, s) for s in segments) == spec.kv_bytes(tokens, skip)


@given(specs, st.integers(1, 150), st.integers(1, 64), st.integers(1, 32))
def test_segments_fill_blocks_without_overlap(
    spec: KVSpec, tokens: int, chunk: int, block_tokens: int
) -> None:
    written: dict[tuple[str, int], bytearray] = {}
    for segment in handoff_segments(spec, tokens, chunk_tokens=chunk):
        group = spec[segment.group]
        slices = list(block_slices(spec, segment, block_tokens))
        assert sum(piece.nbytes for piece in slices) == segment_bytes(spec, segment)
        for piece in slices:
            size = block_bytes(group, block_tokens)
            block = written.setdefault((group.name, piece.block), bytearray(size))
            assert piece.offset + piece.nbytes <= size
            assert not any(block[piece.offset : piece.offset + piece.nbytes]), "written twice"
            block[piece.offset : piece.offset + piece.nbytes] = b"\1" * piece.nbytes
    for (name, index), block in written.items():
        group = spec[name]
        if isinstance(group, LinearState):
            filled = len(group.layers) * group.state_bytes
        else:
            first = group.first_token(tokens) if isinstance(group, SlidingWindow) else 0
            start, stop = index * block_tokens, min((index + 1) * block_tokens, tokens)
            held = max(0, stop - max(start, first))
            filled = len(group.layers) * group.bytes_per_token * held
        assert sum(block) == filled


def test_states_leave_with_the_last_chunk() -> None:
    segments = list(handoff_segments(SPEC, 100, chunk_tokens=64))
    assert [s.name for s in segments] == [
        "full0/3/0-64",
        "full0/7/0-64",
        "full0/3/64-100",
        "full0/7/64-100",
        "linear0/1/0-100",
        "linear0/2/0-100",
    ]


def test_token_major_layer_after_layer() -> None:
    # Layer 7 is the group's second: it begins after one layer's 64 tokens of 10 bytes.
    assert list(block_slices(SPEC, Segment("full0", 7, 60, 130), 64)) == [
        (0, 640 + 600, 40),
        (1, 640, 640),
        (2, 640, 20),
    ]


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_names_are_read_back(layer: int, start: int, stop: int) -> None:
    segment = Segment("full0", layer, start, stop)
    assert Segment.parse(segment.name) == segment


@pytest.mark.parametrize(
    "name", ["", "full0", "full0/1/2", "full0/-1/0-1", "full0/01/0-1", "FULL/1/0-1", "a/1/0-1\n"]
)
def test_names_nobody_wrote_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="segment name"):
        Segment.parse(name)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment("other", 0, 0, 1), "unknown group"),
        (Segment("full0", 4, 0, 1), "layer 4"),
        (Segment("full0", 3, 5, 5), "empty"),
        (Segment("full0", 3, 6, 5), "empty"),
        (Segment("linear0", 1, 3, 5), "starts at 0"),
    ],
)
def test_segments_of_another_model_are_refused(segment: Segment, message: str) -> None:
    with pytest.raises(InputError, match=message):
        segment_bytes(SPEC, segment)


HEADS = KVSpec((FullAttention("full0", (3,), 8, heads=4), LinearState("linear0", (1,), 12)))


def test_heads_are_those_of_the_group() -> None:
    full, state = Segment("full0", 3, 0, 5), Segment("linear0", 1, 0, 5)
    assert all_heads(HEADS, full, None) and all_heads(HEADS, full, range(4))
    assert all_heads(HEADS, state, None) and all_heads(HEADS, state, range(1))
    assert not all_heads(HEADS, full, range(3)) and not all_heads(HEADS, full, range(3, 4))


@pytest.mark.parametrize(
    "heads",
    [
        *(range(5), range(0), range(2, 2), range(-1, 2), range(4, 5), range(3, 1), range(0, 4, 2)),
        *(range(3, -1, -1), range(0, 10**30)),
    ],
)
def test_heads_that_the_group_does_not_have_are_refused(heads: range) -> None:
    with pytest.raises(InputError, match=r"the heads of full0 are range\(0, 4\)"):
        all_heads(HEADS, Segment("full0", 3, 0, 5), heads)
    with pytest.raises(InputError, match="layer 4"):
        all_heads(HEADS, Segment("full0", 4, 0, 5), range(4))
