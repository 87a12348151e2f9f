"""Which lengths of a running request are copied, and what of it is kept in the end."""

from __future__ import annotations

import pytest

from prfaas.errors import EngineError
from prfaas.integrations.vllm.answers.boundaries import (
    Boundaries,
    count_slots,
    keep_interval,
    needs_slots,
    slot_blocks,
)
from prfaas.integrations.vllm.caches.groups import CacheGroup, CacheLayout, Move
from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow

BLOCK = 128
FULL = FullAttention("full", (0,), 16)
STATE = LinearState("state", (1, 2), 1_000)
WINDOW = SlidingWindow("window", (1,), 16, 100)


def layout(*specs: FullAttention | LinearState | SlidingWindow, wire: int = 64) -> CacheLayout:
    kinds = {FullAttention: "full", LinearState: "state", SlidingWindow: "window"}
    groups = tuple(
        CacheGroup(
            at,
            kinds[type(spec)],  # type: ignore[arg-type]
            spec,
            BLOCK,
            tuple((f"layer{n}", n) for n in spec.layers),
            positional_states=isinstance(spec, LinearState),
        )
        for at, spec in enumerate(specs)
    )
    return CacheLayout(groups, KVSpec(specs), wire, whole=1)


ATTENTION = layout(FULL)
HYBRID = layout(FULL, STATE)
WINDOWED = layout(FULL, WINDOW)


def decode(boundaries: Boundaries, start: int, stop: int) -> list[int]:
    """The lengths at which copies are wanted when the tokens are decoded one by one."""
    return [n + 1 for n in range(start, stop) if boundaries.step(n, n + 1)]


def test_attention_is_kept_in_blocks_of_the_wire_and_states_also_in_blocks_of_vllm() -> None:
    assert keep_interval(ATTENTION) == keep_interval(WINDOWED) == 64
    assert keep_interval(HYBRID) == 128
    assert keep_interval(layout(FULL, STATE, wire=96)) == 384
    assert not needs_slots(ATTENTION) and needs_slots(HYBRID) and needs_slots(WINDOWED)


def test_slots_fit_into_the_memory() -> None:
    assert count_slots(ATTENTION, 10) == 0
    assert count_slots(HYBRID, 10) == 10
    assert count_slots(HYBRID, 10, memory_bytes=7_999) == 3
    assert slot_blocks(HYBRID, HYBRID.groups[1]) == 1
    window = (100 + 1 + 2 * BLOCK) * 16
    assert count_slots(WINDOWED, 10, memory_bytes=3 * window) == 3
    blocks = slot_blocks(WINDOWED, WINDOWED.groups[1])
    for length in range(64, 1024, 64):  # every window at a boundary fits
        first = WINDOWED.groups[1].first_token(length)
        assert (length - 1) // BLOCK - first // BLOCK < blocks


def test_states_are_copied_at_the_last_boundary_of_the_prompt_and_while_decoding() -> None:
    boundaries = Boundaries(HYBRID, prompt_tokens=300)
    chunks = [(0, 128), (128, 256), (256, 300)]
    assert [boundaries.step(*chunk) for chunk in chunks] == [False, True, False]
    assert decode(boundaries, 300, 600) == [384, 512]


def test_the_last_copy_is_kept() -> None:
    boundaries = Boundaries(HYBRID, prompt_tokens=300)
    tables = ([1, 2, 3, 4, 5], [0, 0, 6, 7, 8])
    boundaries.step(0, 300)
    assert boundaries.last(known_tokens=301) == (0, ())
    assert decode(boundaries, 300, 384) == [384]
    assert boundaries.copy(tables) == (Move(1, 0, 384, (6,)),)
    assert decode(boundaries, 384, 512) == [512]
    moves = boundaries.copy(tables)
    assert moves == (Move(1, 0, 512, (7,)),)
    decode(boundaries, 512, 520)
    assert boundaries.last(known_tokens=521) == (512, moves)
    assert boundaries.attention(512, {"full": 256}, tables) == (Move(0, 256, 512, (3, 4)),)
    assert boundaries.attention(512, {"full": 512}, tables) == ()


def test_a_length_beyond_the_known_tokens_is_not_kept() -> None:
    """A step that was running when the request was aborted has computed a token with no id."""
    boundaries = Boundaries(HYBRID, prompt_tokens=300)
    decode(boundaries, 299, 384)
    boundaries.copy(([1, 2, 3], [0, 0, 6]))
    assert boundaries.last(known_tokens=383) == (0, ())
    attention = Boundaries(ATTENTION, prompt_tokens=300)
    decode(attention, 299, 384)
    assert attention.last(known_tokens=383) == (320, ())


def test_windows_are_copied_with_the_blocks_that_they_need() -> None:
    boundaries = Boundaries(WINDOWED, prompt_tokens=60)
    boundaries.step(0, 60)
    assert decode(boundaries, 60, 192) == [64, 128, 192]
    tables = ([1, 2], [3, 4])
    assert boundaries.copy(tables) == (Move(1, 93, 192, (3, 4)),)


def test_a_block_that_vllm_has_freed_is_an_error() -> None:
    boundaries = Boundaries(HYBRID, prompt_tokens=128)
    assert boundaries.step(0, 128)
    with pytest.raises(EngineError, match="128 tokens is missing"):
        boundaries.copy(([1], [0]))
    with pytest.raises(EngineError, match="blocks 0 to 1 are missing"):
        boundaries.attention(128, {}, ([0], [2]))


@pytest.mark.parametrize("model", [ATTENTION, HYBRID])
def test_a_request_that_is_computed_again_is_not_kept(model: CacheLayout) -> None:
    boundaries = Boundaries(model, prompt_tokens=300)
    boundaries.step(0, 300)
    decode(boundaries, 300, 380)
    boundaries.step(0, 380)  # after a preemption
    assert boundaries.lost
    assert decode(boundaries, 380, 600) == [] and boundaries.last(known_tokens=600) == (0, ())


def test_several_tokens_in_one_step_of_decoding_are_not_kept() -> None:
    boundaries = Boundaries(ATTENTION, prompt_tokens=300)
    boundaries.step(0, 300)
    boundaries.step(300, 303)  # some of them may be rejected drafts
    assert boundaries.lost and boundaries.last(known_tokens=400) == (0, ())
