"""From a Hugging Face `config.json` to attention geometry: what each layer caches.

Pure: takes the parsed JSON, reads no file, needs neither torch nor transformers. A model type
without a separate reader is read as plain (grouped-query, perhaps sliding) attention, but only when
no field suggests anything else; otherwise it is refused, because a wrong byte count would go
unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.catalog import hf_readers as read
from prfaas.catalog.hf_fields import DESCRIBE_BY_HAND, Fields, shown
from prfaas.errors import InputError
from prfaas.kvspec import Geometry

READERS: dict[str, read.Reader] = {
    "bailing_hybrid": read.bailing,
    "bailing_moe_linear": read.bailing,
    "deepseek_v2": read.latent,
    "deepseek_v3": read.latent,
    "deepseek_v32": read.latent,
    "falcon_h1": read.falcon_h1,
    "kimi_k2": read.latent,
    "kimi_linear": read.kimi_linear,
    "mimo_v2_flash": read.mimo,
    "nemotron_h": read.nemotron_h,
    "qwen3_5": read.gated_delta,
    "qwen3_5_moe": read.gated_delta,
    "qwen3_5_moe_text": read.gated_delta,
    "qwen3_5_text": read.gated_delta,
    "qwen3_next": read.gated_delta,
    "step3p5": read.step,
}

# Defaults of transformers' config classes for fields that published files leave out.
_QWEN = {"use_sliding_window": False, "max_window_layers": 28}
_QWEN_DELTA = {"head_dim": 256, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"qk_rope_head_dim": 64},
    "deepseek_v32": {"index_head_dim": 128},
    "falcon_h1": {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "kimi_linear": {"linear_conv_kernel_dim": 4},
    "llama": {"num_key_value_heads": None},
    "minimax_m2": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "nemotron_h": {"head_dim": 128, "conv_kernel": 4},
    "phi3": {"num_key_value_heads": None},
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": {"head_dim": 128, **_QWEN},
    "qwen3_moe": _QWEN,
    "qwen3_5": _QWEN_DELTA,
    "qwen3_5_moe": _QWEN_DELTA,
    "qwen3_5_moe_text": _QWEN_DELTA,
    "qwen3_5_text": _QWEN_DELTA,
    "qwen3_next": _QWEN_DELTA,
}


@dataclass(frozen=True, slots=True)
class ConfigGeometry:
    """The cache that a config describes: its geometry and the dtypes in which an engine keeps it.

    `model_type` is the language model's own, also when it is nested in a multimodal config.
    """

    model_type: str
    geometries: tuple[Geometry, ...]
    kv_dtype: str
    state_dtype: str


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """The fields of a config's language model, with the defaults of its class."""

    model_type: str
    fields: Fields
    outer: Fields  # of the whole config; the same fields where the language model is not nested


def language_model(config: Mapping[str, Any]) -> LanguageModel:
    if not isinstance(config, Mapping):
        raise InputError(
            f"a model's config is a JSON object, not {shown(config)}",
            fix="name the config.json of a Hugging Face model",
        )
    outer = Fields(config)
    # Multimodal models keep their language model here, most with a separate model_type.
    fields = outer.section("text_config") if outer.has("text_config") else outer
    owner = fields if fields.has("model_type") else outer
    model_type = owner.text("model_type")
    values = {**CLASS_DEFAULTS.get(model_type, {}), **fields.values, "model_type": model_type}
    return LanguageModel(model_type, Fields(values, fields.path), outer)


def geometry_of(config: Mapping[str, Any]) -> ConfigGeometry:
    """Layers are numbered from 0. Layers of different shape are in different geometries."""
    model = language_model(config)
    fields, outer = model.fields, model.outer
    return ConfigGeometry(
        model_type=model.model_type,
        geometries=geometries_of(model),
        kv_dtype=_kv_dtype(fields if fields.has("dtype") or fields.has("torch_dtype") else outer),
        state_dtype=_state_dtype(fields),
    )


def geometries_of(model: LanguageModel) -> tuple[Geometry, ...]:
    fields, model_type = model.fields, model.model_type
    try:
        geometries = READERS.get(model_type, read.plain)(fields)
    except InputError as error:
        problem = f"{error.problem} (model_type {shown(model_type)})"
        raise InputError(problem, where=error.where, fix=error.fix) from None
    cached = tuple(geometry for geometry in geometries if geometry.layers)
    if not cached:
        raise fields.error(
            "model_type", f"no layer of {shown(model_type)} caches", DESCRIBE_BY_HAND
        )
    return cached


def _kv_dtype(f: Fields) -> str:
    """The cache dtype. Engines compute in bfloat16 with quantised weights or without a dtype."""
    key = "dtype" if f.has("dtype") else "torch_dtype"
    dtype = f.text(key, "bfloat16").removeprefix("torch.")
    if dtype in ("bfloat16", "float16", "float32"):
        return dtype
    if dtype == "auto" or dtype.startswith(("float8", "fp", "int", "uint", "mxfp", "nvfp")):
        return "bfloat16"
    raise f.error(key, f"unknown dtype {shown(dtype)}", "use bfloat16, float16 or float32")


def _state_dtype(f: Fields) -> str:
    """Engines keep recurrent states in float32 unless the config asks for less."""
    key = "mamba_ssm_dtype" if f.has("mamba_ssm_dtype") else "mamba_ssm_cache_dtype"
    dtype = f.text(key, "float32").removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32", "auto"):
        raise f.error(key, f"unknown dtype {shown(dtype)}", "use bfloat16, float16 or float32")
    return "float32" if dtype == "auto" else dtype
