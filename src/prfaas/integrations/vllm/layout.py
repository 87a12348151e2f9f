"""vLLM's cache groups as a KVSpec, and which native blocks hold a range of tokens.

vLLM's pages are not token-major (on a CPU: all key rows, then all value rows, packed for its
instructions), so whole native blocks are transferred, including a partly filled last one, and the
spec counts their bytes. A linear state is one block without a token axis. With tensor parallelism
every shard of a layer is a separate layer in the spec; ranks with the same bytes share a shard:

    spec layer = position among all layers * tensor_parallel + shard

Pure. Independent of kvd, tensors and requests. Paper, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from prfaas.errors import EngineError, InputError
from prfaas.kvspec import FullAttention, Group, KVSpec, LinearState, Segment, SlidingWindow

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

Kind: TypeAlias = Literal["full", "window", "state"]


class Move(NamedTuple):
    """Native blocks of one group to copy between an engine and its kvd, for all layers."""

    group: int  # vLLM's group number
    start: int  # tokens; 0 for a state
    stop: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NativeGroup:
    index: int  # vLLM's group number: its place in block tables
    kind: Kind
    spec: Group
    layer_names: tuple[str, ...]
    shards: int  # ranks with different bytes
    positional_states: bool = False  # the state's place in the block table depends on the length

    def first_block(self, tokens: int, block_tokens: int) -> int:
        """The oldest block needed to continue after `tokens` tokens."""
        if isinstance(self.spec, SlidingWindow):
            return self.spec.first_token(tokens) // block_tokens
        return 0


@dataclass(frozen=True, slots=True)
class NativeLayout:
    groups: tuple[NativeGroup, ...]
    block_tokens: int
    tensor_parallel: int

    @property
    def spec(self) -> KVSpec:
        return KVSpec(tuple(group.spec for group in self.groups))

    def of(self, index: int) -> NativeGroup:
        return next(group for group in self.groups if group.index == index)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def move(self, group: NativeGroup, first: int, last: int, table: Sequence[int]) -> Move:
        """Blocks [first, last) of a growing or window group. EngineError when vLLM has freed one:
        its null block is number 0."""
        ids = tuple(table[first:last])
        if len(ids) != last - first or not all(ids):
            raise EngineError(f"{group.spec.name}: some of blocks {first} to {last} are missing")
        return Move(group.index, first * self.block_tokens, last * self.block_tokens, ids)

    def state_move(self, group: NativeGroup, tokens: int, table: Sequence[int]) -> Move:
        """The move of the running state when exactly `tokens` tokens are computed."""
        place = (tokens - 1) // self.block_tokens if group.positional_states else 0
        if place >= len(table) or not table[place]:
            raise EngineError(f"{group.spec.name}: the state after {tokens} tokens is missing")
        return Move(group.index, 0, tokens, (table[place],))

    def segments(self, move: Move, rank: int) -> list[tuple[str, Segment]]:
        """The segments of a move that a rank's layers write or read: (layer name, segment)."""
        group = self.of(move.group)
        shard = rank * group.shards // self.tensor_parallel
        return [
            (layer, Segment(group.spec.name, number + shard, move.start, move.stop))
            for layer, number in zip(
                group.layer_names, group.spec.layers[:: group.shards], strict=True
            )
        ]

    def writes(self, group: NativeGroup, rank: int) -> bool:
        """Whether this rank sends the group: the first of the ranks with the same bytes does."""
        return rank % (self.tensor_parallel // group.shards) == 0


def native_layout(config: KVCacheConfig, tensor_parallel: int) -> NativeLayout:
    block_tokens = _block_tokens(config)
    groups: list[NativeGroup] = []
    position = 0
    for index in config.transfer_group_ids:
        vllm_group = config.kv_cache_groups[index]
        names = tuple(vllm_group.layer_names)
        shards = _shards(vllm_group.kv_cache_spec, tensor_parallel)
        layers = tuple(
            (position + layer) * tensor_parallel + shard
            for layer in range(len(names))
            for shard in range(shards)
        )
        position += len(names)
        groups.append(_group(index, vllm_group.kv_cache_spec, layers, names, shards, block_tokens))
    return NativeLayout(tuple(groups), block_tokens, tensor_parallel)


def _group(
    index: int,
    spec: KVCacheSpec,
    layers: tuple[int, ...],
    names: tuple[str, ...],
    shards: int,
    block_tokens: int,
) -> NativeGroup:
    if isinstance(spec, MambaSpec):
        if spec.num_speculative_blocks:
            raise InputError(
                "speculative decoding with linear states is not supported",
                fix="switch speculative decoding off",
            )
        state = LinearState(f"state{index}", layers, spec.real_page_size_bytes)
        positional = spec.mamba_cache_mode == "align"
        return NativeGroup(index, "state", state, names, shards, positional)
    block_bytes = spec.real_page_size_bytes
    per_token, rest = divmod(block_bytes, block_tokens)
    if rest:
        raise InputError(
            f"group {index}: {block_bytes} bytes do not divide into {block_tokens} tokens"
        )
    # Exact types, because subclasses differ in what a block holds.
    if type(spec) is SlidingWindowSpec:
        window = SlidingWindow(f"window{index}", layers, per_token, spec.sliding_window)
        return NativeGroup(index, "window", window, names, shards)
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        full = FullAttention(f"full{index}", layers, per_token)
        return NativeGroup(index, "full", full, names, shards)
    raise InputError(
        f"group {index}: {type(spec).__name__} is not supported",
        fix="use a model with full attention, MLA, sliding windows or linear states",
    )


def _shards(spec: KVCacheSpec, tensor_parallel: int) -> int:
    if isinstance(spec, MambaSpec):
        most = 1 if spec.tp_replicated else tensor_parallel
    elif isinstance(spec, MLAAttentionSpec):
        most = 1
    else:
        most = getattr(spec, "max_tp_shards", None) or tensor_parallel
    shards = min(most, tensor_parallel)
    if tensor_parallel % shards:
        raise InputError(f"{tensor_parallel} ranks do not share {shards} shards evenly")
    return shards


def _block_tokens(config: KVCacheConfig) -> int:
    """The block size of the groups with a token axis. It must be one size, because one chain of
    hashes names their blocks."""
    sizes: set[int] = {
        group.kv_cache_spec.block_size
        for group in config.transfer_groups
        if not isinstance(group.kv_cache_spec, MambaSpec)
    }
    if len(sizes) != 1:
        raise InputError(
            f"the model has block sizes {sorted(sizes)}",
            fix="use one block size for all attention groups",
        )
    (size,) = sizes
    return size
