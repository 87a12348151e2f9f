from __future__ import annotations

import pytest

from prfaas.cache.checkpoints import (
    DEFAULT_SPARE_TOKENS,
    BranchPoints,
    Checkpoints,
    EveryBlocks,
    LastBoundary,
    checkpoint_policy,
)
from prfaas.errors import InputError


def test_last_boundary() -> None:
    assert LastBoundary().plan(blocks=9, hit=3, attention=5) == Checkpoints((9,))
    assert LastBoundary().plan(blocks=9, hit=9, attention=9) == Checkpoints(())


def test_every_n_blocks_beyond_the_hit() -> None:
    assert EveryBlocks(3).plan(blocks=9, hit=3, attention=5) == Checkpoints((6, 9))
    assert EveryBlocks(3).plan(blocks=2, hit=0, attention=0) == Checkpoints(())


def test_branch_points_are_the_divergence_and_the_end() -> None:
    assert BranchPoints().plan(blocks=9, hit=3, attention=5) == Checkpoints((5, 9))
    assert BranchPoints().plan(blocks=9, hit=5, attention=5) == Checkpoints((9,))
    assert BranchPoints().plan(blocks=5, hit=3, attention=5) == Checkpoints((5,))


def test_spares_fill_the_space_between() -> None:
    plan = BranchPoints(spare_interval=2).plan(blocks=9, hit=3, attention=6)
    assert plan == Checkpoints((6, 9), (4, 8))


def test_names() -> None:
    assert checkpoint_policy("default", 512) == BranchPoints(DEFAULT_SPARE_TOKENS // 512)
    assert checkpoint_policy("default", 10**6) == BranchPoints(1)
    assert checkpoint_policy("last", 64) == LastBoundary()
    assert checkpoint_policy("branch", 64) == BranchPoints()
    assert checkpoint_policy("every:7", 64) == EveryBlocks(7)


@pytest.mark.parametrize("name", ["", "every", "every:0", "every:-1", "every:x", "last:2", "LRU"])
def test_bad_names_say_what_to_use(name: str) -> None:
    with pytest.raises(InputError, match="every:N"):
        checkpoint_policy(name, 64)
