"""vLLM's groups against the model's: the same pairs in every process, every token exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MLAAttentionSpec

from prfaas.errors import EngineError, InputError
from prfaas.integrations.vllm.caches.canonical_layout import WireForm, canonical_layout
from prfaas.integrations.vllm.caches.groups import CacheLayout, Move
from prfaas.integrations.vllm.progress import PrefillProgress, moves_to_load
from prfaas.kvspec import GQA, MLA, Geometry, Linear, Segment, WindowedGQA
from tests.vllm.models import WINDOW, config, full, state, window

WIRE_BLOCK = 64
BLOCK = 96  # of vLLM: neither a multiple of the wire's nor a divisor
ATTENTION = GQA((0, 1), 2, 32, 32)
STATES = Linear((0, 1), 1, 8, 32, 32, 4)


def wire(*geometries: Geometry, layers: int) -> WireForm:
    return WireForm(geometries, layers, WIRE_BLOCK, "float32", "float32")


def falcon(mode: str = "none") -> CacheLayout:
    """Attention and Mamba-2 in both layers; vLLM numbers the mixers behind the layers."""
    attention = (full(block_size=BLOCK), ["model.layers.0.attn", "model.layers.1.attn"])
    mixers = (state(mode, block_size=BLOCK), ["model.2.mixer", "model.3.mixer"])
    return canonical_layout(config(attention, mixers), wire(ATTENTION, STATES, layers=2))


def gemma_groups(stage: int | None = None) -> CacheLayout:
    """Two groups of one window layer and one of full attention; with `stage`, the layers of one of
    two pipeline stages."""
    names = {0: ["model.layers.0.attn"], 1: ["model.layers.1.attn"], 2: ["model.layers.2.attn"]}
    mine = {None: {0, 1, 2}, 0: {0}, 1: {1, 2}}[stage]
    groups = [
        (spec, names[number] if number in mine else [])
        for number, spec in enumerate(
            [window(block_size=32), window(block_size=32), full(block_size=BLOCK)]
        )
    ]
    geometries = (WindowedGQA((0, 1), 2, 32, 32, WINDOW), GQA((2,), 2, 32, 32))
    return canonical_layout(config(*groups), wire(*geometries, layers=3))


def test_segments_name_the_models_layers_whatever_vllm_calls_them() -> None:
    layout = falcon()
    assert layout.spec == wire(ATTENTION, STATES, layers=2).spec
    assert (layout.block_tokens, layout.whole) == (WIRE_BLOCK, 1)
    attention = layout.segments(Move(0, 5, 70, (1,)))
    assert [segment for _, segment in attention] == [
        Segment("full0", 0, 5, 70),
        Segment("full0", 1, 5, 70),
    ]
    states = layout.segments(Move(1, 0, 70, (1,)))
    assert states == [
        ("model.2.mixer", Segment("linear0", 0, 0, 70)),
        ("model.3.mixer", Segment("linear0", 1, 0, 70)),
    ]


def test_every_pipeline_stage_and_the_scheduler_make_the_same_pairs() -> None:
    whole, first, second = gemma_groups(), gemma_groups(0), gemma_groups(1)
    pairs = [(g.index, g.kind, g.spec.name) for g in whole.groups]
    assert pairs == [(0, "window", "window0"), (1, "window", "window0"), (2, "full", "full0")]
    for stage in (first, second):
        assert [(g.index, g.kind, g.spec.name) for g in stage.groups] == pairs
        assert stage.spec == whole.spec
    layers = [
        sorted(number for _, number in a.layers + b.layers)
        for a, b in zip(first.groups, second.groups, strict=True)
    ]
    assert layers == [[number for _, number in group.layers] for group in whole.groups]


def test_windows_that_vllm_keeps_like_full_attention_stay_windows() -> None:
    merged = full(block_size=BLOCK, sliding_window=WINDOW)
    names = [f"model.layers.{number}.attn" for number in range(3)]
    geometries = (WindowedGQA((0, 1), 2, 32, 32, WINDOW), GQA((2,), 2, 32, 32))
    layout = canonical_layout(config((merged, names)), wire(*geometries, layers=3))
    found = [(g.index, g.kind, [n for _, n in g.layers]) for g in layout.groups]
    assert found == [(0, "window", [0, 1]), (0, "full", [2])]


@given(
    tokens=st.integers(1, 1200),
    chunks=st.lists(st.integers(1, 400), min_size=30, max_size=30),
    skip=st.integers(0, 600),
)
def test_every_token_leaves_once_with_the_block_that_holds_it(
    tokens: int, chunks: list[int], skip: int
) -> None:
    layout = gemma_groups()
    skip = min(skip, tokens) // WIRE_BLOCK * WIRE_BLOCK
    saving = PrefillProgress(layout, tokens, skip_tokens={"full0": skip})
    start, moves = 0, list[Move]()
    for chunk in [*chunks, tokens]:
        stop = min(tokens, start + chunk)
        if start < stop:
            moves += saving.step(start, stop, tables(start, stop))
        start = stop
    for at, first in (
        (0, max(0, tokens - WINDOW + 1)),
        (1, max(0, tokens - WINDOW + 1)),
        (2, skip),
    ):
        saved = [token for m in moves if m.group == at for token in range(m.start, m.stop)]
        assert saved == list(range(first, tokens))
    for move in moves:
        size = layout.groups[move.group].block_tokens
        offset = 1000 * (move.group + 1)
        blocks = range(move.start // size, -(-move.stop // size))
        assert move.block_ids == tuple(offset + block for block in blocks)


def tables(computed: int, stop: int) -> list[list[int]]:
    """As vLLM keeps them during a step from `computed` to `stop`: null before the window."""
    dropped = max(0, computed - WINDOW + 1) // 32
    return [
        *(
            [
                0 if block < dropped else 1000 * (group + 1) + block
                for block in range(-(-stop // 32))
            ]
            for group in range(2)
        ),
        [3000 + block for block in range(-(-stop // BLOCK))],
    ]


def test_a_load_begins_with_the_first_block_that_no_other_request_uses() -> None:
    layout = falcon("align")
    ids = [[4, 5, 6, 7], [0, 0, 0, 9]]
    assert moves_to_load(layout, 300, 192, ids) == (
        Move(0, 192, 300, (6, 7)),
        Move(1, 0, 300, (9,)),
    )


def test_a_load_fills_the_window_only() -> None:
    moves = moves_to_load(gemma_groups(), 1000, 0, tables(1000, 1000))
    assert [(move.start, move.stop) for move in moves] == [
        (1000 - WINDOW + 1, 1000),
        (1000 - WINDOW + 1, 1000),
        (0, 1000),
    ]


def test_a_prefill_resumes_in_the_middle_of_a_block_only_without_places_for_states() -> None:
    assert falcon("none").can_resume_at(64) and gemma_groups().can_resume_at(64)
    assert not falcon("align").can_resume_at(64)
    assert falcon("align").can_resume_at(192)


def test_a_block_that_vllm_has_freed_is_not_sent() -> None:
    with pytest.raises(EngineError, match="are missing"):
        gemma_groups().move(0, 10, 40, [[0, 5], [], []])


def test_what_has_no_counterpart_is_refused_by_name() -> None:
    chunked = ChunkedLocalAttentionSpec(
        block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=256
    )
    form = wire(GQA((0,), 2, 32, 32), layers=1)
    with pytest.raises(InputError, match=r"ChunkedLocalAttentionSpec.*cannot be converted"):
        canonical_layout(config((chunked, ["model.layers.0.attn"])), form)
    with pytest.raises(InputError, match=r"model\.layers\.1\.attn.*speculative decoding"):
        canonical_layout(config((full(), ["model.layers.0.attn", "model.layers.1.attn"])), form)
    names = ["model.layers.0.attn", "draft.layers.0.attn"]
    with pytest.raises(InputError, match=r"draft\.layers\.0\.attn is a second cache of layer 0"):
        canonical_layout(config((full(), names)), form)
    with pytest.raises(InputError, match="has no number"):
        canonical_layout(config((full(), ["attn"])), form)
    with pytest.raises(InputError, match=r"describes no such cache of layer 0"):
        canonical_layout(
            config((full(), ["model.layers.0.attn"])), wire(GQA((1,), 2, 32, 32), layers=2)
        )


def test_latents_are_full_attention() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    layout = canonical_layout(
        config((latent, ["model.layers.0.attn"])), wire(MLA((0,), 512, 64), layers=1)
    )
    assert [(g.kind, g.spec.name) for g in layout.groups] == [("full", "full0")]
