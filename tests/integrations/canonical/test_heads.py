"""Every head and channel of a model is held by some rank, and written by exactly one."""

from __future__ import annotations

import pytest

from prfaas.errors import InputError
from prfaas.integrations.canonical.heads import ConvShare, Heads, delta_rule_share, mamba2_share
from prfaas.kvspec import Linear


@pytest.mark.parametrize(
    ("total", "ranks"), [(8, 1), (8, 2), (8, 8), (2, 8), (1, 4), (4, 4), (12, 4), (3, 6)]
)
def test_each_head_is_written_once(total: int, ranks: int) -> None:
    heads = Heads(total, ranks)
    written = [head for rank in range(ranks) if heads.writes(rank) for head in heads.of(rank)]
    assert written == list(range(total))
    assert heads.shares * heads.copies == ranks
    for rank in range(ranks):  # as vLLM's loader of weights divides heads
        assert heads.of(rank).start == rank * total // ranks
        assert len(heads.of(rank)) == max(1, total // ranks)


@pytest.mark.parametrize(("total", "ranks"), [(8, 3), (3, 2), (6, 4), (0, 1), (4, 0), (4, -2)])
def test_heads_that_ranks_cannot_share_are_refused(total: int, ranks: int) -> None:
    with pytest.raises(InputError, match="tensor_parallel_size"):
        Heads(total, ranks)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(InputError, match=f"no rank {rank}"):
        Heads(4, 2).of(rank)
    with pytest.raises(InputError, match=f"no rank {rank}"):
        delta_rule_share(Linear((0,), 4, 8, 2, 3, 4), rank, 2)


def written(shares: list[ConvShare]) -> list[int]:
    return sorted(
        channel
        for share in shares
        for run, is_written in zip(share.held, share.written, strict=True)
        if is_written
        for channel in run
    )


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (1, 2), (1, 4), (4, 1), (4, 2), (4, 4)])
def test_mamba2_channels(groups: int, ranks: int) -> None:
    linear = Linear((0,), k_heads=groups, v_heads=8, k_dim=5, v_dim=3, conv_kernel=4)
    shares = [mamba2_share(linear, rank, ranks) for rank in range(ranks)]
    channels = 8 * 3 + 2 * groups * 5
    assert written(shares) == list(range(channels))
    for rank, share in enumerate(shares):
        x, b, c = share.held
        assert list(x) == list(range(rank * 24 // ranks, (rank + 1) * 24 // ranks))
        whole = groups == 1
        assert len(b) == len(c) == groups * 5 // (1 if whole else ranks)
        assert b.start == 24 + (0 if whole else rank * len(b))
        assert c.start == 24 + groups * 5 + (0 if whole else rank * len(c))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_delta_rule_channels(ranks: int) -> None:
    linear = Linear((0,), k_heads=4, v_heads=8, k_dim=5, v_dim=3, conv_kernel=4)
    shares = [delta_rule_share(linear, rank, ranks) for rank in range(ranks)]
    assert written(shares) == list(range(2 * 20 + 24))
    assert [run.start for run in shares[-1].held] == [
        (ranks - 1) * 20 // ranks,
        20 + (ranks - 1) * 20 // ranks,
        40 + (ranks - 1) * 24 // ranks,
    ]


def test_linear_layers_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(InputError, match="3 groups"):
        mamba2_share(Linear((0,), 3, 8, 5, 3, 4), 0, 2)
    with pytest.raises(InputError, match="9 heads"):
        mamba2_share(Linear((0,), 1, 9, 5, 3, 4), 0, 2)
    with pytest.raises(InputError, match="2 heads"):
        delta_rule_share(Linear((0,), 2, 8, 5, 3, 4), 0, 4)
