"""Views of single tokens agree with formulas that place one element at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.integrations.canonical.block_copies import BlockCopies, Span, tiles
from prfaas.integrations.canonical.packings import find_cpu_packing, joint_view, token_views
from tests.integrations.canonical.caches import Shape, empty_cache, put_tokens

SHAPES = [
    Shape("content", 3, 2, 16, 8, 8, "HND"),
    Shape("content", 3, 2, 16, 12, 8, "NHD"),
    Shape("content", 3, 2, 16, 8, 8, "packed"),
    Shape("planes", 3, 4, 8, 6, 6),
    Shape("cpu_vec", 3, 2, 32, 16, 16),
    Shape("cpu_vec", 3, 2, 16, 80, 80, "packed"),
    Shape("cpu_amx", 3, 2, 32, 32, 32),
    Shape("cpu_amx", 3, 3, 16, 16, 16, "packed"),
    Shape("cpu_bfmmla", 3, 2, 32, 8, 8),
    Shape("mla", 3, 1, 16, 24, 8),
]


def filled(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = shape.kernel_blocks * shape.tokens
    keys = torch.randn(tokens, shape.heads, shape.k_dim, generator=generator)
    values = torch.randn(tokens, shape.heads, shape.v_dim, generator=generator)
    cache = empty_cache(shape, torch.float32)
    put_tokens(cache, shape, range(shape.kernel_blocks), 0, keys, values)
    return cache, keys, values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_views_are_the_formulas(shape: Shape) -> None:
    cache, keys, values = filled(shape)
    assert not cache.isnan().any()
    for view, rows in zip(
        token_views(cache, shape.packing, shape.k_dim, shape.v_dim), (keys, values), strict=True
    ):
        assert view.heads == shape.heads
        assert torch.equal(view.view.flatten().view(-1), rows.flatten())
        assert view.view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), shape=st.sampled_from(SHAPES))
def test_any_range_of_tokens(data: st.DataObject, shape: Shape) -> None:
    cache, keys, values = filled(shape)
    block = data.draw(st.integers(0, 2))
    blocks = data.draw(st.integers(1, 3 - block))
    last = data.draw(st.integers(0, blocks * shape.tokens))
    first = data.draw(st.integers(0, last))
    for view, expected in zip(
        token_views(cache, shape.packing, shape.k_dim, shape.v_dim), (keys, values), strict=True
    ):
        row_bytes = expected[0].numel() * 4 + 8
        plain = data.draw(st.booleans())
        copies = BlockCopies(view, torch.float32, row_bytes, 4, plain=plain)
        rows = torch.zeros(last - first, row_bytes, dtype=torch.uint8)
        elements = rows.view(-1).view(copies.dtype)
        covered = 0
        for target, source in copies.pairs(
            elements, 0, [Span(-first, block, blocks)], 0, last - first
        ):
            assert target.shape == source.shape
            target.copy_(source)
            covered += target.nbytes
        assert covered == expected[0].nbytes * (last - first)
        found = rows.view(torch.float32)[:, 1:-1]
        tokens = expected[block * shape.tokens :][first:last]
        assert torch.equal(found, tokens.flatten(1))
        assert not rows.view(torch.float32)[:, [0, -1]].any()


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 256), st.integers(0, 256)
)
def test_tiles_cover_a_range_once_and_in_order(factors: list[int], low: int, high: int) -> None:
    total = math.prod(factors)
    first, last = sorted((low % (total + 1), high % (total + 1)))
    strides = [math.prod(factors[n + 1 :]) for n in range(len(factors))]
    found: list[int] = []
    for depth, at, size, offset in tiles(factors, strides, first, last):
        assert at == offset  # with the strides of an undivided axis
        found += range(at, at + size * strides[depth])
    assert found == list(range(first, last))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_joint_view_is_a_row(shape: Shape) -> None:
    cache, keys, values = filled(shape)
    joint = joint_view(cache, shape.packing, shape.k_dim, shape.v_dim)
    if shape.packing.startswith("cpu") or shape.k_dim != shape.v_dim and shape.packing != "mla":
        assert joint is None
        return
    assert joint is not None
    rows = torch.cat((keys.flatten(1), values.flatten(1)), dim=1)
    copied = joint.contiguous().view(-1).view(torch.float32)
    assert torch.equal(copied, rows.flatten())


@pytest.mark.parametrize("packing", ["cpu_vec", "cpu_amx", "cpu_bfmmla"])
@pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_packing_is_recognised_by_what_is_written(packing, fp8) -> None:
    shape = Shape(packing, 2, 2, 32, 64, 64)

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        if fp8 is not None:
            keys, values = keys.to(fp8).view(torch.uint8), values.to(fp8).view(torch.uint8)
        put_tokens(cache, shape, [1], 0, keys, values)

    found = find_cpu_packing(write, torch.bfloat16, block_tokens=32, dim=64, fp8=fp8)
    assert found == packing


def test_an_unknown_packing_is_not_recognised() -> None:
    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        cache[1] = torch.cat((values, keys), dim=2).transpose(0, 1)

    assert find_cpu_packing(write, torch.float32, block_tokens=32, dim=64) is None


def test_halves_of_a_rope_part() -> None:
    cache = torch.arange(2 * 4 * 10.0).view(2, 1, 4, 10)
    _, rope = token_views(cache, "mla", 4, 6)
    halves = rope.in_halves()
    assert halves.view.flatten(-2)[0, 0, 0].tolist() == [4, 6, 8, 5, 7, 9]


@pytest.mark.parametrize(
    ("sizes", "packing", "dims"),
    [
        ((4, 2, 16, 20), "content", (8, 8)),  # padded content
        ((4, 2, 16, 24), "mla", (16, 8)),  # two head slots
        ((4, 16, 20), "mla", (8, 8)),
        ((4, 3, 16, 16), "planes", (8, 8)),
        ((4, 2, 16, 17), "planes", (8, 8)),
        ((4, 2, 24, 32), "cpu_amx", (16, 16)),  # 24 tokens are not whole tiles
        ((4, 2, 32, 16), "cpu_amx", (8, 8)),
        ((4, 2, 12, 16), "cpu_bfmmla", (8, 8)),
        ((4, 2, 16, 20), "cpu_vec", (8, 12)),
        ((4, 2, 16, 20), "cpu_vec", (8, 8)),
        ((4, 2, 16), "content", (8, 8)),
        ((4, 2, 16, 16), "shuffled", (8, 8)),
    ],
)
def test_caches_of_other_packings_are_refused(sizes, packing, dims) -> None:
    with pytest.raises(InputError, match="packing"):
        token_views(torch.zeros(sizes), packing, *dims)


def test_a_cpu_packing_needs_contiguous_heads() -> None:
    cache = torch.zeros(4, 16, 2, 16).transpose(1, 2)
    with pytest.raises(InputError, match="strides"):
        token_views(cache, "cpu_vec", 8, 8)
