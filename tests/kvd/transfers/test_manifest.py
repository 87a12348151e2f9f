from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.kvd.transfers.manifest import (
    MAX_PLANNED_SEGMENTS,
    Coverage,
    Span,
    SpanSet,
    mismatch,
    plan_segments,
    required_state,
)
from prfaas.kvspec import FullAttention, KVSpec, Segment, segment_bytes
from tests.cache.builders import BLOCK, SPECS

ALL = SPECS["all"]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12))))
def test_spans_are_a_set_of_tokens(pieces: list[tuple[int, int]]) -> None:
    spans, tokens = SpanSet(), set()
    for start, length in pieces:
        spans.add(Span(start, start + length))
        tokens.update(range(start, start + length))
    kept = list(spans)
    assert {t for start, stop in kept for t in range(start, stop)} == tokens
    assert all(a.stop < b.start for a, b in zip(kept, kept[1:], strict=False))
    for start in range(0, 50, 3):
        assert spans.has(Span(start, start + 2)) == ({start, start + 1} <= tokens)


@st.composite
def handoffs(draw: st.DrawFn) -> dict[str, object]:
    tokens = draw(st.integers(1, 60))
    blocks = tokens // BLOCK
    run = draw(st.integers(0, blocks))  # found by the sender
    hit = draw(st.integers(0, run))
    last = blocks * BLOCK
    # The receiver lacks what follows its run, and may request the last boundary.
    skip = draw(st.integers(0, blocks)) * BLOCK
    promised = [last] if last and draw(st.booleans()) else []
    return {
        "tokens": tokens,
        "match_tokens": hit * BLOCK,
        "found_tokens": {"full0": run * BLOCK, "full1": run * BLOCK},
        "skip_tokens": {"full0": skip, "full1": skip},
        "lengths": (*promised, tokens),
        "whole": draw(st.sampled_from((1, BLOCK))),
    }


@given(handoffs())
def test_planned_segments_are_exactly_the_required_state(handoff: dict[str, object]) -> None:
    pieces = plan_segments(ALL, BLOCK, **handoff)  # type: ignore[arg-type]
    wanted = required_state(
        ALL,
        handoff["tokens"],  # type: ignore[arg-type]
        skip_tokens=handoff["skip_tokens"],  # type: ignore[arg-type]
        lengths=handoff["lengths"],  # type: ignore[arg-type]
        whole=handoff["whole"],  # type: ignore[arg-type]
    )
    segments = [piece.segment for piece in pieces]
    assert mismatch(ALL, wanted, segments) is None
    if segments:
        assert mismatch(ALL, wanted, segments[1:]) is not None
        assert mismatch(ALL, wanted, [*segments, segments[-1]]) is not None
    for piece in pieces:
        assert segment_bytes(ALL, piece.segment) > 0
        if piece.found and piece.segment.group.startswith("full"):
            assert piece.segment.stop <= handoff["found_tokens"]["full0"]  # type: ignore[index]


def test_a_state_before_the_resume_point_cannot_be_promised() -> None:
    with pytest.raises(InputError, match="resumes after 8"):
        plan_segments(
            ALL, BLOCK, 12, skip_tokens={}, lengths=(4, 12), match_tokens=8, found_tokens={}
        )


def test_long_prompts_have_longer_segments() -> None:
    spec = KVSpec((FullAttention("full0", tuple(range(60)), 8),))
    pieces = plan_segments(
        spec, 64, 131_072, skip_tokens={}, lengths=(131_072,), match_tokens=0, found_tokens={}
    )
    assert MAX_PLANNED_SEGMENTS // 2 < len(pieces) <= MAX_PLANNED_SEGMENTS


def test_coverage_names_a_missing_segment() -> None:
    wanted = required_state(ALL, 10, skip_tokens={"full0": 4}, lengths=(8, 10))
    there = Coverage(ALL, wanted)

    def owing() -> Sequence[str]:
        missing = there.missing()
        return () if missing is None else missing.name

    assert owing() == "full0/0/4-10"
    for layer in (0, 2):
        there.add(Segment("full0", layer, 4, 8))
        there.add(Segment("full0", layer, 8, 10))
    assert owing() == "window0/3/2-10"
    there.add(Segment("window0", 3, 4, 10))
    there.add(Segment("window0", 3, 2, 8))
    for layer in (1, 4):
        for length in (8, 10):
            there.add(Segment("linear0", layer, 0, length))
    assert owing() == "full1/5/0-10"
    there.add(Segment("full1", 5, 0, 10))
    assert owing() == ()
