"""The conversion of each layer of a worker, from what vLLM says about the layer.

vLLM's shapes are compared with the model's config.json first: a cache that has other heads, sizes
or windows than the geometry says is refused, because its bytes would have another meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.device.staging import StagingRing
from prfaas.errors import InputError
from prfaas.integrations.canonical.attention import AttentionConverter, AttentionForm
from prfaas.integrations.canonical.heads import Heads, delta_rule_share, mamba2_share
from prfaas.integrations.canonical.states import StateConverter, StateForm
from prfaas.integrations.vllm.caches.canonical_layout import USE_NATIVE, WireForm
from prfaas.integrations.vllm.caches.groups import CacheGroup, CacheLayout, Move
from prfaas.integrations.vllm.caches.joint_copies import CopiedLayer, JointCopies
from prfaas.integrations.vllm.caches.layer_copies import LayerCopies, LayerCopy
from prfaas.integrations.vllm.caches.packing import fp8_of, packing_of
from prfaas.kvspec import GQA, MLA, Linear, WindowedGQA
from prfaas.kvspec.parts import layer_parts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class AttentionCopy:
    """Tokens of an attention layer."""

    def __init__(self, converter: AttentionConverter, heads: range | None, *, writes: bool) -> None:
        self._converter = converter
        self.heads = heads
        self.writes = writes

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        return (self._converter.blocks,)

    def of_blocks(self, blocks: Sequence[torch.Tensor]) -> AttentionCopy:
        converter = self._converter.of_blocks(blocks[0])
        return AttentionCopy(converter, self.heads, writes=self.writes)

    def save(self, move: Move, pages: Sequence[memoryview]) -> int:
        return self._converter.save(move.block_ids, move.start, move.stop, pages)

    def load(self, move: Move, pages: Sequence[memoryview]) -> int:
        return self._converter.load(move.block_ids, move.start, move.stop, pages)


class StateCopy:
    """The state of a linear layer with its convolution history."""

    writes = True  # every rank has heads of its own

    def __init__(self, converter: StateConverter, heads: range | None) -> None:
        self._converter = converter
        self.heads = heads

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        return self._converter.blocks

    def of_blocks(self, blocks: Sequence[torch.Tensor]) -> StateCopy:
        return StateCopy(self._converter.of_blocks(blocks), self.heads)

    def save(self, move: Move, pages: Sequence[memoryview]) -> int:
        return self._converter.save(move.block_ids[0], pages)

    def load(self, move: Move, pages: Sequence[memoryview]) -> int:
        return self._converter.load(move.block_ids[0], pages)


def canonical_copies(
    config: VllmConfig,
    caches: KVCacheConfig,
    wire: WireForm,
    layout: CacheLayout,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    ring: StagingRing | None = None,
) -> LayerCopies:
    """InputError names the layer that cannot be converted. With a `ring`, several layers are copied
    at once."""
    ranks = config.parallel_config.tensor_parallel_size
    context = config.compilation_config.static_forward_context
    copies: dict[str, LayerCopy] = {}
    joint: dict[str, CopiedLayer] = {}
    for group in layout.groups:
        for name, _ in group.layers:
            spec = _layer_spec(caches, group, name)
            geometry = _geometry(wire, group)
            parts = layer_parts(geometry, kv_dtype=wire.kv_dtype, state_dtype=wire.state_dtype)
            layer = context[name]
            if isinstance(geometry, Linear):
                heads = Heads(geometry.v_heads, ranks).of(rank)
                form = _state_form(name, cast(MambaSpec, spec), geometry, parts, rank, ranks)
                conv, ssm = layer.kv_cache
                state = StateConverter(conv, ssm, form, ring)
                copies[name] = StateCopy(state, heads)
                joint[name] = CopiedLayer(state.rows_written, state.rows_held, row_tokens=None)
                continue
            held = Heads(1 if isinstance(geometry, MLA) else geometry.kv_heads, ranks)
            attention = cast(AttentionSpec, spec)
            _check_attention(name, layer, attention, geometry, len(held.of(rank)))
            fp8 = fp8_of(layer)
            converter = AttentionConverter(
                tensors[name],
                caches.num_blocks,
                AttentionForm(
                    packing_of(name, layer, attention),
                    (parts[0], parts[1]),
                    held.of(rank),
                    rope_pairs=_has_rope_pairs(config, geometry),
                    scales=None if fp8 is None else _scales(name, layer, geometry),
                    fp8=fp8,
                ),
                ring,
            )
            joint[name] = CopiedLayer(converter.rows, converter.rows, row_tokens=1)
            heads_written = None if isinstance(geometry, MLA) else held.of(rank)
            copies[name] = AttentionCopy(converter, heads_written, writes=held.writes(rank))
    if ring is None:
        return LayerCopies(copies)
    return LayerCopies(copies, ring.fence, JointCopies(ring, joint, layout.block_tokens))


def _layer_spec(caches: KVCacheConfig, group: CacheGroup, name: str) -> KVCacheSpec:
    spec = caches.kv_cache_groups[group.index].kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _geometry(wire: WireForm, group: CacheGroup) -> GQA | WindowedGQA | MLA | Linear:
    """The geometry of which `build_spec` has made the group: it keeps their order."""
    groups = wire.spec.groups
    made = {spec.name: geometry for spec, geometry in zip(groups, wire.geometries, strict=True)}
    return made[group.spec.name]


def _check_attention(
    name: str, layer: Any, spec: AttentionSpec, geometry: GQA | WindowedGQA | MLA, heads: int
) -> None:
    found: dict[str, object]
    wanted: dict[str, object]
    if isinstance(geometry, MLA):
        found = {"heads": spec.num_kv_heads, "head size": spec.head_size}
        wanted = {"heads": 1, "head size": geometry.kv_lora_rank + geometry.rope_dim}
    else:
        window = geometry.window if isinstance(geometry, WindowedGQA) else None
        found = {
            "heads": spec.num_kv_heads,
            "key size": spec.head_size,
            "value size": spec.head_size_v,
            "window": getattr(layer, "sliding_window", None),
        }
        wanted = {
            "heads": heads,
            "key size": geometry.k_dim,
            "value size": geometry.v_dim,
            "window": window,
        }
    _check(name, found, wanted)


def _state_form(
    name: str, spec: MambaSpec, geometry: Linear, parts: Sequence[Any], rank: int, ranks: int
) -> StateForm:
    if spec.num_speculative_blocks or len(spec.shapes) != 2 or geometry.conv_kernel < 2:
        raise InputError(
            f"layer {name}: its states cannot be converted",
            fix=f"switch speculative decoding off, or {USE_NATIVE}",
        )
    channels_first = is_conv_state_dim_first()
    if spec.mamba_type is MambaAttentionBackendEnum.MAMBA2:
        share = mamba2_share(geometry, rank, ranks)
        state = (geometry.v_heads // ranks, geometry.v_dim, geometry.k_dim)
        transposed = relabelled = False
    elif spec.mamba_type is MambaAttentionBackendEnum.GDN_ATTN:
        share = delta_rule_share(geometry, rank, ranks)
        state = (geometry.v_heads // ranks, geometry.v_dim, geometry.k_dim)
        # vLLM's operators for CPUs keep [key, value] in what is declared as [value, key].
        relabelled = current_platform.is_cpu()
        transposed = not relabelled
    else:
        raise InputError(
            f"layer {name}: states of {spec.mamba_type.name} cannot be converted", fix=USE_NATIVE
        )
    channels = sum(len(part) for part in share.held)
    conv = (channels, geometry.conv_kernel - 1)
    _check(
        name,
        {"convolution": spec.shapes[0], "state": spec.shapes[1]},
        {"convolution": conv if channels_first else conv[::-1], "state": state},
    )
    return StateForm(
        tuple(parts),
        Heads(geometry.v_heads, ranks).of(rank),
        share,
        conv_channels_first=channels_first,
        transposed=transposed,
        relabelled=relabelled,
    )


def _check(name: str, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    for what, value in found.items():
        if value != wanted[what]:
            raise InputError(
                f"layer {name}: {what} is {value} in vLLM's cache, and {wanted[what]} by the "
                "model's config.json",
                fix=USE_NATIVE,
            )


def _has_rope_pairs(config: VllmConfig, geometry: object) -> bool:
    """vLLM rotates DeepSeek-V3's keys in pairs, transformers in halves."""
    text = config.model_config.hf_text_config
    return (
        isinstance(geometry, MLA)
        and text.model_type == "deepseek_v3"
        and getattr(text, "rope_interleave", True)
    )


def _scales(name: str, layer: Any, geometry: object) -> tuple[float, float]:
    keys = layer._k_scale_float
    values = keys if isinstance(geometry, MLA) else layer._v_scale_float
    if not isinstance(keys, float) or not isinstance(values, float):
        raise InputError(f"layer {name}: its fp8 cache has more than one scale", fix=USE_NATIVE)
    return keys, values
