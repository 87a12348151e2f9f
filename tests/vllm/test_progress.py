"""Every block exactly once, whatever the chunks; states only at their own length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import EngineError
from prfaas.integrations.vllm.caches.groups import Move
from prfaas.integrations.vllm.caches.native_layout import native_layout
from prfaas.integrations.vllm.progress import PrefillProgress, moves_to_load
from tests.vllm.models import BLOCK_TOKENS, WINDOW, falcon, gemma

FALCON = native_layout(falcon(), 1)
ALIGNED = native_layout(falcon("align"), 1)
GEMMA = native_layout(gemma(), 1)


def window_table(computed: int, stop: int, offset: int) -> list[int]:
    """As vLLM keeps it during a step from `computed` to `stop`: null before the window."""
    first = max(0, computed - WINDOW + 1) // BLOCK_TOKENS
    return [0 if block < first else offset + block for block in range(-(-stop // BLOCK_TOKENS))]


def grown(stop: int, offset: int) -> list[int]:
    return [offset + block for block in range(-(-stop // BLOCK_TOKENS))]


@given(
    tokens=st.integers(1, 1200),
    chunks=st.lists(st.integers(1, 400), min_size=30, max_size=30),
    skip_blocks=st.integers(0, 9),
)
def test_full_blocks_leave_once_and_all_of_them(
    tokens: int, chunks: list[int], skip_blocks: int
) -> None:
    skip = min(skip_blocks, tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    saving = PrefillProgress(GEMMA, tokens, skip_tokens={"full2": skip})
    start, moves = 0, list[Move]()
    for chunk in [*chunks, tokens]:
        stop = min(tokens, start + chunk)
        if start < stop:
            tables = [window_table(start, stop, 100), window_table(start, stop, 200)]
            moves += saving.step(start, stop, [*tables, grown(stop, 300)])
        start = stop
    blocks = [block for move in moves if move.group == 2 for block in move.block_ids]
    assert blocks == list(range(300 + skip // BLOCK_TOKENS, 300 + -(-tokens // BLOCK_TOKENS)))
    first = max(0, tokens - WINDOW + 1) // BLOCK_TOKENS
    for group, offset in ((0, 100), (1, 200)):
        kept = [block for move in moves if move.group == group for block in move.block_ids]
        assert kept == list(range(offset + first, offset + -(-tokens // BLOCK_TOKENS)))


def test_the_state_goes_last_and_with_the_last_token() -> None:
    saving = PrefillProgress(FALCON, 300, skip_tokens={})
    assert [m.group for m in saving.step(0, 256, [[1, 2], [9]])] == [0]
    last = saving.step(256, 300, [[1, 2, 3], [9]])
    assert last == (Move(0, 256, 384, (3,)), Move(1, 0, 300, (9,)))


def test_a_preempted_prefill_sends_nothing_twice() -> None:
    saving = PrefillProgress(FALCON, 300, skip_tokens={})
    saving.step(0, 256, [[1, 2], [9]])
    assert saving.step(0, 256, [[5, 6], [7]]) == ()
    assert [m.block_ids for m in saving.step(256, 300, [[5, 6, 8], [7]])] == [(8,), (7,)]


def test_vllms_own_hit_is_exported_with_the_first_step() -> None:
    saving = PrefillProgress(ALIGNED, 300, skip_tokens={})
    moves = saving.step(256, 300, [[1, 2, 3], [0, 7, 8]])
    assert moves == (Move(0, 0, 384, (1, 2, 3)), Move(1, 0, 300, (8,)))


def test_a_checkpoint_is_saved_where_a_step_ends_on_it() -> None:
    saving = PrefillProgress(FALCON, 300, skip_tokens={}, checkpoint_tokens=(256,))
    assert saving.step(0, 256, [[1, 2], [9]])[-1] == Move(1, 0, 256, (9,))
    hit = PrefillProgress(ALIGNED, 300, skip_tokens={}, checkpoint_tokens=(256,))
    states = [m for m in hit.step(256, 300, [[1, 2, 3], [0, 7, 8]]) if m.group == 1]
    assert states == [Move(1, 0, 256, (7,)), Move(1, 0, 300, (8,))]


def test_a_checkpoint_inside_a_step_is_an_error_not_a_wrong_state() -> None:
    saving = PrefillProgress(FALCON, 300, skip_tokens={}, checkpoint_tokens=(256,))
    with pytest.raises(EngineError, match="after 256 tokens was not kept"):
        saving.step(0, 300, [[1, 2, 3], [9]])


def test_windows_of_a_checkpoint_need_no_step_of_their_own() -> None:
    saving = PrefillProgress(GEMMA, 300, skip_tokens={}, checkpoint_tokens=(256,))
    tables = [window_table(0, 300, 100), window_table(0, 300, 200), grown(300, 300)]
    moves = saving.step(0, 300, tables)
    kept = [block for move in moves if move.group == 0 for block in move.block_ids]
    assert kept == [101, 102]  # block 1 ends the checkpoint and is in the last window too


def test_a_prefix_that_is_there_whole_needs_no_state() -> None:
    saving = PrefillProgress(FALCON, 256, match_tokens=256, skip_tokens={"full0": 256})
    assert saving.step(0, 256, [[1, 2], [9]]) == ()


def test_a_load_leaves_shared_blocks_alone() -> None:
    tables = [[4, 5, 6], [0, 0, 9]]
    assert moves_to_load(ALIGNED, 300, 256, tables) == (
        Move(0, 256, 384, (6,)),
        Move(1, 0, 300, (9,)),
    )
    assert moves_to_load(ALIGNED, 300, 0, tables)[0] == Move(0, 0, 384, (4, 5, 6))


def test_a_load_fills_the_window_only() -> None:
    tables = [window_table(1000, 1000, 100), window_table(1000, 1000, 200), grown(1000, 300)]
    moves = moves_to_load(GEMMA, 1000, 0, tables)
    assert [len(move.block_ids) for move in moves] == [2, 2, 8]
