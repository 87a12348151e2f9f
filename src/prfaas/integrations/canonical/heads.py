"""Which heads and convolution channels of a model a rank holds, and which of them it writes.

Ranks divide the heads of a layer. Where there are more ranks than heads, several ranks hold the
same head. Their values are not bit-equal (sums are formed in another order), so exactly one of them
writes. vLLM divides convolution channels the same way, part by part:

    Mamba-2      x | B | C    x by heads; B and C by groups; one group is whole on every rank
    delta rule   q | k | v    q and k by key heads, v by value heads (gated delta nets, KDA)

Pure. Independent of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.errors import InputError
from prfaas.kvspec import Linear


@dataclass(frozen=True, slots=True)
class Heads:
    """`total` heads of a layer, divided among `ranks` ranks."""

    total: int
    ranks: int

    def __post_init__(self) -> None:
        if self.total < 1 or self.ranks < 1:
            raise InputError(
                f"{self.total} heads cannot be divided among {self.ranks} ranks",
                where="tensor_parallel_size",
                fix="use at least one head and one rank",
            )
        if max(self.total, self.ranks) % min(self.total, self.ranks):
            raise InputError(
                f"{self.total} heads and {self.ranks} ranks: neither number divides the other",
                where="tensor_parallel_size",
                fix=f"use a tensor-parallel size that divides {self.total} or is a multiple of it",
            )

    @property
    def shares(self) -> int:
        """The number of different shares: ranks beyond it hold copies."""
        return min(self.total, self.ranks)

    @property
    def copies(self) -> int:
        """The number of ranks that hold each head."""
        return self.ranks // self.shares

    def of(self, rank: int) -> range:
        """The heads that `rank` holds."""
        self._require(rank)
        count = self.total // self.shares
        first = rank // self.copies * count
        return range(first, first + count)

    def writes(self, rank: int) -> bool:
        """True on exactly one of the ranks that hold a head."""
        self._require(rank)
        return rank % self.copies == 0

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise InputError(
                f"there is no rank {rank} among {self.ranks}",
                where="rank",
                fix=f"use a rank from 0 to {self.ranks - 1}",
            )


@dataclass(frozen=True, slots=True)
class ConvShare:
    """The channels of a convolution history that one rank holds."""

    held: tuple[range, ...]  # channel numbers of the model, in the rank's own order
    written: tuple[bool, ...]  # for each range of `held`: whether this rank writes it


def mamba2_share(linear: Linear, rank: int, ranks: int) -> ConvShare:
    """The channels x | B | C. vLLM holds B and C of a single group whole on every rank: rank 0
    writes them."""
    groups = linear.k_heads
    whole = groups == 1 and ranks > 1
    if groups % ranks and not whole:
        raise InputError(
            f"{groups} groups of a Mamba-2 layer cannot be divided among {ranks} ranks",
            where="tensor_parallel_size",
            fix=f"use a tensor-parallel size that divides {groups}",
        )
    x, b = linear.v_heads * linear.v_dim, groups * linear.k_dim
    _require_divided(linear.v_heads, ranks)
    return _share((x, b, b), (False, whole, whole), rank, ranks)


def delta_rule_share(linear: Linear, rank: int, ranks: int) -> ConvShare:
    """The channels q | k | v of a gated delta net or of KDA, all of them divided."""
    _require_divided(linear.k_heads, ranks)
    _require_divided(linear.v_heads, ranks)
    keys = linear.k_heads * linear.k_dim
    return _share((keys, keys, linear.v_heads * linear.v_dim), (False,) * 3, rank, ranks)


def _require_divided(heads: int, ranks: int) -> None:
    if heads % ranks:
        raise InputError(
            f"{heads} heads of a linear layer cannot be divided among {ranks} ranks",
            where="tensor_parallel_size",
            fix=f"use a tensor-parallel size that divides {heads}",
        )


def _share(sizes: Sequence[int], whole: Sequence[bool], rank: int, ranks: int) -> ConvShare:
    Heads(ranks, ranks).of(rank)  # raises InputError for a rank that does not exist
    held, written, first = [], [], 0
    for size, is_whole in zip(sizes, whole, strict=True):
        count = size if is_whole else size // ranks
        begin = first if is_whole else first + rank * count
        held.append(range(begin, begin + count))
        written.append(not is_whole or rank == 0)
        first += size
    return ConvShare(tuple(held), tuple(written))
