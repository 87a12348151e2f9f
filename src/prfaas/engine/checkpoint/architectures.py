"""The small models that can be made: their shapes, as data, without weights and tokenizers.

`tiny` is for tests and the demo (a forward pass takes milliseconds), `small` for benchmarks (hidden
size 256, 12 layers). Layers follow each family's pattern; windows are short enough that a prompt of
a few hundred tokens exceeds them; mixtures of experts have a few experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

Size: TypeAlias = Literal["tiny", "small"]
SIZES: tuple[Size, ...] = get_args(Size)
DEFAULT_ARCH, DEFAULT_SIZE, DEFAULT_SEED = "kimi-linear", SIZES[0], 0
Fields: TypeAlias = Mapping[str, Any]

MAX_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Architecture:
    """Fields of transformers' config class: those common to every size, and those of each size.

    `embedding_std` is 1 unless the family multiplies embeddings by a factor. Where a layer's
    experts are stacked input-first ([expert, in, out]), their fan-in is not the last axis.
    """

    model_type: str
    common: Fields
    sizes: Mapping[Size, Fields]
    embedding_std: Mapping[Size, float] = field(default_factory=lambda: dict.fromkeys(SIZES, 1.0))
    experts_input_first: bool = False

    def config_fields(self, size: Size) -> dict[str, Any]:
        return {**self.common, **self.sizes[size]}


def _dense(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": MAX_TOKENS,
    }


_TINY, _SMALL = _dense(64, 8, 4), _dense(256, 12, 8)
# vLLM's CPU attention takes head sizes that are multiples of 32.
_VLLM_TINY = _dense(128, 6, 4)
_TINY_WINDOW, _SMALL_WINDOW = {"sliding_window": 64}, {"sliding_window": 128}


ARCHITECTURES: dict[str, Architecture] = {
    "kimi-linear": Architecture(
        "kimi_linear",
        {"num_experts_per_tok": 2, "linear_conv_kernel_dim": 4},
        {
            "tiny": {
                **_TINY,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
                "num_key_value_heads": 4,
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "linear_num_heads": 4,
                "linear_head_dim": 16,
                "num_local_experts": 4,
                "moe_intermediate_size": 32,
            },
            "small": {
                **_SMALL,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
                "num_key_value_heads": 8,
                "kv_lora_rank": 64,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 32,
                "v_head_dim": 32,
                "linear_num_heads": 8,
                "linear_head_dim": 32,
                "num_local_experts": 8,
                "moe_intermediate_size": 128,
            },
        },
    ),
    "qwen3-next": Architecture(
        "qwen3_next",
        {"num_experts_per_tok": 2, "linear_conv_kernel_dim": 4, "num_key_value_heads": 2},
        {
            "tiny": {
                **_TINY,
                "head_dim": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "num_experts": 4,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
            "small": {
                **_SMALL,
                "head_dim": 32,
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 8,
                "linear_key_head_dim": 32,
                "linear_value_head_dim": 32,
                "num_experts": 8,
                "moe_intermediate_size": 128,
                "shared_expert_intermediate_size": 128,
            },
        },
    ),
    "mimo": Architecture(
        "mimo_v2_flash",
        {"num_experts_per_tok": 2, "num_key_value_heads": 2},
        {
            "tiny": {
                **_TINY,
                **_TINY_WINDOW,
                "head_dim": 24,
                "v_head_dim": 16,
                "n_routed_experts": 4,
                "moe_intermediate_size": 32,
            },
            "small": {
                **_SMALL,
                **_SMALL_WINDOW,
                "head_dim": 48,
                "v_head_dim": 32,
                "n_routed_experts": 8,
                "moe_intermediate_size": 128,
            },
        },
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {"num_experts_per_tok": 2, "num_key_value_heads": 2},  # YaRN: 32 times 4,096 positions
        {
            "tiny": {
                **_TINY,
                **_TINY_WINDOW,
                "max_position_embeddings": 131_072,
                "intermediate_size": 32,
                "head_dim": 16,
                "num_local_experts": 4,
            },
            "small": {
                **_SMALL,
                **_SMALL_WINDOW,
                "max_position_embeddings": 131_072,
                "intermediate_size": 128,
                "head_dim": 32,
                "num_local_experts": 8,
            },
        },
        experts_input_first=True,
    ),
    "qwen3": Architecture(
        "qwen3",
        {"num_key_value_heads": 2},
        {"tiny": {**_TINY, "head_dim": 16}, "small": {**_SMALL, "head_dim": 32}},
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 128,
        },
        {
            "tiny": {**_VLLM_TINY, "mamba_d_ssm": 256, "mamba_d_head": 32},
            "small": {**_SMALL, "mamba_d_ssm": 512, "mamba_d_head": 64},
        },
    ),
    # The latent and rope dimensions are DeepSeek's own: vLLM's MLA on a CPU has no others.
    "deepseek-v3": Architecture(
        "deepseek_v3",
        {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_group": 1,
            "topk_group": 1,
            # How experts are chosen. The published configs have both fields and vLLM reads them;
            # transformers' class has no others.
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "num_nextn_predict_layers": 0,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
        },
        {
            "tiny": {
                **_dense(128, 3, 4),
                "num_key_value_heads": 4,
                "q_lora_rank": 64,
                "n_routed_experts": 4,
                "moe_intermediate_size": 64,
            },
            "small": {
                **_SMALL,
                "num_key_value_heads": 8,
                "q_lora_rank": 128,
                "n_routed_experts": 8,
                "moe_intermediate_size": 128,
            },
        },
    ),
    # Embeddings also serve as output weights, and are multiplied by sqrt(hidden_size) at the input:
    # with a standard deviation of 1 the model would only repeat its input. Queries and keys are
    # normalised, so random ones attend to everything alike unless their product is scaled up.
    "gemma3": Architecture(
        "gemma3_text",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "query_pre_attn_scalar": 1,
            **_SMALL_WINDOW,  # vLLM's blocks on a CPU are that long
        },
        {"tiny": {**_VLLM_TINY}, "small": {**_SMALL}},
        embedding_std={"tiny": 0.5 / 128**0.5, "small": 0.5 / 256**0.5},
    ),
}
