"""The canonical form: vLLM's cache groups against the groups of the model's `config.json`.

The spec is the one that `prfaas node` has for the same checkpoint. It does not depend on vLLM's
parallel sizes, block sizes or groups, so that engines that differ in these hand over to each other.
A group of vLLM is paired with every group of the spec whose kind it has; a worker's share of a pair
are the layers that are in both. The scheduler and all workers, whatever layers they have, make the
same pairs in the same order, because a move names a pair by its position.

Pure. Independent of kvd, tensors and requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.errors import InputError
from prfaas.integrations.vllm.caches.groups import CacheGroup, CacheLayout, Kind
from prfaas.kvspec import (
    FullAttention,
    Geometry,
    Group,
    KVSpec,
    LinearState,
    SlidingWindow,
    build_spec,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")
USE_NATIVE = 'use "form": "native", which hands over to equal engines only'


@dataclass(frozen=True, slots=True)
class WireForm:
    """The canonical form that an engine sends and receives."""

    geometries: tuple[Geometry, ...]
    layers: int  # of the model
    block_tokens: int
    kv_dtype: str
    state_dtype: str

    @property
    def spec(self) -> KVSpec:
        return build_spec(self.geometries, kv_dtype=self.kv_dtype, state_dtype=self.state_dtype)


def canonical_layout(config: KVCacheConfig, wire: WireForm) -> CacheLayout:
    """InputError when a group or a layer of vLLM has no counterpart in the model's config."""
    spec = wire.spec
    groups: list[CacheGroup] = []
    seen: set[tuple[bool, int]] = set()  # whether it is a state, and the layer
    for index in config.transfer_group_ids:
        vllm_group = config.kv_cache_groups[index]
        vllm_spec = first_spec(vllm_group.kv_cache_spec)
        _check_convertible(index, vllm_spec)
        kinds = _counterparts(index, vllm_spec, spec)
        numbers = [
            (name, _layer_number(name, vllm_spec, wire.layers)) for name in vllm_group.layer_names
        ]
        for name, number in numbers:
            if (kinds[0][0] == "state", number) in seen:
                raise InputError(
                    f"vLLM's layer {name} is a second cache of layer {number}", fix=USE_NATIVE
                )
            seen.add((kinds[0][0] == "state", number))
            if not any(number in group.layers for _, group in kinds):
                raise InputError(
                    f"vLLM's layer {name} caches as {type(vllm_spec).__name__}, but the model's "
                    f"config.json describes no such cache of layer {number}",
                    fix=USE_NATIVE,
                )
        positional = isinstance(vllm_spec, MambaSpec) and vllm_spec.mamba_cache_mode == "align"
        for kind, group in kinds:
            groups.append(
                CacheGroup(
                    index,
                    kind,
                    group,
                    vllm_spec.block_size,
                    tuple((name, number) for name, number in numbers if number in group.layers),
                    positional_states=positional,
                )
            )
    return CacheLayout(tuple(groups), spec, wire.block_tokens, whole=1)


def first_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec that stands for all layers of a group: they differ in shapes only."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _check_convertible(index: int, spec: KVCacheSpec) -> None:
    """Refuses what the specs already show. The workers also check backends and tensors."""
    if isinstance(spec, AttentionSpec) and (
        spec.state_content_bytes is not None or spec.tokens_per_state != 1
    ):
        raise InputError(
            f"vLLM's cache group {index} is packed or quantised in a way that cannot be converted",
            fix=USE_NATIVE,
        )
    if isinstance(spec, MambaSpec) and spec.num_speculative_blocks:
        raise InputError(
            f"vLLM's cache group {index} has states of speculative decoding, which cannot be "
            "converted",
            fix=f"switch speculative decoding off, or {USE_NATIVE}",
        )


def _counterparts(index: int, vllm_spec: KVCacheSpec, spec: KVSpec) -> list[tuple[Kind, Group]]:
    """The groups of the spec that layers of this kind can belong to."""
    found: list[tuple[Kind, Group]] = []
    for group in spec.groups:
        match group:
            case LinearState() if isinstance(vllm_spec, MambaSpec):
                found.append(("state", group))
            case FullAttention() if type(vllm_spec) in (FullAttentionSpec, MLAAttentionSpec):
                found.append(("full", group))
            case SlidingWindow() if (
                # Without vLLM's hybrid cache manager, windows are kept like full attention.
                type(vllm_spec) in (SlidingWindowSpec, FullAttentionSpec)
                and vllm_spec.sliding_window == group.window
            ):
                found.append(("window", group))
    if not found:
        raise InputError(
            f"vLLM's cache group {index} ({type(vllm_spec).__name__}) cannot be converted",
            fix=USE_NATIVE,
        )
    return found


def _layer_number(name: str, vllm_spec: KVCacheSpec, layers: int) -> int:
    """The model's layer. vLLM numbers the mixers of Falcon-H1 behind the layers."""
    match = _NUMBER.search(name)
    if match is None:
        raise InputError(f"vLLM's layer {name} has no number", fix=USE_NATIVE)
    number = int(match.group(1))
    if number >= layers and isinstance(vllm_spec, MambaSpec):
        number -= layers
    if number >= layers:
        raise InputError(
            f"vLLM's layer {name} is not one of the model's {layers} layers: speculative decoding "
            "cannot be converted",
            fix=f"switch speculative decoding off, or {USE_NATIVE}",
        )
    return number
