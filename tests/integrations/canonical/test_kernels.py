"""Triton's kernels and plain torch copy the same bytes. On a machine with a GPU: make test-gpu."""

from __future__ import annotations

import pytest
import torch

from prfaas.device.row_pages import Column, RowShape
from prfaas.integrations.canonical import row_moves
from prfaas.integrations.canonical.casts import Cast
from prfaas.integrations.canonical.row_moves import (
    LayerRows,
    RowPart,
    Tokens,
    gather_rows,
    scatter_rows,
)

pytestmark = pytest.mark.gpu


def views(kind: str) -> tuple[torch.Tensor, list[RowPart]]:
    """A cache of 12 blocks, and the parts of its rows."""
    plain = Cast(torch.bfloat16, torch.bfloat16)
    if kind == "states":
        cache = torch.randn(12, 5, 40, 24, device="cuda")
        part = RowPart(cache.transpose(2, 3).unsqueeze(1), (1,), Cast(cache.dtype, cache.dtype), 0)
        return cache, [part]
    if kind == "rope pairs":
        cache = torch.randn(12, 16, 72, device="cuda").to(torch.bfloat16)
        pairs = cache[..., 64:].unflatten(-1, (4, 2)).transpose(-1, -2)
        return cache, [
            RowPart(cache[..., :64], (16,), plain, 0),
            RowPart(pairs, (16,), plain, 128),
        ]
    sizes = (12, 16, 3, 16) if kind == "NHD" else (12, 3, 16, 16)
    cache = torch.randn(sizes, device="cuda").to(torch.bfloat16)
    tokens = cache if kind == "NHD" else cache.transpose(1, 2)
    return cache, [RowPart(tokens.unflatten(-1, (2, 8)).transpose(2, 3), (16,), plain, 0)]


@pytest.mark.parametrize("kind", ["NHD", "HND", "rope pairs", "states"])
@pytest.mark.parametrize("layers", [1, 3])
def test_kernels_and_torch_agree(kind: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [views(kind) for _ in range(layers)]
    own = sum(part.nbytes for part in made[0][1])
    shape = RowShape(own, own, (Column(range(own), 0),))
    rows = [LayerRows(parts, shape, 1) for _, parts in made]
    assert None not in rows[0].layouts
    blocks = [7, 2, 9, 4]
    spans = [Tokens(0, 4, 0, 4, 1)]
    if kind != "states":
        spans = [Tokens(32, 96, 37, 90, 24), Tokens(0, 64, 0, 64, 64), Tokens(16, 80, 20, 21, 7)]

    def indices(numbers: object) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device="cuda")

    for tokens in spans:
        size = layers * (tokens.stop - tokens.start) * own
        found, staged = [], []
        for by_kernel in (True, False):
            with monkeypatch.context() as patch:
                if not by_kernel:
                    patch.setattr(row_moves, "_copy_part", lambda: None)
                target = torch.full((size,), 0xA5, dtype=torch.uint8, device="cuda")
                gather_rows(rows, blocks, tokens, target, indices)
                staged.append(target)
                before = [cache.clone() for cache, _ in made]
                for cache, _ in made:
                    cache.fill_(float("nan"))
                scatter_rows(rows, blocks, tokens, target, indices)
                found.append([cache.clone() for cache, _ in made])
                for (cache, _), saved in zip(made, before, strict=True):
                    cache.copy_(saved)
        assert torch.equal(*staged)
        for one, other in zip(*found, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
