"""The form in which an engine hands over: its layout, what makes two engines compatible, and the
copies between vLLM's caches and pages.

    native      whole blocks, byte for byte; only equal vLLM servers understand each other
    canonical   tokens and states by what they mean; every engine with the same model understands
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from prfaas.catalog.hf_config import ConfigGeometry, geometry_of
from prfaas.catalog.hf_file import read_hf_config
from prfaas.errors import InputError
from prfaas.integrations.vllm import compat
from prfaas.integrations.vllm.caches.canonical_copies import canonical_copies
from prfaas.integrations.vllm.caches.canonical_layout import WireForm, canonical_layout, first_spec
from prfaas.integrations.vllm.caches.groups import CacheLayout
from prfaas.integrations.vllm.caches.layer_copies import LayerCopies, native_copies
from prfaas.integrations.vllm.caches.native_layout import native_layout
from prfaas.integrations.vllm.settings import WHERE, ConnectorSettings
from prfaas.types import Compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_WIDE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class EngineForm:
    layout: CacheLayout
    compat: Compat
    # From the tensors that vLLM registers in a worker.
    copies: Callable[[Mapping[str, torch.Tensor]], LayerCopies]


def make_form(
    config: VllmConfig, caches: KVCacheConfig, settings: ConnectorSettings, rank: int
) -> EngineForm:
    """InputError when the caches cannot be handed over in that form."""
    if settings.form == "canonical":
        wire = wire_form(config, caches, settings)
        canonical = canonical_layout(caches, wire)
        return EngineForm(
            canonical,
            compat.canonical_compat(config, wire),
            lambda tensors: canonical_copies(config, caches, wire, canonical, tensors, rank),
        )
    native = native_layout(caches, config.parallel_config.tensor_parallel_size, rank)
    return EngineForm(
        native,
        compat.native_compat(config, caches, native.block_tokens),
        lambda tensors: native_copies(native, tensors, caches.num_blocks),
    )


def wire_form(config: VllmConfig, caches: KVCacheConfig, settings: ConnectorSettings) -> WireForm:
    """The canonical form has the dtypes of vLLM's caches unless the settings name others: a cast
    that changes values is the operator's decision."""
    model: Any = config.model_config
    geometry = _geometry(model)
    specs = [first_spec(group.kv_cache_spec) for group in caches.transfer_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    kept = {spec.dtype for spec in specs if not isinstance(spec, MambaSpec)}
    kept |= {spec.dtypes[0] for spec in states}  # convolution histories
    kv_dtype = settings.wire_kv_dtype or _only(kept, "wire_kv_dtype", "the KV caches")
    state_dtype = settings.wire_state_dtype or geometry.state_dtype
    if states and settings.wire_state_dtype is None:
        kept = {dtype for spec in states for dtype in spec.dtypes[1:]}
        state_dtype = _only(kept, "wire_state_dtype", "the recurrent states")
    layers = model.hf_text_config.num_hidden_layers
    return WireForm(geometry.geometries, layers, settings.block_tokens, kv_dtype, state_dtype)


def _only(dtypes: set[torch.dtype], setting: str, what: str) -> str:
    if len(dtypes) == 1 and (dtype := next(iter(dtypes))) in _WIDE:
        return str(dtype).removeprefix("torch.")
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    raise InputError(
        f"{what} of this engine are {names}: the canonical form needs one of float32, bfloat16 and "
        "float16",
        where=WHERE,
        fix=f'name it with "{setting}": vLLM then casts',
    )


def _geometry(model: Any) -> ConfigGeometry:
    directory = Path(model.model)
    if (directory / "config.json").is_file():
        return read_hf_config(directory)
    return geometry_of(model.hf_config.to_dict())
