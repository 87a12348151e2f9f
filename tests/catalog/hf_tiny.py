"""Small models of every architecture, as `config.json` files in the published spelling.

Few layers, but each kind of layer; window 16; and no two sizes of one model equal, so that one
taken for another shows.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_COMMON: Config = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: Config = {"num_attention_heads": 4, "num_key_value_heads": 2}
_HEADS: Config = {**_GROUPED, "head_dim": 10}
_WINDOW: Config = {"sliding_window": 16}
_MOE: Config = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 3,
}
_EXPERTS: Config = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
_KIMI_MOE: Config = {
    "moe_intermediate_size": 16,
    "num_experts_per_token": 2,
    "num_experts": 4,
    "num_shared_experts": 2,
    "first_k_dense_replace": 2,
}
_LATENT: Config = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_DEEPSEEK: Config = {
    **_LATENT,
    **_MOE,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_DELTA: Config = {
    **_HEADS,
    "num_hidden_layers": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 14,
}
_VISION: Config = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
FULL, SLIDING = "full_attention", "sliding_attention"


def _model(model_type: str, *parts: Config, **own: Any) -> Config:
    config = {"model_type": model_type, **_COMMON}
    for part in parts:
        config |= part
    return config | own


TINY: dict[str, Config] = {
    # Latents and KDA states; a three-column convolution, unlike the default.
    "kimi_linear": _model(
        "kimi_linear",
        _LATENT,
        _KIMI_MOE,
        q_lora_rank=None,
        num_hidden_layers=5,
        linear_attn_config={
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
            "head_dim": 14,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
        },
    ),
    # Ling 3.0, the one of the Ring/Ling family that transformers has.
    "bailing_hybrid": _model(
        "bailing_hybrid",
        _LATENT,
        _KIMI_MOE,
        q_lora_rank=None,
        num_hidden_layers=6,
        layer_group_size=3,
        head_dim=14,
        short_conv_kernel_size=4,
        num_expert_group=2,
        topk_group=1,
        num_kv_heads_for_linear_attn=0,
    ),
    "qwen3_next": _model(
        "qwen3_next",
        _DELTA,
        _EXPERTS,
        full_attention_interval=2,
        linear_conv_kernel_dim=3,
        shared_expert_intermediate_size=20,
    ),
    "qwen3_next, defaults": {
        key: value
        for key, value in _model(
            "qwen3_next", _DELTA, _EXPERTS, shared_expert_intermediate_size=20
        ).items()
        if key != "head_dim"
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": _model("qwen3_5_text", _DELTA),
        "vision_config": _VISION,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": _model(
            "qwen3_5_moe_text", _DELTA, _EXPERTS, shared_expert_intermediate_size=20
        ),
        "vision_config": _VISION,
    },
    "mimo_v2_flash": _model(
        "mimo_v2_flash",
        _MOE,
        n_shared_experts=None,
        moe_layer_freq=[0, 1, 1, 1, 1, 1],
        num_hidden_layers=6,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        v_head_dim=16,
        swa_num_key_value_heads=4,
        swa_head_dim=24,
        swa_v_head_dim=16,
        sliding_window=15,
        sliding_window_size=15,
    ),
    # As transformers spells it: twice the heads in sliding layers go without saying.
    "mimo_v2_flash, layer_types": _model(
        "mimo_v2_flash",
        _MOE,
        _HEADS,
        _WINDOW,
        n_shared_experts=None,
        num_hidden_layers=3,
        layer_types=[SLIDING, FULL, SLIDING],
        mlp_layer_types=["sparse", "dense", "sparse"],
        v_head_dim=6,
    ),
    "gpt_oss": _model(
        "gpt_oss",
        _HEADS,
        _WINDOW,
        num_hidden_layers=3,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=[FULL, SLIDING, SLIDING],
    ),
    "falcon_h1": _model(
        "falcon_h1",
        _HEADS,
        num_hidden_layers=2,
        mamba_d_ssm=48,
        mamba_n_heads=6,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_d_state=12,
        mamba_d_conv=3,
        mamba_chunk_size=8,
    ),
    "falcon_h1, auto": _model(
        "falcon_h1",
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        mamba_d_ssm=None,
        mamba_n_heads=4,
        mamba_d_head="auto",
        mamba_d_state=12,
        mamba_chunk_size=8,
    ),
    "nemotron_h": _model(
        "nemotron_h",
        _HEADS,
        num_hidden_layers=6,
        hybrid_override_pattern="M-*ME*",
        mamba_num_heads=6,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=12,
        conv_kernel=3,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=24,
    ),
    "deepseek_v2": _model("deepseek_v2", _DEEPSEEK),
    "deepseek_v3": _model("deepseek_v3", _DEEPSEEK),
    "deepseek_v32": _model(
        "deepseek_v32", _DEEPSEEK, index_head_dim=16, index_n_heads=2, index_topk=8
    ),
    "kimi_k2 in kimi_k25": {
        "model_type": "kimi_k25",
        "text_config": _model("kimi_k2", _DEEPSEEK),
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "step3p5 in step3p7": {
        "model_type": "step3p7",
        "text_config": _model(
            "step3p5",
            _WINDOW,
            num_hidden_layers=4,
            num_nextn_predict_layers=2,
            layer_types=[FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING],
            num_attention_heads=4,
            num_attention_groups=2,
            head_dim=10,
            attention_other_setting={
                "attention_type": SLIDING,
                "num_attention_heads": 8,
                "num_attention_groups": 2,
                "head_dim": 10,
            },
            moe_layers_enum="2,3",
            moe_num_experts=4,
            moe_top_k=2,
            moe_intermediate_size=16,
            share_expert_dim=16,
        ),
        "vision_config": {"width": 16, "layers": 1, "heads": 2},
    },
    # Plain attention. Those without layer_types rely on what the config class makes of it.
    "llama": _model("llama", num_hidden_layers=2, num_attention_heads=4),
    "qwen3": _model("qwen3", _HEADS, num_hidden_layers=2, sliding_window=8),
    "qwen3_moe": _model("qwen3_moe", _HEADS, _EXPERTS, num_hidden_layers=3, mlp_only_layers=[1]),
    "minimax_m2": _model(
        "minimax_m2",
        _HEADS,
        num_hidden_layers=2,
        attn_type_list=[1, 1],
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gemma3_text": _model(
        "gemma3_text", _HEADS, _WINDOW, num_hidden_layers=5, sliding_window_pattern=3
    ),
    # As short as Google published it: heads and head size are the class's.
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 7,
            "sliding_window": 16,
        },
    },
    "gemma2": _model("gemma2", _HEADS, _WINDOW, num_hidden_layers=3),
    "gpt_oss, no layer_types": _model(
        "gpt_oss", _HEADS, _WINDOW, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2
    ),
    "cohere2": _model("cohere2", _WINDOW, _GROUPED, num_hidden_layers=5),
    "olmo3": _model("olmo3", _HEADS, _WINDOW, num_hidden_layers=5),
    "mistral": _model("mistral", _HEADS, _WINDOW, num_hidden_layers=2),
    "mistral, no window": _model("mistral", _HEADS, num_hidden_layers=2, sliding_window=None),
    "mixtral": _model(
        "mixtral", _HEADS, _WINDOW, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "phi3": _model("phi3", _WINDOW, num_hidden_layers=2, num_attention_heads=4),
    "starcoder2": _model("starcoder2", _GROUPED, _WINDOW, num_hidden_layers=2),
    "qwen2, sliding": _model(
        "qwen2",
        _WINDOW,
        _GROUPED,
        num_hidden_layers=3,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    # Types that nothing here knows by name.
    "seed_oss": _model("seed_oss", _HEADS, num_hidden_layers=2),
    "glm4_moe": _model(
        "glm4_moe", _HEADS, _MOE, num_hidden_layers=2, first_k_dense_replace=1, n_group=1
    ),
    "afmoe": _model(
        "afmoe",
        _HEADS,
        _EXPERTS,
        _WINDOW,
        num_hidden_layers=2,
        layer_types=[SLIDING, FULL],
        num_dense_layers=1,
        num_shared_experts=2,
    ),
}
