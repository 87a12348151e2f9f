"""From a Hugging Face `config.json` to the shape of the model: what its layers compute.

Pure, like `hf_config`, which reads what the layers cache. More fields are needed here, so that a
config may have a geometry and no shape. A field that is missing, and a family whose layers cannot
be counted, are errors: a wrong count of parameters would make every estimate wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from prfaas.catalog import hf_feed_forward
from prfaas.catalog.attention_work import (
    Decay,
    Indexer,
    LatentHeads,
    OutputGate,
    grouped_work,
    latent_work,
    linear_work,
)
from prfaas.catalog.hf_config import LanguageModel, geometries_of, language_model
from prfaas.catalog.hf_fields import Fields, shown
from prfaas.catalog.hf_quantization import weight_formats
from prfaas.catalog.shape import AttentionWork, ModelShape
from prfaas.errors import InputError
from prfaas.kvspec import GQA, MLA, Geometry, Linear, WindowedGQA

# Families whose attention multiplies its output with a gate as wide as the queries.
_GATED_ATTENTION = (
    ("afmoe", "qwen3_next")
    + ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
)  # fmt: skip
# Families whose config class ties the output matrix to the embedding where the file does not say.
_TIED = ("cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3_text", "starcoder2")


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The counted work of the model that a config describes. `name` is for messages."""
    model = language_model(config)
    try:
        return _shape(model, name)
    except InputError as error:
        kind = f" (model_type {shown(model.model_type)})"
        problem = error.problem if error.problem.endswith(kind) else error.problem + kind
        raise InputError(problem, where=error.where, fix=error.fix) from None


def _shape(model: LanguageModel, name: str) -> ModelShape:
    f = model.fields
    geometries = geometries_of(model)
    hidden = f.count("hidden_size")
    dense, experts = hf_feed_forward.read(f, model.model_type)
    weights, expert_weights = weight_formats(model, has_experts=experts is not None)
    return ModelShape(
        name=name,
        layers=hf_feed_forward.layer_count(f),
        hidden=hidden,
        vocabulary=f.count("vocab_size"),
        attention=tuple(_attention(model, geometry, hidden) for geometry in geometries),
        dense=dense,
        experts=experts,
        weights=weights,
        expert_weights=expert_weights,
        tied=_tied(model),
    )


def _tied(model: LanguageModel) -> bool:
    key = "tie_word_embeddings"
    owner = model.fields if model.fields.has(key) else model.outer
    value = owner.get(key)
    if value is None:
        return model.model_type in _TIED
    if not isinstance(value, bool):
        raise owner.error(key, f"must be true or false, not {shown(value)}")
    return value


def _attention(model: LanguageModel, geometry: Geometry, hidden: int) -> AttentionWork:
    f = model.fields
    match geometry:
        case GQA():
            heads = f.count("num_attention_heads")
            return grouped_work(geometry, hidden, heads, model.model_type in _GATED_ATTENTION)
        case WindowedGQA():
            return grouped_work(
                geometry, hidden, _window_heads(f), model.model_type in _GATED_ATTENTION
            )
        case MLA():
            return latent_work(geometry, hidden, _latent_heads(f))
        case Linear():
            decay, output_gate = _gates(model)
            return linear_work(geometry, hidden, decay, output_gate)
        case _:
            assert_never(geometry)


def _window_heads(f: Fields) -> int:
    """Query heads of sliding layers, which MiMo and Step spell apart."""
    heads = f.count("num_attention_heads")
    heads = f.count("swa_num_attention_heads", f.count("num_sliding_attention_heads", heads))
    return f.section("attention_other_setting").count("num_attention_heads", heads)


def _latent_heads(f: Fields) -> LatentHeads:
    indexer = None
    if f.has("index_head_dim"):
        indexer = Indexer(
            f.count("index_n_heads"), f.count("index_head_dim"), f.count("index_topk")
        )
    return LatentHeads(
        heads=f.count("num_attention_heads"),
        nope_dim=f.count("qk_nope_head_dim"),
        v_dim=f.count("v_head_dim"),
        q_lora_rank=f.count("q_lora_rank") if f.has("q_lora_rank") else 0,
        gated=f.get("mla_use_output_gate") is True,
        indexer=indexer,
    )


def _gates(model: LanguageModel) -> tuple[Decay, OutputGate]:
    """Gated delta nets, Mamba-2 and Lightning have a decay per head and a gate of one matrix; KDA
    has a decay per channel."""
    f = model.fields
    if model.model_type == "kimi_linear":
        full = f.section("linear_attn_config").get("use_full_rank_gate") is True  # Kimi K3
        return "low_rank", "full" if full else "low_rank"
    if model.model_type == "bailing_hybrid" and f.has("short_conv_kernel_size"):  # Ling 3.0
        return "channel", "full"
    return "head", "full"
