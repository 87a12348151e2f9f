"""The native form: vLLM's cache groups as a KVSpec that counts whole blocks.

vLLM's pages are not token-major (on a CPU: all key rows, then all value rows, packed for its
instructions), so whole native blocks are transferred, including a partly filled last one, and the
spec counts their bytes. A linear state is one block without a token axis. With tensor parallelism
every shard of a layer is a separate layer in the spec; ranks with the same bytes share a shard:

    spec layer = position among all layers * tensor_parallel + shard

Pure. Independent of kvd, tensors and requests. Paper, section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from prfaas.errors import InputError
from prfaas.integrations.vllm.caches.groups import CacheGroup, CacheLayout, Kind
from prfaas.kvspec import FullAttention, Group, KVSpec, LinearState, SlidingWindow

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def native_layout(config: KVCacheConfig, tensor_parallel: int, rank: int = 0) -> CacheLayout:
    """`rank`: of the worker that copies. The scheduler copies nothing, so its rank is of no
    importance."""
    block_tokens = _block_tokens(config)
    groups: list[CacheGroup] = []
    position = 0
    for index in config.transfer_group_ids:
        vllm_group = config.kv_cache_groups[index]
        names = tuple(vllm_group.layer_names)
        shards = _shards(vllm_group.kv_cache_spec, tensor_parallel)
        numbers = [(position + layer) * tensor_parallel for layer in range(len(names))]
        position += len(names)
        # The layers of a rank are neighbours in the kvd's blocks: one piece of memory to copy.
        spec_layers = tuple(number + shard for shard in range(shards) for number in numbers)
        kind, spec, positional = _group(index, vllm_group.kv_cache_spec, spec_layers, block_tokens)
        shard = rank * shards // tensor_parallel
        groups.append(
            CacheGroup(
                index,
                kind,
                spec,
                block_tokens,
                tuple((name, n + shard) for name, n in zip(names, numbers, strict=True)),
                positional_states=positional,
                writes=rank % (tensor_parallel // shards) == 0,
            )
        )
    whole_spec = KVSpec(tuple(group.spec for group in groups))
    return CacheLayout(tuple(groups), whole_spec, block_tokens, whole=block_tokens)


def _group(
    index: int, spec: KVCacheSpec, layers: tuple[int, ...], block_tokens: int
) -> tuple[Kind, Group, bool]:
    """The kind, the group of the KVSpec, and whether states have places in the block table."""
    if isinstance(spec, MambaSpec):
        if spec.num_speculative_blocks:
            raise InputError(
                "speculative decoding with linear states is not supported",
                fix="switch speculative decoding off",
            )
        state = LinearState(f"state{index}", layers, spec.real_page_size_bytes)
        return "state", state, spec.mamba_cache_mode == "align"
    block_bytes = spec.real_page_size_bytes
    per_token, rest = divmod(block_bytes, block_tokens)
    if rest:
        raise InputError(
            f"group {index}: {block_bytes} bytes do not divide into {block_tokens} tokens"
        )
    # Exact types, because subclasses differ in what a block holds.
    if type(spec) is SlidingWindowSpec:
        window = SlidingWindow(f"window{index}", layers, per_token, spec.sliding_window)
        return "window", window, False
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return "full", FullAttention(f"full{index}", layers, per_token), False
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
