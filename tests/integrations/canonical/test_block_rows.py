"""Whole blocks that are copied together have the bytes that they have in the cache."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.device import StagingRing
from prfaas.device.page_pins import PagePins
from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical.block_rows import block_rows, blocks_of
from prfaas.integrations.canonical.row_batches import Piece, RowBatch, load, pieces, save
from tests.integrations.canonical.caches import HostPins

KINDS = ("HND", "NHD", "MLA", "kernel blocks", "state", "odd state", "packed")


def make_caches(kind: str, layers: int, blocks: int, device: str) -> list[torch.Tensor]:
    """Caches as vLLM registers them, with any bytes. Layers of a packed block, and two states of
    each page, share storage."""

    def some(*sizes: int) -> torch.Tensor:
        return torch.randint(0, 256, sizes, dtype=torch.uint8).to(device)

    def numbers(*sizes: int) -> torch.Tensor:
        return some(*sizes[:-1], sizes[-1] * 2).view(torch.bfloat16)

    if kind == "HND":
        return [numbers(blocks, 2, 16, 24) for _ in range(layers)]
    if kind == "NHD":
        return [numbers(blocks, 16, 2, 24).transpose(1, 2) for _ in range(layers)]
    if kind == "MLA":
        return [numbers(blocks, 1, 16, 36) for _ in range(layers)]
    if kind == "kernel blocks":
        return [numbers(blocks * 3, 2, 4, 24) for _ in range(layers)]
    if kind == "packed":  # the block outermost, its layers inside
        whole = numbers(blocks, layers, 16, 2, 24)
        return [whole[:, layer].transpose(1, 2) for layer in range(layers)]
    size = 333 if kind == "odd state" else 320
    pages = [some(blocks, 1, 1, 704).view(torch.int8) for _ in range(-(-layers // 2))]
    halves = [page[..., at : at + size] for page in pages for at in (0, 352)]
    return halves[:layers]  # of pages with padding


class Units:
    """Units in any order; a unit has one block of each layer."""

    def __init__(self, order: Sequence[int], layers: int, block_bytes: int) -> None:
        self._order, self._layers, self._block_bytes = order, layers, block_bytes
        self.memory = mmap.mmap(-1, max(1, len(order)) * layers * block_bytes)

    def page(self, unit: int, layer: int) -> memoryview:
        at = (self._order[unit] * self._layers + layer) * self._block_bytes
        return memoryview(self.memory)[at : at + self._block_bytes]

    def pages_of(self, first: int, piece: Piece) -> list[memoryview]:
        units = range(piece.tokens.start - first, piece.tokens.stop - first)
        return [self.page(unit, layer) for unit in units for layer in piece.layers]


def check_copies(
    caches: Sequence[torch.Tensor], num_blocks: int, ids: Sequence[int], first: int,
    order: Sequence[int], ring: StagingRing,
) -> None:  # fmt: skip
    """Saves blocks, spoils the caches and loads the blocks into other places."""
    blocks = [blocks_of(cache, num_blocks) for cache in caches]
    before = [one.cpu().clone() for one in blocks]
    rows = [block_rows(one) for one in blocks]
    assert len({one.family for one in rows}) == 1
    units = Units(order, len(caches), blocks[0].shape[1])
    batch = RowBatch(rows, ids, first, first + len(ids), 1)
    for piece in pieces(batch, ring.chunk_bytes):
        assert piece.rows * blocks[0].shape[1] <= ring.chunk_bytes or piece.rows == 1
    written = save(ring, batch, partial(units.pages_of, first))
    assert written == len(ids) * len(caches) * blocks[0].shape[1]
    for layer, saved in enumerate(before):
        for unit, block in enumerate(ids):
            assert bytes(units.page(unit, layer)) == saved[block].numpy().tobytes()
    targets = [num_blocks - 1 - block for block in ids]
    for one in blocks:  # never of a shared storage as a whole: its padding belongs to no layer
        one.fill_(0xA5)
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    expected = {at: bytearray(_bytes(storage)) for at, storage in storages.items()}
    for cache, one, saved in zip(caches, blocks, before, strict=True):
        memory = expected[cache.untyped_storage().data_ptr()]
        for block, target in zip(ids, targets, strict=True):
            at = one.storage_offset() + target * one.stride(0)
            memory[at : at + one.shape[1]] = saved[block].numpy().tobytes()
    ring.fence()
    load(ring, RowBatch(rows, targets, first, first + len(ids), 1), partial(units.pages_of, first))
    ring.finish_loads()
    for at, storage in storages.items():
        assert _bytes(storage) == bytes(expected[at])  # and no other byte has changed


def _bytes(storage: torch.UntypedStorage) -> bytes:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return bytes(flat.set_(storage).cpu().numpy().tobytes())


@settings(max_examples=60)
@given(st.data())
def test_whole_blocks_of_several_layers(data: st.DataObject) -> None:
    kind, layers = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 5))
    num_blocks = data.draw(st.integers(2, 20))
    caches = make_caches(kind, layers, num_blocks, "cpu")
    ids = data.draw(st.lists(st.integers(0, num_blocks - 1), unique=True, min_size=1))
    first = data.draw(st.integers(0, 9))
    order = data.draw(st.permutations(range(len(ids))))
    pins = data.draw(st.sampled_from([None, HostPins(777), HostPins(1 << 20)]))
    ring_bytes = data.draw(st.sampled_from([1 << 14, 1 << 16, 1 << 20]))
    ring = StagingRing("cpu", ring_bytes=ring_bytes, pins=pins, timeout_s=5)
    check_copies(caches, num_blocks, ids, first, order, ring)
    ring.release(ring.allocate(ring_bytes))  # all staging is free


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pinned", [True, False])
def test_whole_blocks_on_a_gpu(kind: str, pinned: bool) -> None:
    """Several pieces, with registered pages and without."""
    caches = make_caches(kind, 6, 40, "cuda")
    ids = [7, 39, 1, 16, 0, 23, 22, 21, 31, 2]
    pins = PagePins("cuda") if pinned else None
    ring = StagingRing("cuda", ring_bytes=1 << 16, pins=pins, timeout_s=20)
    check_copies(caches, 40, ids, 3, [4, 3, 9, 0, 1, 2, 8, 5, 7, 6], ring)
    ring.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(8, 4, 16)[:, :, :8],  # a gap within a block
        lambda: torch.zeros(2, 8, 16).transpose(0, 1),  # heads outermost
        lambda: torch.zeros(16, 2, 4)[:, 0],  # kernel blocks with gaps between them
        lambda: torch.zeros(9, 4),
    ],
)
def test_blocks_that_are_not_contiguous_are_refused(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(InputError, match="does not divide into 8 contiguous blocks"):
        blocks_of(make(), 8)


def test_rings_of_several_arenas_share_staging() -> None:
    ring = StagingRing("cpu", ring_bytes=1 << 14, timeout_s=0.01)
    pins = HostPins(1 << 20), HostPins(1 << 20)
    first, second = (StagingRing(ring.memory, pins=one, timeout_s=ring.timeout_s) for one in pins)
    caches = make_caches("HND", 3, 8, "cpu")
    for one in (first, second):
        check_copies(caches, 8, [5, 2], 0, [1, 0], one)
    extent = first.allocate(1 << 14)
    with pytest.raises(EngineError, match="of staging were free"):
        second.allocate(256)
    second.release(extent)
    first.close()
    assert not pins[0].registered
    assert pins[1].registered  # by its own arena
    check_copies(caches, 8, [5, 2], 0, [1, 0], second)
    second.close()
    assert not pins[1].registered
    assert not ring.memory.has_host
    for _ in range(2):  # pages that CUDA does not register go over the host's staging
        refused = HostPins()
        refused.refuses = True
        third = StagingRing(ring.memory, pins=refused)
        check_copies(caches, 8, [5, 2], 0, [1, 0], third)
        assert ring.memory.has_host
