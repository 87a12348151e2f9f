"""The forms in which an engine hands over: for each its layout, what makes two engines compatible,
and the copies between vLLM's caches and pages.

    native      whole blocks, byte for byte; only equal vLLM servers understand each other
    canonical   tokens and states by what they mean; every engine with the same model understands

An engine with both uses for each hand-off the form that its grant names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from prfaas.catalog.hf_config import ConfigGeometry, geometry_of
from prfaas.catalog.hf_file import read_hf_config
from prfaas.device import PagePins, StagingRing
from prfaas.device.staging import RING_BYTES
from prfaas.device.staging_memory import StagingMemory
from prfaas.errors import InputError
from prfaas.integrations.vllm import compat
from prfaas.integrations.vllm.caches.canonical_copies import canonical_copies
from prfaas.integrations.vllm.caches.canonical_layout import WireForm, canonical_layout, first_spec
from prfaas.integrations.vllm.caches.groups import CacheLayout
from prfaas.integrations.vllm.caches.layer_copies import LayerCopies, native_copies
from prfaas.integrations.vllm.caches.native_layout import native_layout
from prfaas.integrations.vllm.settings import WHERE, ConnectorSettings
from prfaas.types import CANONICAL, Compat, Form

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_LOG = logging.getLogger(__name__)
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class EngineForm:
    layout: CacheLayout
    compat: Compat
    # From the tensors that vLLM registers in a worker, and staging for them if they need it.
    copies: Callable[[Mapping[str, torch.Tensor], StagingRing | None], LayerCopies]


def make_forms(
    config: VllmConfig, caches: KVCacheConfig, settings: ConnectorSettings, rank: int
) -> tuple[EngineForm, ...]:
    """The forms that the settings ask for; the first one is the engine's format for routing.
    InputError when the caches cannot be handed over so."""
    if settings.form != "auto":
        return (_make_form(settings.form, config, caches, settings, rank),)
    made: list[EngineForm] = []
    problems: list[InputError] = []
    # The canonical form is first: gateways put engines that can hand over to each other together.
    for form in (CANONICAL, "native"):
        try:
            made.append(_make_form(form, config, caches, settings, rank))
        except InputError as error:
            _LOG.warning("this engine does not hand over in the %s form: %s", form, error)
            problems.append(error)
    if not made:
        raise problems[0]
    return tuple(made)


def _make_form(
    form: Form, config: VllmConfig, caches: KVCacheConfig, settings: ConnectorSettings, rank: int
) -> EngineForm:
    if form == CANONICAL:
        wire = wire_form(config, caches, settings)
        canonical = canonical_layout(caches, wire)
        return EngineForm(
            canonical,
            compat.canonical_compat(config, wire),
            lambda tensors, ring: canonical_copies(
                config, caches, wire, canonical, tensors, rank, ring
            ),
        )
    compat.check_native(config, caches)
    native = native_layout(caches, config.parallel_config.tensor_parallel_size, rank)
    return EngineForm(
        native,
        compat.native_compat(config, caches, native.block_tokens),
        lambda tensors, ring: native_copies(native, tensors, caches.num_blocks, ring),
    )


def make_copies(
    forms: Sequence[EngineForm], tensors: Mapping[str, torch.Tensor]
) -> dict[Form, LayerCopies]:
    """The copies of a worker. On a GPU all forms share one staging. Each form has an arena of its
    own in the kvd, which it registers with CUDA for itself."""
    devices = {tensor.device for tensor in tensors.values()}
    device = devices.pop() if len(devices) == 1 else None
    if device is None or device.type != "cuda":
        return {form.compat.form: form.copies(tensors, None) for form in forms}
    memory = StagingMemory(device, RING_BYTES)
    return {
        form.compat.form: form.copies(tensors, StagingRing(memory, pins=PagePins(device)))
        for form in forms
    }


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
