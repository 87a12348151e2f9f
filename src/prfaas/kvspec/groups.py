"""The state of a model after prefill, in bytes, group by group (paper, sections 2.1 and 3.2).

Sizes are those of the *canonical wire form*: the bytes that another engine needs to continue
exactly. Engines may hold more (a fourth convolution column, a full window, padding to
blocks); they trim on export and pad on import. Independent of tensors, blocks and prompts.

    group           bytes of one layer after l tokens       reusable for a prompt that ...
    FullAttention   bytes_per_token * l                     shares any prefix
    SlidingWindow   bytes_per_token * min(l, window - 1)    has its last window - 1 tokens cached
    LinearState     state_bytes                             matches at exactly the saved length

A window layer keeps window - 1 tokens, not window: the next token brings its own key and value.

`heads` of a group is the number of shares in which its bytes can be written: the KV heads of
attention, the value heads of a linear state. The ranks of a tensor-parallel engine write disjoint
heads of the same segment. Bytes that have no head axis (an MLA latent, an engine's opaque blocks)
are one share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from prfaas.errors import InputError

Lengths: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FullAttention:
    """KV that grows with every token and can be reused up to any shared prefix."""

    name: str
    layers: tuple[int, ...]
    bytes_per_token: int  # of one layer: keys and values, or the MLA latent and its rope part
    heads: int = 1

    def layer_bytes(self, tokens: int, skip_tokens: int = 0) -> int:
        return self.bytes_per_token * max(0, tokens - skip_tokens)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """KV of the last `window - 1` tokens. Always sent as a whole, even when a prefix is shared."""

    name: str
    layers: tuple[int, ...]
    bytes_per_token: int  # of one layer
    window: int
    heads: int = 1

    def first_token(self, tokens: int) -> int:
        """The oldest token still needed to continue after `tokens` tokens."""
        return max(0, tokens - (self.window - 1))

    def layer_bytes(self, tokens: int, skip_tokens: int = 0) -> int:
        return self.bytes_per_token * (tokens - self.first_token(tokens))


@dataclass(frozen=True, slots=True)
class LinearState:
    """A recurrent state of fixed size (KDA, gated delta net, Mamba-2, Lightning) with its
    convolution history of kernel - 1 columns."""

    name: str
    layers: tuple[int, ...]
    state_bytes: int  # of one layer
    heads: int = 1

    def layer_bytes(self, tokens: int, skip_tokens: int = 0) -> int:
        return self.state_bytes if tokens > 0 else 0


Group: TypeAlias = FullAttention | SlidingWindow | LinearState
G = TypeVar("G", FullAttention, SlidingWindow, LinearState)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The groups of one model, dtypes fixed. Layers of different shape are in different groups."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for group in self.groups:
            if group.name in names:
                raise InputError(
                    f"the group {group.name!r} occurs twice",
                    where="groups",
                    fix="give each group another name",
                )
            names.add(group.name)
            if not group.layers or len(set(group.layers)) != len(group.layers):
                raise InputError(
                    f"the group {group.name!r} has no layers, or one of them twice",
                    where="groups",
                    fix="list each layer of the group once",
                )
            if group.heads < 1:
                raise InputError(
                    f"the group {group.name!r} has {group.heads} heads",
                    where="groups",
                    fix="give the number of its heads, or 1 when its bytes have no head axis",
                )

    def __getitem__(self, name: str) -> Group:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    def kv_bytes(self, tokens: int, skip_tokens: int = 0) -> int:
        """S_kv (eq. 1): bytes to send for `tokens` tokens when the receiver already holds the first
        `skip_tokens`. Windows and linear states are always sent."""
        return sum(len(g.layers) * g.layer_bytes(tokens, skip_tokens) for g in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds once every window is full."""
        return sum(len(g.layers) * g.bytes_per_token for g in self._of(FullAttention))

    @property
    def state_bytes(self) -> int:
        """Bytes of all linear states, the same at every length."""
        return sum(len(g.layers) * g.state_bytes for g in self._of(LinearState))

    @property
    def window_tokens(self) -> int:
        """The length from which every window is full and closing bytes no longer grow."""
        return max((group.window - 1 for group in self._of(SlidingWindow)), default=0)

    def growing_bytes(self, tokens: Lengths, skip_tokens: Lengths | float = 0.0) -> Lengths:
        """Full-attention bytes for many (also fractional) lengths at once."""
        return self.bytes_per_token * np.maximum(tokens - skip_tokens, 0.0)

    def closing_bytes(self, tokens: Lengths) -> Lengths:
        """Bytes of windows and states, final after the last token only, for many lengths."""
        total = np.full(np.shape(tokens), float(self.state_bytes))
        for group in self._of(SlidingWindow):
            in_window = np.minimum(tokens, group.window - 1)
            total += len(group.layers) * group.bytes_per_token * in_window
        return total

    def _of(self, kind: type[G]) -> Iterator[G]:
        return (group for group in self.groups if isinstance(group, kind))
