"""Published `config.json` files, and what those models' caches hold.

Fields are spelled as the published files spell them; what says nothing about the cache or about the
matrices is left out.
Totals are for bfloat16 keys and values and float32 states, derived by hand from layer counts, head
and state sizes in papers, model cards and configs, and from SGLang v0.5.9 for the shapes and dtypes
of states. Two are pinned from outside: Ring-2.5's card says 11.2 KiB per token, and the paper's
Table 5 gives four sizes of its own model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Published:
    config: Config
    bytes_per_token: int  # all full-attention layers together
    state_bytes: int = 0  # all linear layers together
    window_bytes_per_token: int = 0  # all sliding layers together
    window: int = 0
    full_layers: tuple[int, ...] | None = None  # None: every layer


def every(step: int, layers: int) -> tuple[int, ...]:
    """The last of every `step` layers."""
    return tuple(range(step - 1, layers, step))


def kimi(layers: int, heads: int, full_attn_layers: list[int], **more: Any) -> Config:
    """Kimi Linear's fields; `more` has the sizes of the model's matrices."""
    own = {
        "full_attn_layers": full_attn_layers,
        "kda_layers": [n for n in range(1, layers + 1) if n not in full_attn_layers],
        "head_dim": 128,
        "num_heads": heads,
        "short_conv_kernel_size": 4,
        **more.pop("linear_attn_config", {}),
    }
    return {
        "model_type": "kimi_linear",
        "num_hidden_layers": layers,
        "vocab_size": 163840,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": own,
        "hidden_act": "silu",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "tie_word_embeddings": False,
        **more,
    }


def packed(kind: str, target: str, ignore: list[str]) -> Config:
    """Four bits per element of the experts, as compressed-tensors writes it."""
    weights = {"num_bits": 4, "type": kind, "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": [target], "weights": weights}},
        "ignore": ignore,
    }


def qwen_delta(
    model_type: str, layers: int, heads: int, value_heads: int, **more: str | int
) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        **more,
    }


def deepseek(model_type: str, **more: int) -> Config:
    return {
        "model_type": model_type,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        **more,
    }


MIMO_FULL = (0, 5, 11, 17, 23, 29, 35, 41, 47)
STEP_FULL = tuple(range(0, 45, 4))
NEMOTRON_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

PUBLISHED: dict[str, Published] = {
    "kimi-linear-48b-a3b": Published(
        kimi(
            27,
            32,
            [4, 8, 12, 16, 20, 24, 27],
            hidden_size=2304,
            intermediate_size=9216,
            moe_intermediate_size=1024,
            num_experts=256,
        ),
        bytes_per_token=8_064,
        state_bytes=43_417_600,
        full_layers=(3, 7, 11, 15, 19, 23, 26),
    ),
    # The language model of a multimodal one.
    "kimi-k3": Published(
        {
            "model_type": "kimi_k3",
            "dtype": "bfloat16",
            "text_config": kimi(
                93,
                96,
                [*range(4, 93, 4), 93],
                hidden_size=7168,
                intermediate_size=33792,
                moe_intermediate_size=3072,
                num_experts=896,
                num_experts_per_token=16,
                num_shared_experts=2,
                routed_expert_hidden_size=3584,
                q_lora_rank=1536,
                mla_use_output_gate=True,
                linear_attn_config={"use_full_rank_gate": True},
                quantization_config=packed("float", r"re:.*\.experts\.\d+\..*", []),
            ),
            "vision_config": {"vt_num_hidden_layers": 27},
        },
        bytes_per_token=27_648,
        state_bytes=449_372_160,
        full_layers=(*every(4, 93), 92),
    ),
    "qwen3-4b": Published(
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        bytes_per_token=147_456,
    ),
    # The paper's own model: no config is published, but its Table 5 pins these totals.
    "case-study-1t": Published(
        kimi(
            57,
            64,
            [*range(4, 57, 4), 57],
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_experts=384,
            q_lora_rank=1536,
            quantization_config=packed("int", "Linear", ["lm_head", "re:.*self_attn.*"]),
        ),
        bytes_per_token=17_280,
        state_bytes=182_353_920,
        full_layers=(*every(4, 57), 56),
    ),
    "mimo-v2-flash": Published(
        {
            "model_type": "mimo_v2_flash",
            "vocab_size": 152576,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": None,
            "num_experts_per_tok": 8,
            "moe_layer_freq": [0] + [1] * 47,
            "quantization_config": {
                "quant_method": "fp8",
                "ignored_layers": ["model.layers.0.self_attn.o_proj"],
            },
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "sliding_window": 128,
            "sliding_window_size": 128,
            "hybrid_layer_pattern": [int(layer not in MIMO_FULL) for layer in range(48)],
        },
        bytes_per_token=23_040,
        window_bytes_per_token=199_680,
        window=129,  # 128 before the current token, which the window includes
        full_layers=MIMO_FULL,
    ),
    "qwen3.5-397b-a17b": Published(
        {
            "model_type": "qwen3_5_moe",
            "text_config": qwen_delta(
                "qwen3_5_moe_text",
                60,
                32,
                64,
                vocab_size=248320,
                hidden_size=4096,
                moe_intermediate_size=1024,
                shared_expert_intermediate_size=1024,
                dtype="bfloat16",
                mamba_ssm_dtype="float32",
            ),
            "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
        },
        bytes_per_token=30_720,
        state_bytes=192_061_440,
        full_layers=every(4, 60),
    ),
    "qwen3-next-80b-a3b": Published(
        qwen_delta(
            "qwen3_next",
            48,
            16,
            32,
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5120,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            decoder_sparse_step=1,
            torch_dtype="bfloat16",
        ),
        bytes_per_token=24_576,
        state_bytes=77_266_944,
        full_layers=every(4, 48),
    ),
    "ring-2.5-1t": Published(
        {
            "model_type": "bailing_hybrid",
            "vocab_size": 157184,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_experts": 256,
            "num_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 4,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
                "ignore": ["lm_head"],
            },
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_kv_heads_for_linear_attn": 64,
            "head_dim": 128,
            "layer_group_size": 8,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "num_nextn_predict_layers": 1,
        },
        bytes_per_token=11_520,
        state_bytes=293_601_280,
        full_layers=every(8, 80),
    ),
    "ring-flash-linear-2.0": Published(
        {
            "model_type": "bailing_moe_linear",
            "vocab_size": 157184,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_experts": 256,
            "num_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "layer_group_size": 8,
            "linear_silu": False,
        },
        bytes_per_token=8_192,
        state_bytes=58_720_256,
        full_layers=every(8, 32),
    ),
    "minimax-m2.5": Published(
        {
            "model_type": "minimax_m2",
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "shared_intermediate_size": 0,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attn_type_list": [1] * 62,
            "quantization_config": {"quant_method": "fp8"},
        },
        bytes_per_token=253_952,
    ),
    "qwen3-235b-a22b": Published(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_window_layers": 94,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        bytes_per_token=192_512,
    ),
    "gpt-oss-120b": Published(
        {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "sliding_window": 128,
        },
        bytes_per_token=36_864,
        window_bytes_per_token=36_864,
        window=128,
        full_layers=every(2, 36),
    ),
    "step-3.5-flash": Published(
        {
            "model_type": "step3p5",
            "vocab_size": 128896,
            "hidden_size": 4096,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1280,
            "moe_num_experts": 288,
            "moe_top_k": 8,
            "share_expert_dim": 1280,
            "moe_layers_enum": ",".join(str(layer) for layer in range(3, 45)),
            "num_hidden_layers": 45,
            "num_nextn_predict_layers": 3,
            "num_attention_heads": 64,
            "num_attention_groups": 8,
            "head_dim": 128,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 96,
                "num_attention_groups": 8,
                "head_dim": 128,
            },
            # Goes on to the three layers that predict further tokens.
            "layer_types": [
                "full_attention" if layer in STEP_FULL else "sliding_attention"
                for layer in range(48)
            ],
            "sliding_window": 512,
        },
        bytes_per_token=49_152,
        window_bytes_per_token=135_168,
        window=512,
        full_layers=STEP_FULL,
    ),
    "nemotron-3-nano-30b-a3b": Published(
        {
            "model_type": "nemotron_h",
            "vocab_size": 131072,
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "mlp_hidden_act": "relu2",
            "num_hidden_layers": 52,
            "hybrid_override_pattern": NEMOTRON_NANO,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "mamba_ssm_cache_dtype": "float32",
        },
        bytes_per_token=6_144,
        state_bytes=49_082_368,
        full_layers=(5, 12, 19, 26, 33, 42),
    ),
    "kimi-k2": Published(
        deepseek(
            "kimi_k2",
            vocab_size=163840,
            num_attention_heads=64,
            n_routed_experts=384,
            first_k_dense_replace=1,
        ),
        bytes_per_token=70_272,
    ),
    "deepseek-v3": Published(deepseek("deepseek_v3"), bytes_per_token=70_272),
    "deepseek-v3.2": Published(
        # The indexer's keys: 128 FP8 bytes and a float32 scale per layer and token.
        deepseek("deepseek_v32", index_head_dim=128, index_n_heads=64, index_topk=2048),
        bytes_per_token=78_324,
    ),
}
