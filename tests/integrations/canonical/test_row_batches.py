"""Layers that are copied together have the bytes that they have one by one."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.device import StagingRing
from prfaas.errors import EngineError
from prfaas.integrations.canonical import (
    AttentionConverter,
    AttentionForm,
    StateConverter,
    StateForm,
)
from prfaas.integrations.canonical.row_batches import Piece, RowBatch, load, pieces, save, stage
from prfaas.kvspec.parts import Part
from tests.integrations.canonical.caches import HostPins, raw

BLOCKS = 24


class Arena:
    """Units in any order; a unit has all layers."""

    def __init__(self, layers: int, unit_tokens: int, row_bytes: int, stop: int) -> None:
        self.unit, self.row_bytes = unit_tokens, row_bytes
        self.layer_bytes = unit_tokens * row_bytes
        self.unit_bytes = layers * self.layer_bytes
        self.units = list(reversed(range(-(-stop // unit_tokens))))
        self.memory = mmap.mmap(-1, max(1, len(self.units)) * self.unit_bytes)

    def pages(self, layers: Sequence[int], start: int, stop: int) -> list[memoryview]:
        """Unit by unit, and in each unit layer by layer."""
        found: list[memoryview] = []
        while start < stop:
            unit, within = divmod(start, self.unit)
            count = min(self.unit - within, stop - start)
            for layer in layers:
                at = self.units[unit] * self.unit_bytes + layer * self.layer_bytes
                at += within * self.row_bytes
                found.append(memoryview(self.memory)[at : at + count * self.row_bytes])
            start += count
        return found

    def pages_of(self, piece: Piece) -> list[memoryview]:
        return self.pages(list(piece.layers), piece.tokens.start, piece.tokens.stop)


def form(heads: range) -> AttentionForm:
    parts = Part("keys", (4, 8), "bfloat16"), Part("values", (4, 8), "bfloat16")
    return AttentionForm("content", parts, heads)


@settings(max_examples=40)
@given(st.data())
def test_layers_together_are_the_layers_one_by_one(data: st.DataObject) -> None:
    layers, ratio = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2]))
    kernel, unit = data.draw(st.sampled_from([4, 6, 16])), data.draw(st.sampled_from([1, 4, 8, 10]))
    heads = data.draw(st.sampled_from([range(4), range(1, 3)]))
    order = data.draw(st.sampled_from(["NHD", "HND"]))
    pins = data.draw(st.sampled_from([None, HostPins(777), HostPins(1 << 20)]))
    sizes = (BLOCKS * ratio, len(heads), kernel, 16)
    if order == "NHD":
        sizes = (sizes[0], kernel, len(heads), 16)
    caches = [torch.randn(sizes).to(torch.bfloat16) for _ in range(layers)]
    caches = [cache.transpose(1, 2) if order == "NHD" else cache for cache in caches]
    ring_bytes = data.draw(st.sampled_from([1 << 14, 1 << 20]))
    ring = StagingRing("cpu", ring_bytes=ring_bytes, pins=pins, timeout_s=5)
    singles = [AttentionConverter(cache, BLOCKS, form(heads)) for cache in caches]
    rows = [AttentionConverter(cache, BLOCKS, form(heads), ring).rows for cache in caches]
    tokens = kernel * ratio
    start = data.draw(st.integers(0, 3 * tokens))
    stop = data.draw(st.integers(start + 1, start + 8 * tokens))
    count = -(-stop // tokens) - start // tokens
    ids = data.draw(st.permutations(range(1, BLOCKS)))[:count]
    arena = Arena(layers, unit, singles[0].row_bytes, stop)
    batch = RowBatch(rows, ids, start, stop, unit)
    for piece in pieces(batch, ring.chunk_bytes):
        staged = piece.rows * rows[0].shape.own_bytes
        assert staged <= ring.chunk_bytes or len(piece.blocks) == 1
    arena.memory[:] = bytes([0xA5]) * len(arena.memory)
    save(ring, batch, arena.pages_of)
    size = (stop - start) * singles[0].row_bytes
    for layer, single in enumerate(singles):
        expected = bytearray(bytes([0xA5]) * size)
        single.save(ids, start, stop, [memoryview(expected)])
        assert b"".join(arena.pages([layer], start, stop)) == bytes(expected)
    twins = [cache.clone() for cache in caches]
    for layer, (cache, twin) in enumerate(zip(caches, twins, strict=True)):
        cache.fill_(float("nan"))
        twin.fill_(float("nan"))
        judge = AttentionConverter(twin, BLOCKS, form(heads))
        judge.load(ids, start, stop, arena.pages([layer], start, stop))
    load(ring, batch, arena.pages_of)
    ring.finish_loads()
    for cache, twin in zip(caches, twins, strict=True):
        assert raw(cache) == raw(twin)  # every other row of the blocks is zero
    ring.release(ring.allocate(ring_bytes))  # all staging is free


@pytest.mark.parametrize("pins", [None, HostPins(1000)])
def test_states_of_several_layers(pins: HostPins | None) -> None:
    parts = (Part("state", (4, 6), "float32"),)
    states = [torch.randn(8, 4, 2, 3) for _ in range(3)]
    ring = StagingRing("cpu", ring_bytes=1 << 14, pins=pins, timeout_s=5)
    state_form = StateForm(parts, range(4), transposed=True)
    converters = [StateConverter(None, state, state_form, ring) for state in states]
    batch = RowBatch([one.rows_written for one in converters], [5], 0, 1, 1)
    arena = Arena(3, 1, 96, 1)
    assert save(ring, batch, arena.pages_of) == 3 * 96
    assert bytes(arena.memory) == b"".join(raw(s[5].transpose(1, 2)) for s in states)
    before = [state[5].clone() for state in states]
    for state in states:
        state.fill_(float("nan"))
    load(ring, batch, arena.pages_of)
    ring.finish_loads()
    assert all(torch.equal(s[5], b) for s, b in zip(states, before, strict=True))


def test_a_piece_is_finished_once_and_given_back_after_a_failure() -> None:
    ring = StagingRing("cpu", ring_bytes=1 << 16, timeout_s=0)
    cache = torch.randn(BLOCKS, 4, 16, 16).to(torch.bfloat16)
    rows = AttentionConverter(cache, BLOCKS, form(range(4)), ring).rows
    batch = RowBatch([rows, rows], [3], 0, 16, 16)
    (staged,) = stage(ring, batch)
    with pytest.raises(EngineError, match="do not fit into pages"):
        staged.begin([memoryview(bytearray(8))])
    with pytest.raises(EngineError, match="not in staging any more"):
        staged.begin([memoryview(bytearray(2 * 16 * 128))])
    with pytest.raises(EngineError, match="not in staging any more"):
        staged.end()
    staged.discard()
    ring.release(ring.allocate(1 << 16))


def test_layers_of_one_family_are_those_laid_out_alike() -> None:
    ring = StagingRing("cpu", ring_bytes=1 << 14)
    caches = [torch.zeros(8, 4, 16, 16, dtype=torch.bfloat16) for _ in range(2)]
    caches.append(torch.zeros(8, 16, 4, 16, dtype=torch.bfloat16).transpose(1, 2))
    first, second, other = (
        AttentionConverter(cache, 8, form(range(4)), ring).rows.family for cache in caches
    )
    assert first == second != other
