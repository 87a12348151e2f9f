"""Tokens of attention layers, from any cache into any other through canonical bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas.device import StagingRing
from prfaas.engine.hf import rows as hf_rows
from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical import AttentionConverter, AttentionForm, Heads, Packing
from prfaas.kvspec.parts import Part
from tests.integrations.canonical.caches import (
    DTYPES,
    TOKEN_TILE,
    HostPins,
    Pages,
    Shape,
    empty_cache,
    put_tokens,
    raw,
    rows_of,
)

# Packing, order of the axes in memory, dims of keys and values.
LAYOUTS: list[tuple[Packing, str, int, int]] = [
    ("content", "HND", 16, 16),
    ("content", "NHD", 16, 16),
    ("content", "packed", 16, 16),
    ("content", "packed NHD", 16, 16),
    ("content", "NHD", 24, 16),
    ("planes", "HND", 16, 16),
    ("cpu_vec", "HND", 16, 16),
    ("cpu_vec", "packed", 16, 16),
    ("cpu_amx", "HND", 16, 16),
    ("cpu_bfmmla", "HND", 16, 16),
    ("mla", "HND", 24, 8),
]
RINGS = ["none", "staged", "pinned pages"]  # the last two are the path of a GPU, on a CPU


@dataclass(repr=False)
class Engine:
    """All ranks of an engine that holds one layer."""

    converters: list[AttentionConverter]
    caches: list[torch.Tensor]
    shapes: list[Shape]
    heads: Heads
    ratio: int

    def __repr__(self) -> str:
        return f"Engine({self.shapes[0]}, {self.caches[0].dtype}, {self.heads}, {self.ratio})"

    def kernel_blocks(self, block_ids: list[int]) -> list[int]:
        return [block * self.ratio + i for block in block_ids for i in range(self.ratio)]


def parts_of(packing: Packing, heads: int, k_dim: int, v_dim: int, dtype: str) -> tuple[Part, Part]:
    if packing == "mla":
        return Part("latent", (k_dim,), dtype), Part("rope", (v_dim,), dtype)
    return Part("keys", (heads, k_dim), dtype), Part("values", (heads, v_dim), dtype)


def ring_of(kind: str, nbytes: int = 1 << 16) -> StagingRing | None:
    if kind == "none":
        return None
    pins = HostPins() if kind == "pinned pages" else None
    return StagingRing("cpu", ring_bytes=nbytes, pins=pins, timeout_s=5)


@st.composite
def engines(
    draw: st.DrawFn, layout: tuple[Packing, str, int, int], heads: int, wire: str
) -> Engine:
    packing, order, k_dim, v_dim = layout
    ranks = draw(st.sampled_from([r for r in (1, 2, 3, 4, 8) if heads % r == 0 or r % heads == 0]))
    tile = TOKEN_TILE.get(packing, 1)
    tokens = tile * draw(st.integers(1, 24 // tile if tile < 16 else 2))
    ratio = draw(st.sampled_from([1, 1, 2, 3]))
    dtype = DTYPES[draw(st.sampled_from([wire, "float32", "bfloat16"]))]
    held = Heads(heads, ranks)
    ring = ring_of(draw(st.sampled_from(RINGS)), draw(st.sampled_from([1 << 15, 1 << 18])))
    shapes, caches, converters = [], [], []
    for rank in range(ranks):
        shape = Shape(packing, 9 * ratio, len(held.of(rank)), tokens, k_dim, v_dim, order)
        cache = empty_cache(shape, dtype)
        form = AttentionForm(packing, parts_of(packing, heads, k_dim, v_dim, wire), held.of(rank))
        shapes.append(shape)
        caches.append(cache)
        converters.append(AttentionConverter(cache, 9, form, ring))
    return Engine(converters, caches, shapes, held, ratio)


def drawn_pages(data: st.DataObject, row_bytes: int, rows: int) -> Pages:
    cuts = data.draw(st.lists(st.integers(0, rows * row_bytes), max_size=6))
    whole = data.draw(st.booleans())
    cuts = [cut // row_bytes * row_bytes for cut in cuts] if whole else cuts
    return Pages(rows * row_bytes, cuts, data.draw(st.sampled_from([0, 0, 2, 1])))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_engine_to_any_engine(data: st.DataObject) -> None:
    hand_over(data)


@pytest.mark.grid
@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_any_engine_to_any_engine_at_length(data: st.DataObject) -> None:
    hand_over(data)


def hand_over(data: st.DataObject) -> None:
    """One engine's ranks save, another engine's ranks load: other packings, numbers of ranks, block
    sizes, ratios of kernel blocks, strides, pages. Every row of every block that a load touches is
    written or zeroed, and no other block is touched."""
    source_layout = data.draw(st.sampled_from(LAYOUTS))
    packing, _, k_dim, v_dim = source_layout
    target_layout = data.draw(
        st.sampled_from(
            [
                x
                for x in LAYOUTS
                if x[2:] == (k_dim, v_dim) and (x[0] == "mla") == (packing == "mla")
            ]
        )
    )
    heads = 1 if packing == "mla" else data.draw(st.sampled_from([1, 2, 4, 6]))
    wire = data.draw(st.sampled_from(["float32", "bfloat16"]))
    source = data.draw(engines(source_layout, heads, wire))
    target = data.draw(engines(target_layout, heads, wire))
    size = min(source.converters[0].block_tokens, target.converters[0].block_tokens)
    start = data.draw(st.integers(0, 4 * size))
    stop = start + data.draw(st.integers(0, 4 * size))
    generator = torch.Generator().manual_seed(stop)
    keys = torch.randn(stop - start, heads, k_dim, generator=generator).bfloat16().float()
    values = torch.randn(stop - start, heads, v_dim, generator=generator).bfloat16().float()
    expected = rows_of(keys, values, lambda rows: rows.to(DTYPES[wire]))
    row_bytes = source.converters[0].row_bytes

    pages = drawn_pages(data, row_bytes, stop - start)
    ids = drawn_blocks(data, source, start, stop)
    copied = 0
    for rank, (converter, cache, shape) in enumerate(
        zip(source.converters, source.caches, source.shapes, strict=True)
    ):
        held = source.heads.of(rank)
        own = slice(held.start, held.stop)
        first = start % converter.block_tokens
        blocks = source.kernel_blocks(ids)
        put_tokens(cache, shape, blocks, first, keys[:, own], values[:, own])
        if source.heads.writes(rank):
            copied += converter.save(ids, start, stop, pages.views)
    assert pages.content == expected
    assert copied == len(expected)
    assert pages.guards_are_whole()

    pages = drawn_pages(data, row_bytes, stop - start)
    pages.content = expected
    ids = drawn_blocks(data, target, start, stop)
    for rank, (converter, cache, shape) in enumerate(
        zip(target.converters, target.caches, target.shapes, strict=True)
    ):
        held = target.heads.of(rank)
        own = slice(held.start, held.stop)
        assert converter.load(ids, start, stop, pages.views) * heads == len(expected) * len(held)
        judge = empty_cache(shape, cache.dtype)
        blocks = target.kernel_blocks(ids)
        judge[blocks] = 0
        first = start % converter.block_tokens
        put_tokens(judge, shape, blocks, first, keys[:, own], values[:, own])
        assert torch.equal(cache.nan_to_num(777.0), judge.nan_to_num(777.0))
    assert pages.content == expected
    assert pages.guards_are_whole()


def drawn_blocks(data: st.DataObject, engine: Engine, start: int, stop: int) -> list[int]:
    """Blocks in any order, some of them neighbours."""
    size = engine.converters[0].block_tokens
    count = -(-stop // size) - start // size if stop > start else 0
    assume(count <= 8)  # the engine with larger blocks chose the range
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, 9 - count))
        return list(range(first, first + count))
    return data.draw(st.permutations(range(9)))[:count]


@pytest.mark.parametrize("ring", RINGS)
def test_bytes_are_those_of_the_hugging_face_engine(ring: str) -> None:
    shape = Shape("cpu_vec", 6, 3, 32, 16, 16)
    cache = empty_cache(shape, torch.bfloat16)
    keys, values = torch.randn(70, 3, 16).bfloat16(), torch.randn(70, 3, 16).bfloat16()
    put_tokens(cache, shape, [4, 1, 2], 5, keys, values)
    form = AttentionForm("cpu_vec", parts_of("cpu_vec", 3, 16, 16, "bfloat16"), range(3))
    found, expected = Pages(70 * 192, []), Pages(70 * 192, [])
    converter = AttentionConverter(cache, 6, form, ring_of(ring))
    converter.save([4, 1, 2], 37, 107, found.views)
    tokens = hf_rows.token_rows(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    hf_rows.write(tokens, expected.views)
    assert found.content == expected.content


@pytest.mark.parametrize("ring", ["staged", "pinned pages"])
def test_blocks_that_are_larger_than_a_chunk_of_staging(ring: str) -> None:
    """Two of them and the gap of a shorter one before them leave no room for a third."""
    shape = Shape("content", 4, 4, 32, 16, 16)
    cache = empty_cache(shape, torch.float32)
    keys, values = torch.randn(65, 4, 16), torch.randn(65, 4, 16)
    put_tokens(cache, shape, [2, 0, 3], 16, keys, values)
    form = AttentionForm("content", parts_of("content", 4, 16, 16, "float32"), range(4))
    pages = Pages(65 * 512, [])
    converter = AttentionConverter(cache, 4, form, ring_of(ring, 1 << 15))
    assert converter.save([2, 0, 3], 16, 81, pages.views) == 65 * 512
    assert pages.content == rows_of(keys, values, lambda rows: rows)


@pytest.mark.parametrize("ring", RINGS)
def test_rope_parts_in_pairs_travel_in_halves(ring: str) -> None:
    shape = Shape("mla", 4, 1, 16, 8, 6)
    cache = empty_cache(shape, torch.float32)
    latent, pairs = torch.randn(20, 1, 8), torch.randn(20, 1, 6)
    put_tokens(cache, shape, [2, 1], 3, latent, pairs)
    form = AttentionForm("mla", parts_of("mla", 1, 8, 6, "float32"), range(1), rope_pairs=True)
    pages = Pages(20 * 56, [100, 700])
    AttentionConverter(cache, 4, form, ring_of(ring)).save([2, 1], 3, 23, pages.views)
    halves = pairs[..., [0, 2, 4, 1, 3, 5]]
    assert pages.content == rows_of(latent, halves, lambda rows: rows)
    other = empty_cache(shape, torch.float32)
    AttentionConverter(other, 4, form, ring_of(ring)).load([1, 3], 3, 23, pages.views)
    judge = empty_cache(shape, torch.float32)
    judge[[1, 3]] = 0
    put_tokens(judge, shape, [1, 3], 3, latent, pairs)
    assert torch.equal(other.nan_to_num(777.0), judge.nan_to_num(777.0))


def test_a_cache_without_the_head_axis_of_mla() -> None:
    cache = torch.randn(4, 16, 14)
    form = AttentionForm("mla", parts_of("mla", 1, 8, 6, "float32"), range(1))
    pages = Pages(16 * 56, [])
    AttentionConverter(cache, 4, form).save([2], 16, 32, pages.views)
    assert pages.content == raw(cache[2])


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("packing", ["content", "cpu_vec", "cpu_amx", "mla"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("wire", ["bfloat16", "own"])
def test_fp8_caches(ring: str, packing: Packing, fp8: torch.dtype, wire: str) -> None:
    heads, v_dim = (1, 8) if packing == "mla" else (2, 16)
    shape = Shape(packing, 4, heads, 16, 16, v_dim)
    name = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}[fp8]
    dtype = name if wire == "own" else wire
    keys, values = torch.randn(20, heads, 16).to(fp8), torch.randn(20, heads, v_dim).to(fp8)
    cache = empty_cache(shape, torch.uint8)
    put_tokens(cache, shape, [2, 1], 3, keys.view(torch.uint8), values.view(torch.uint8))
    form = AttentionForm(
        packing,
        parts_of(packing, heads, 16, v_dim, dtype),
        range(heads),
        scales=(0.5, 0.25),
        fp8=fp8,
    )
    row_bytes = heads * (16 + v_dim) * (1 if wire == "own" else 2)
    pages = Pages(20 * row_bytes, [50, 300])
    AttentionConverter(cache, 4, form, ring_of(ring)).save([2, 1], 3, 23, pages.views)
    if wire == "own":
        expected = rows_of(keys, values, lambda rows: rows)
    else:
        wide = (keys.float() * 0.5, values.float() * 0.25)
        expected = rows_of(*wide, lambda rows: rows.bfloat16())
    assert pages.content == expected
    other = empty_cache(shape, torch.uint8)
    AttentionConverter(other, 4, form, ring_of(ring)).load([1, 3], 3, 23, pages.views)
    judge = empty_cache(shape, torch.uint8)
    judge[[1, 3]] = 0
    put_tokens(judge, shape, [1, 3], 3, keys.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(other, judge)


def test_whole_rows_are_copied_without_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the views of blocks are copied straight into the pages."""
    shape = Shape("cpu_vec", 4, 2, 16, 16, 16)
    cache = empty_cache(shape, torch.float32, 1.0)
    form = AttentionForm("cpu_vec", parts_of("cpu_vec", 2, 16, 16, "float32"), range(2))
    converter = AttentionConverter(cache, 4, form)
    pages = Pages(40 * 256, [10 * 256, 26 * 256])

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a copy in between")

    for name in ("empty", "cat", "index_select"):
        monkeypatch.setattr(torch, name, forbidden)
    converter.save([1, 2, 3], 3, 43, pages.views)
    converter.load([3, 1, 2], 3, 43, pages.views)


# Bad input ----------------------------------------------------------------------------------------


GOOD = AttentionForm("content", parts_of("content", 4, 8, 8, "float32"), range(2))


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (replace(GOOD, heads=range(0, 4)), "has 2 heads, not the 4"),
        (replace(GOOD, heads=range(3, 5)), "not a range of the heads"),
        (replace(GOOD, heads=range(0, 4, 2)), "not a range of the heads"),
        (replace(GOOD, heads=range(0)), "not a range of the heads"),
        (replace(GOOD, rope_pairs=True), "MLA only"),
        (replace(GOOD, parts=(GOOD.parts[0], Part("values", (4, 8), "bfloat16"))), "data types"),
        (replace(GOOD, parts=(GOOD.parts[0], Part("values", (2, 8), "float32"))), "heads of parts"),
        (replace(GOOD, parts=(GOOD.parts[0], Part("state", (4, 8), "float32"))), "'state'"),
        (replace(GOOD, parts=parts_of("content", 4, 8, 8, "float8_e5m2")), "no fp8 scales"),
        (replace(GOOD, fp8=torch.float8_e5m2, scales=(1.0, 1.0)), "cannot be read as"),
    ],
)
def test_forms_that_do_not_suit_the_cache_are_refused(form: AttentionForm, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        AttentionConverter(torch.zeros(4, 2, 16, 16), 4, form)


def test_kernel_blocks_that_do_not_divide_are_refused() -> None:
    for num_blocks in (3, 0, -1):
        with pytest.raises(InputError, match="num_gpu_blocks"):
            AttentionConverter(torch.zeros(4, 2, 16, 16), num_blocks, GOOD)


def test_a_cache_on_a_device_needs_staging() -> None:
    with pytest.raises(InputError, match="StagingRing"):
        AttentionConverter(torch.zeros(4, 2, 16, 16, device="meta"), 4, GOOD)
    with pytest.raises(InputError, match="does not suit"):
        AttentionConverter(torch.zeros(4, 2, 16, 16, device="meta"), 4, GOOD, ring_of("staged"))


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize(
    ("ids", "start", "stop", "problem"),
    [
        ([1], 0, 17, "lie in 2 blocks of 16 tokens, not in 1"),
        ([1, 2], 16, 32, "lie in 1 blocks"),
        ([1, 2], 15, 17, None),
        ([4], 0, 16, "blocks 4 to 4"),
        ([-1], 0, 16, "blocks -1 to -1"),
        ([1], 5, 3, "not a range"),
        ([], -2, -2, "not a range"),
        ([], 7, 7, None),
    ],
)
def test_blocks_that_do_not_fit_are_refused(ring, ids, start, stop, problem) -> None:
    cache = torch.ones(4, 2, 16, 16)
    converter = AttentionConverter(cache, 4, GOOD, ring_of(ring))
    pages = Pages(max(0, stop - start) * 4 * 16 * 4, [])
    if problem is None:
        converter.save(ids, start, stop, pages.views)
        converter.load(ids, start, stop, pages.views)
        return
    with pytest.raises(EngineError, match=problem):
        converter.save(ids, start, stop, pages.views)
    with pytest.raises(EngineError, match=problem):
        converter.load(ids, start, stop, pages.views)
    assert (cache == 1).all()


@pytest.mark.parametrize("ring", RINGS)
def test_pages_that_do_not_fit_are_refused_before_a_byte_moves(ring: str) -> None:
    cache = torch.ones(4, 2, 16, 16)
    converter = AttentionConverter(cache, 4, GOOD, ring_of(ring))
    pages = Pages(15 * 256, [])
    pages.fill(0)
    with pytest.raises(EngineError, match="pages of 3840 bytes"):
        converter.save([1], 0, 16, pages.views)
    with pytest.raises(EngineError, match="pages of 3840 bytes"):
        converter.load([1], 0, 16, pages.views)
    assert (cache == 1).all() and not any(pages.content)
