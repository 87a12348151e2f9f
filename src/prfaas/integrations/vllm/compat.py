"""Checks of vLLM's version and configuration, and what two vLLM engines must share to hand off.

This is the only file that depends on the version. In the native form two engines exchange blocks,
so everything that determines a block's bytes goes into `Compat.layout`. In the canonical form only
what gives the bytes their meaning has to be equal. A kvd refuses the grant when a field differs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import __version__ as VLLM_VERSION
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from prfaas.engine.fingerprint import fingerprint
from prfaas.errors import InputError
from prfaas.integrations.vllm.caches.canonical_layout import WireForm
from prfaas.types import Compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SCATTERED = ("LHBNC", "BHLNC")  # layouts with heads outside of blocks or layers
OLDEST = (0, 32)  # the first version that reports a failed load of a hybrid model


def check_version(version: str = VLLM_VERSION) -> None:
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < OLDEST:
        raise InputError(
            f"vLLM {version} cannot report a failed load of a hybrid model",
            fix=f"use vLLM {'.'.join(map(str, OLDEST))} or newer",
        )


def check_config(config: VllmConfig) -> None:
    """Refuses unsupported configurations at start instead of failing requests later."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size != 1:
        size = parallel.decode_context_parallel_size
        raise InputError(f"decode_context_parallel_size is {size}", fix="use 1")
    transfer = config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise InputError(
            f"kv_role is {transfer.kv_role}", fix="use kv_both: the gateway assigns roles"
        )
    if transfer.kv_load_failure_policy != "fail":
        raise InputError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy}",
            fix="use fail: the gateway re-issues failed requests",
        )


def check_native(config: VllmConfig, caches: KVCacheConfig) -> None:
    """Refuses the native form where the blocks of one process are not those of the model, and where
    a block is not one piece of memory."""
    stages = config.parallel_config.pipeline_parallel_size
    if stages != 1:
        raise InputError(
            f"pipeline_parallel_size is {stages}",
            fix='use 1, or "form": "canonical" in kv_connector_extra_config',
        )
    layout = str(caches.kv_cache_layout)
    if layout in _SCATTERED and any(_heads(spec) > 1 for spec in _specs(caches)):
        raise InputError(
            f"the layout of the KV cache is {layout}: the heads of a block lie apart",
            fix="choose another VLLM_KV_CACHE_LAYOUT, or "
            '"form": "canonical" in kv_connector_extra_config',
        )


def can_resume(config: VllmConfig) -> bool:
    """Whether vLLM can compute the rest of a prompt whose beginning is cached. Some attention
    backends compute a prompt in one step only; vLLM then switches both of these off."""
    chunked = config.scheduler_config.enable_chunked_prefill
    return bool(chunked or config.cache_config.enable_prefix_caching)


def can_keep_answers(config: VllmConfig) -> bool:
    """Not with speculative decoding: a step may then compute tokens that are not the answer's."""
    return config.speculative_config is None


def keep_out_of_prefix_cache(
    manager: KVCacheManager, group: int, request: str, blocks: int
) -> None:
    """The first `blocks` blocks of a request never serve another request. vLLM would enter every
    loaded block into its prefix cache, and a window's first block may be loaded in part."""
    counts = manager.coordinator.single_type_managers[group].num_cached_block
    counts[request] = max(counts.get(request, 0), blocks)


def native_compat(config: VllmConfig, caches: KVCacheConfig, block_tokens: int) -> Compat:
    model: Any = config.model_config
    states = [spec for spec in _specs(caches) if isinstance(spec, MambaSpec)]
    attention = [spec for spec in _specs(caches) if not isinstance(spec, MambaSpec)]
    return Compat(
        model=model.architecture,
        revision=_revision(model),
        kv_dtype=_names(spec.dtype for spec in attention),
        state_dtype=_names(dtype for spec in states for dtype in spec.dtypes),
        block_tokens=block_tokens,
        layout=_layout(config, caches),
        tensor_parallel=config.parallel_config.tensor_parallel_size,
    )


def canonical_compat(config: VllmConfig, wire: WireForm) -> Compat:
    """Equal to that of `prfaas node` with the same checkpoint, dtypes and block size."""
    model: Any = config.model_config
    return Compat(
        model=model.architecture,
        revision=_revision(model),
        kv_dtype=wire.kv_dtype,
        state_dtype=wire.state_dtype,
        block_tokens=wire.block_tokens,
        layout="canonical",
    )


def _layout(config: VllmConfig, caches: KVCacheConfig) -> str:
    release = ".".join(VLLM_VERSION.split("+")[0].split(".")[:2])
    details = [repr(group.kv_cache_spec) for group in caches.transfer_groups]
    details += [str(caches.kv_cache_layout), str(envs.VLLM_SSM_CONV_STATE_LAYOUT)]
    details += [str(config.attention_config.backend), _instructions(caches)]
    digest = hashlib.sha256("\n".join(details).encode()).hexdigest()[:12]
    return f"vllm {release} {current_platform.device_type} blocks {digest}"


def _instructions(caches: KVCacheConfig) -> str:
    """The instruction set for which a CPU's attention packs blocks."""
    if not current_platform.is_cpu():
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return " ".join(
        _get_attn_isa(spec.dtype, spec.block_size, spec.head_size)
        for spec in _specs(caches)
        if not isinstance(spec, MambaSpec)
    )


def _revision(model: Any) -> str:
    directory = Path(model.model)
    if (directory / "config.json").is_file():
        return fingerprint(directory)
    return f"{model.model}@{model.revision or 'main'}"


def _specs(caches: KVCacheConfig) -> list[Any]:
    return [group.kv_cache_spec for group in caches.transfer_groups]


def _heads(spec: Any) -> int:
    """Linear states have none."""
    return int(getattr(spec, "num_head_slots", None) or getattr(spec, "num_kv_heads", None) or 1)


def _names(dtypes: Any) -> str:
    names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    return "+".join(names) or "none"
