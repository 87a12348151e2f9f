from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MLAAttentionSpec

from prfaas.errors import EngineError, InputError
from prfaas.integrations.vllm.caches.groups import Move
from prfaas.integrations.vllm.caches.native_layout import native_layout
from prfaas.kvspec import FullAttention, LinearState, Segment, SlidingWindow, segment_bytes
from tests.vllm.models import BLOCK_TOKENS, WINDOW, config, falcon, full, gemma, state, window


def test_a_hybrid_is_described_by_its_native_blocks() -> None:
    layout = native_layout(falcon(), 1)
    attention, states = layout.spec.groups
    assert attention == FullAttention("full0", (0, 1), 2 * 2 * 32 * 4)
    assert states == LinearState("state1", (2, 3), (3 * 320 + 8 * 32 * 32) * 4)
    assert layout.block_tokens == BLOCK_TOKENS


def test_windows_are_groups_of_their_own() -> None:
    layout = native_layout(gemma(), 1)
    assert [type(group) for group in layout.spec.groups] == [
        SlidingWindow,
        SlidingWindow,
        FullAttention,
    ]
    assert layout.groups[0].spec.window == WINDOW
    # The oldest block with a token that the next one still attends to.
    assert layout.groups[0].first_token(1000) == 1000 - WINDOW + 1
    assert layout.round_down(layout.groups[0].first_token(1023)) == 7 * BLOCK_TOKENS
    assert layout.groups[0].first_token(10) == 0


def test_a_move_is_one_segment_per_layer_of_whole_blocks() -> None:
    layout = native_layout(falcon(), 1)
    move = layout.move(0, 128, 384, [[9, 8, 7, 6]])
    assert move == Move(0, 128, 384, (8, 7))
    segments = layout.segments(move)
    assert segments == [
        ("model.layers.0.attn", Segment("full0", 0, 128, 384)),
        ("model.layers.1.attn", Segment("full0", 1, 128, 384)),
    ]
    assert segment_bytes(layout.spec, segments[0][1]) == 2 * full().page_size_bytes


@pytest.mark.parametrize(("mode", "table", "block"), [("none", [5], 5), ("align", [0, 0, 9, 8], 8)])
def test_the_running_state_is_found_in_either_mode(mode: str, table: list[int], block: int) -> None:
    layout = native_layout(falcon(mode), 1)
    assert layout.state_move(1, 500, [[], table]) == Move(1, 0, 500, (block,))


def test_a_block_that_vllm_has_freed_is_not_sent() -> None:
    layout = native_layout(gemma(), 1)
    with pytest.raises(EngineError, match="are missing"):
        layout.move(0, 0, 256, [[0, 5]])
    aligned = native_layout(falcon("align"), 1)
    with pytest.raises(EngineError, match="the state after 128 tokens is missing"):
        aligned.state_move(1, 128, [[], [0, 5]])


def test_every_rank_moves_its_shard() -> None:
    ranks = [native_layout(falcon(), 2, rank) for rank in (0, 1)]
    assert ranks[0].spec == ranks[1].spec
    assert ranks[0].spec["full0"].layers == (0, 2, 1, 3)  # a rank's layers are neighbours
    move = ranks[0].move(0, 0, 128, [[3]])
    by_rank = [[s.layer for _, s in layout.segments(move)] for layout in ranks]
    assert by_rank == [[0, 2], [1, 3]]
    assert all(layout.groups[0].writes for layout in ranks)


def test_replicated_groups_travel_once() -> None:
    few_heads = (full(max_tp_shards=2), ["a"])
    latent = MLAAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    caches = config(few_heads, (latent, ["b"]), (state(tp_replicated=True), ["c"]))
    ranks = [native_layout(caches, 4, rank) for rank in range(4)]
    assert [len(group.spec.layers) for group in ranks[0].groups] == [2, 1, 1]
    assert [layout.groups[0].writes for layout in ranks] == [True, False, True, False]
    assert [layout.groups[1].writes for layout in ranks] == [True, False, False, False]
    move = ranks[0].move(0, 0, 128, [[3]])
    shards = [segment.layer for layout in ranks for _, segment in layout.segments(move)]
    assert shards == [0, 0, 1, 1]
    all_layers = [layer for group in ranks[0].spec.groups for layer in group.layers]
    assert len(set(all_layers)) == len(all_layers)


def test_what_is_not_understood_is_refused_by_name() -> None:
    chunked = ChunkedLocalAttentionSpec(
        block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=256
    )
    with pytest.raises(InputError, match="ChunkedLocalAttentionSpec is not supported"):
        native_layout(config((chunked, ["a"])), 1)
    with pytest.raises(InputError, match="block sizes"):
        native_layout(config((full(), ["a"]), (window(block_size=64), ["b"])), 1)
    with pytest.raises(InputError, match="speculative"):
        native_layout(config((full(), ["a"]), (state(num_speculative_blocks=2), ["b"])), 1)
    with pytest.raises(InputError, match="evenly"):
        native_layout(config((full(max_tp_shards=3), ["a"])), 4)
