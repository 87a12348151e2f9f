"""Chunks and what each layer owes after them, for any prompt, prefix and export."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.api import Export
from prfaas.engine.chunks import ExportPlan, chunk_ends, resume_segments
from prfaas.engine.memory import MemorySegments
from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow, segment_bytes

SPEC = KVSpec(
    (
        FullAttention("full0", (0, 2), 8),
        SlidingWindow("window0", (3,), 16, window=7),
        LinearState("linear0", (1, 2), 96),  # layer 2 has attention and a state
    )
)
LAYERS = range(4)


@st.composite
def prefills(draw: st.DrawFn) -> tuple[int, int, int, Export]:
    stop = draw(st.integers(1, 60))
    start = draw(st.integers(0, stop - 1))
    handoff = draw(st.integers(start + 1, stop))
    checkpoints = draw(st.sets(st.integers(start + 1, handoff), max_size=3))
    skip = draw(st.integers(start, stop))
    export = Export(MemorySegments(SPEC), handoff, tuple(sorted(checkpoints)), {"full0": skip})
    return start, stop, draw(st.integers(1, 20)), export


@given(prefills())
def test_chunks_cover_the_prompt_and_end_where_states_are_wanted(
    prefill: tuple[int, int, int, Export],
) -> None:
    start, stop, chunk_tokens, export = prefill
    ends = list(chunk_ends(start, stop, chunk_tokens=chunk_tokens, export=export))
    assert ends == sorted(set(ends)) and ends[-1] == stop
    assert {export.tokens, *export.checkpoint_tokens} <= set(ends)
    for before, after in zip([start, *ends], ends, strict=False):
        assert 0 < after - before <= chunk_tokens
    # A resumed prompt's chunks fall where those of the whole prompt fall.
    regular = set(range(chunk_tokens, stop, chunk_tokens))
    assert {end for end in regular if end > start} <= set(ends)


@given(prefills(), st.data())
def test_chunks_end_at_the_given_cuts_instead(
    prefill: tuple[int, int, int, Export], data: st.DataObject
) -> None:
    start, stop, chunk_tokens, export = prefill
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, stop - 1)), min_size=1, max_size=5)))
    ends = chunk_ends(start, stop, chunk_tokens=chunk_tokens, export=export, cuts=cuts)
    assert list(ends) == sorted(set(ends)) and ends[-1] == stop
    wanted = {n for n in (*cuts, export.tokens, *export.checkpoint_tokens, stop) if n > start}
    assert {end for end in wanted if end <= stop} <= set(ends)
    for before, after in zip([start, *ends], ends, strict=False):
        assert 0 < after - before <= chunk_tokens
        # The engine's own cuts are only where a piece would be too long.
        if after not in wanted:
            last = max(n for n in (start, *wanted) if n < after)
            assert min(n for n in wanted if n > after) - last > chunk_tokens


@given(prefills(), st.integers(1, 20))
def test_the_cuts_of_a_hand_off_are_repeated_exactly(
    prefill: tuple[int, int, int, Export], other_tokens: int
) -> None:
    """By an engine whose chunks are as long or longer, whatever the two nodes' own lengths are."""
    _, stop, chunk_tokens, export = prefill
    sent = chunk_ends(0, export.tokens, chunk_tokens=chunk_tokens, export=export)
    rest: tuple[int, ...] = ()
    if export.tokens < stop:
        rest = chunk_ends(export.tokens, stop, chunk_tokens=other_tokens, export=None)
    cuts = (*sent, *rest)
    longest = max(chunk_tokens, other_tokens)
    found = chunk_ends(0, cuts[-1], chunk_tokens=longest, export=None, cuts=cuts[:-1])
    if len(cuts) > 1:
        assert found == cuts


@given(prefills())
def test_every_segment_is_owed_once_and_nothing_more(prefill: tuple[int, int, int, Export]) -> None:
    start, stop, chunk_tokens, export = prefill
    plan = ExportPlan(SPEC, export)
    owed = []
    at = start
    for end in chunk_ends(start, stop, chunk_tokens=chunk_tokens, export=export):
        for layer in LAYERS:
            owed += plan.growing(layer, at, end)
            owed += plan.closing(layer, end)
        at = end
    assert len(owed) == len(set(owed))
    tokens = {layer: [] for layer in LAYERS}  # type: dict[int, list[int]]
    for segment in owed:
        segment_bytes(SPEC, segment)  # it belongs to the model
        if segment.group == "full0":
            tokens[segment.layer] += range(segment.start, segment.stop)
    expected = list(range(export.skip_tokens["full0"], export.tokens))
    assert tokens[0] == tokens[2] == expected
    lengths = sorted({export.tokens, *export.checkpoint_tokens})
    for group, layers in (("linear0", (1, 2)), ("window0", (3,))):
        for layer in layers:
            closed = [s.stop for s in owed if (s.group, s.layer) == (group, layer)]
            assert closed == lengths


@given(st.integers(1, 60), st.integers(1, 20))
def test_what_a_prefill_exports_is_what_another_resumes_from(
    tokens: int, chunk_tokens: int
) -> None:
    state = MemorySegments(SPEC)
    plan = ExportPlan(SPEC, Export(state, tokens))
    at = 0
    for end in chunk_ends(0, tokens, chunk_tokens=chunk_tokens, export=Export(state, tokens)):
        for layer in LAYERS:
            for segment in (*plan.growing(layer, at, end), *plan.closing(layer, end)):
                state.buffers(segment)
                state.ready(segment)
        at = end
    assert state.nbytes == SPEC.kv_bytes(tokens)
    for segment in resume_segments(SPEC, tokens):
        found = sum(view.nbytes for view in state.views(segment))
        assert found == segment_bytes(SPEC, segment), segment.name
