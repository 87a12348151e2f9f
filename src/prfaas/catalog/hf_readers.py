"""One reader per family of models: from the fields of its `config.json` to its geometry.

A reader may return geometries without layers; the caller drops them. Layers that only predict
further tokens (MTP) are left out: they take no part in a hand-off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from prfaas.catalog.hf_fields import COMPLETE, DESCRIBE_BY_HAND, Fields, listed, shown
from prfaas.kvspec import GQA, MLA, Geometry, Linear, WindowedGQA

# transformers' names of layer kinds.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
INDEXED, MOE, MLP = "indexed_attention", "moe", "mlp"
_OLD_NAMES = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}

Layers: TypeAlias = tuple[int, ...]
Reader: TypeAlias = Callable[[Fields], Sequence[Geometry]]


# --------------------------------------------------------------------------------------------------
# Keys and values, in some layers over a window

# Config classes whose default layer_types make every n-th layer full (0: none) ...
_FULL_EVERY = {
    "cohere2": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "mistral": 0,
    "mixtral": 0,
    "olmo3": 4,
    "phi3": 0,
    "starcoder2": 0,
}
# ... or the first max_window_layers.
_FULL_AT_FIRST = ("qwen2", "qwen3")

# A field whose name begins like this, unless it is null, zero or empty, means that layers cache
# something other than keys and values of one shape: latents, states, windows of another shape,
# shared layers.
_NOT_PLAIN = (
    ("kv_lora", "kv_channels", "v_head_dim", "index_", "indexer", "compress", "sparse_attention")
    + ("linear_", "mamba", "ssm_", "conv_", "short_conv", "lightning", "recurrent", "block_types")
    + ("hybrid_", "swa_", "attn_layer_period", "layer_group_size", "attention_chunk_size")
    + ("attention_other_setting", "block_configs", "per_layer_config", "use_bidirectional")
    + ("global_head_dim", "num_global", "attention_k_eq_v", "num_kv_shared_layers", "use_cla")
    + ("cross_attention", "add_cross_attention", "is_encoder_decoder", "multi_query")
)


def plain(f: Fields) -> Sequence[Geometry]:
    """Llama and its many relatives. Every model type without a separate reader is tried here."""
    for key, value in f.values.items():
        if value and key.startswith(_NOT_PLAIN):
            raise f.error(key, "suggests a cache of more than keys and values", DESCRIBE_BY_HAND)
    full, sliding = _plain_layers(f)
    heads, dim = _kv_heads(f), _head_dim(f)
    return (GQA(full, heads, dim, dim), *_window(f, sliding, heads, dim, dim))


def _plain_layers(f: Fields) -> list[Layers]:
    if f.has("attn_type_list"):  # MiniMax: 1 is full; 0 was lightning attention in its older models
        kinds = [FULL if number == 1 else str(number) for number in f.numbers("attn_type_list")]
        return _layers(f, kinds, FULL, SLIDING, key="attn_type_list")
    if f.has("layer_types"):
        return _layers(f, _layer_types(f), FULL, SLIDING)
    return _layers(f, [_plain_kind(f, layer) for layer in range(f.layer_count())], FULL, SLIDING)


def _plain_kind(f: Fields, layer: int) -> str:
    model_type = f.text("model_type")
    if not f.has("sliding_window") or f.get("use_sliding_window") is False:
        return FULL
    if model_type in _FULL_AT_FIRST:
        return FULL if layer < f.count("max_window_layers", least=0) else SLIDING
    if model_type not in _FULL_EVERY:
        raise f.error("layer_types", "is missing, yet sliding_window is set", COMPLETE)
    every = _FULL_EVERY[model_type] and f.count("sliding_window_pattern", _FULL_EVERY[model_type])
    return FULL if every and (layer + 1) % every == 0 else SLIDING


def mimo(f: Fields) -> Sequence[Geometry]:
    if f.has("layer_types"):
        full, sliding = _layers(f, _layer_types(f), FULL, SLIDING)
    else:
        pattern = f.numbers("hybrid_layer_pattern")
        kinds = [{0: FULL, 1: SLIDING}.get(number, str(number)) for number in pattern]
        full, sliding = _layers(f, kinds, FULL, SLIDING, key="hybrid_layer_pattern")
    heads, k_dim, v_dim = _kv_heads(f), f.count("head_dim"), f.count("v_head_dim")
    windows = _window(
        f,
        sliding,
        # transformers' class has no field for it and hard-codes twice the heads.
        f.count("swa_num_key_value_heads", 2 * heads),
        f.count("swa_head_dim", k_dim),
        f.count("swa_v_head_dim", v_dim),
        # `sliding_window_size` counts the tokens before the current one (transformers, after
        # SGLang), `sliding_window` the current one too; the published file has 128 for both.
        f.count("sliding_window_size") + 1 if f.has("sliding_window_size") else None,
    )
    return (GQA(full, heads, k_dim, v_dim), *windows)


def step(f: Fields) -> Sequence[Geometry]:
    kinds, layers = _layer_types(f), f.layer_count()
    if len(kinds) == layers + f.count("num_nextn_predict_layers", 0, least=0):
        kinds = kinds[:layers]  # the published list includes the MTP layers
    full, sliding = _layers(f, kinds, FULL, SLIDING)
    heads = _either(f, "num_key_value_heads", f, "num_attention_groups")
    dim = _head_dim(f)
    other = f.section("attention_other_setting")  # what differs in the sliding layers
    window_heads = other.count("num_attention_groups", heads)
    window_dim = other.count("head_dim", dim)
    return (GQA(full, heads, dim, dim), *_window(f, sliding, window_heads, window_dim, window_dim))


# --------------------------------------------------------------------------------------------------
# Latents


def latent(f: Fields) -> Sequence[Geometry]:
    """DeepSeek's latent attention; from V3.2 on with an indexer that keeps separate keys."""
    if f.get("use_mla") is False:
        raise f.error("use_mla", "this variant does not cache latents", DESCRIBE_BY_HAND)
    kind, indexer_bytes = FULL, 0
    if f.has("index_head_dim"):
        dim = f.count("index_head_dim")
        # One byte (FP8) per element and a float32 scale per 128, as vLLM and SGLang keep them.
        kind, indexer_bytes = INDEXED, dim + 4 * -(-dim // 128)
    (layers,) = _layers(f, _layer_types(f, lambda _: kind), kind)
    return (_mla(f, layers, indexer_bytes),)


# --------------------------------------------------------------------------------------------------
# Linear states beside attention


def kimi_linear(f: Fields) -> Sequence[Geometry]:
    """Fields as Moonshot nests them in `linear_attn_config`, or flat as transformers saves them."""
    own = f.section("linear_attn_config")
    if f.has("layer_types"):
        full, kda = _layers(f, _layer_types(f), FULL, LINEAR)
    else:
        full, kda = _kimi_layers(own, f.layer_count())
    heads = _either(own, "num_heads", f, "linear_num_heads")
    dim = _either(own, "head_dim", f, "linear_head_dim")
    kernel = _either(own, "short_conv_kernel_size", f, "linear_conv_kernel_dim")
    return (_mla(f, full), Linear(kda, heads, heads, dim, dim, kernel))


def _kimi_layers(own: Fields, count: int) -> tuple[Layers, Layers]:
    """`linear_attn_config` numbers layers from 1."""
    every = set(range(1, count + 1))
    full, kda = set(own.numbers("full_attn_layers")), set(own.numbers("kda_layers"))
    for key, numbers in (("full_attn_layers", full), ("kda_layers", kda)):
        if numbers - every:
            raise own.error(key, f"{listed(numbers - every)} is outside 1 to {count}")
    if full & kda:
        raise own.error("kda_layers", f"{listed(full & kda)} is also in full_attn_layers")
    if every - full - kda:
        raise own.error("kda_layers", f"{listed(every - full - kda)} is in neither list of layers")
    return tuple(n - 1 for n in sorted(full)), tuple(n - 1 for n in sorted(kda))


def gated_delta(f: Fields) -> Sequence[Geometry]:
    """Reads Qwen3-Next and Qwen3.5."""
    every = f.count("full_attention_interval")
    kinds = _layer_types(f, lambda layer: LINEAR if (layer + 1) % every else FULL)
    full, linear = _layers(f, kinds, FULL, LINEAR)
    dim = _head_dim(f)
    state = Linear(
        linear,
        k_heads=f.count("linear_num_key_heads"),
        v_heads=f.count("linear_num_value_heads"),
        k_dim=f.count("linear_key_head_dim"),
        v_dim=f.count("linear_value_head_dim"),
        conv_kernel=f.count("linear_conv_kernel_dim"),
    )
    return (GQA(full, _kv_heads(f), dim, dim), state)


def bailing(f: Fields) -> Sequence[Geometry]:
    """Ring and Ling: the last layer of each group attends (GQA in 2.0, MLA from 2.5 on), the
    others are Lightning up to 2.6 and KDA, known by its short convolution, from 3.0 on."""
    size, count = f.count("layer_group_size"), f.layer_count()
    if not f.has("layer_types") and count % size:
        # The models' code gives a last, shorter group full attention; SGLang does not.
        problem = f"{count} layers are not whole groups of {size}, and engines differ on the rest"
        raise f.error("layer_group_size", problem, DESCRIBE_BY_HAND)
    kinds = _layer_types(f, lambda layer: LINEAR if (layer + 1) % size else FULL)
    full, linear = _layers(f, kinds, FULL, LINEAR)
    # transformers saves the rope part's size as head_dim, and the true one as linear_head_dim.
    dim = f.count("linear_head_dim") if f.has("linear_head_dim") else _head_dim(f)
    latents = f.has("kv_lora_rank") or f.get("model_type") == "bailing_hybrid"
    attention = _mla(f, full) if latents else GQA(full, _kv_heads(f), dim, dim)
    heads = f.count(
        "num_attention_heads"
    )  # one state per query head, whatever the number of key heads is
    return (attention, Linear(linear, heads, heads, dim, dim, f.count("short_conv_kernel_size", 1)))


def falcon_h1(f: Fields) -> Sequence[Geometry]:
    """Attention and Mamba-2 side by side in every layer."""
    layers, dim = tuple(range(f.layer_count())), _head_dim(f)
    heads = f.count("mamba_n_heads")
    if f.get("mamba_d_head") not in (None, "auto"):
        head_dim = f.count("mamba_d_head")
    elif f.has("mamba_d_ssm"):
        head_dim = _divided(f, "mamba_d_ssm", f.count("mamba_d_ssm"), heads)
    else:
        inner = f.count("mamba_expand") * f.count("hidden_size")
        head_dim = _divided(f, "mamba_d_ssm", inner, heads)
    groups, state = f.count("mamba_n_groups"), f.count("mamba_d_state")
    mamba = Linear(layers, groups, heads, state, head_dim, f.count("mamba_d_conv"))
    return (GQA(layers, _kv_heads(f), dim, dim), mamba)


def nemotron_h(f: Fields) -> Sequence[Geometry]:
    """Each layer is one of Mamba-2, attention, experts or a dense MLP; the last two cache nothing.

    NVIDIA's field is `hybrid_override_pattern`, transformers' is `layers_block_type`.
    """
    if f.has("layers_block_type"):
        key, kinds = "layers_block_type", _layer_types(f, key="layers_block_type")
    else:
        key = "hybrid_override_pattern"
        letters = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}
        kinds = [letters.get(letter, letter) for letter in f.text(key)]
    # transformers saves no num_hidden_layers beside the list.
    f = f.with_defaults({"num_hidden_layers": len(kinds)})
    full, linear, _, _ = _layers(f, kinds, FULL, LINEAR, MOE, MLP, key=key)
    dim = _head_dim(f)
    mamba = Linear(
        linear,
        k_heads=f.count("n_groups"),
        v_heads=f.count("mamba_num_heads"),
        k_dim=f.count("ssm_state_size"),
        v_dim=f.count("mamba_head_dim"),
        conv_kernel=f.count("conv_kernel"),
    )
    return (GQA(full, _kv_heads(f), dim, dim), mamba)


# --------------------------------------------------------------------------------------------------
# Helpers


def _layers(
    f: Fields, kinds: Sequence[str], *wanted: str, key: str = "layer_types"
) -> list[Layers]:
    """The layer numbers of each wanted kind. Any other kind is refused, and so is a list that is
    not as long as the model."""
    if len(kinds) != f.layer_count():
        problem = f"{len(kinds)} entries, but num_hidden_layers is {f.layer_count()}"
        raise f.error(key, problem, "give one entry per layer")
    for layer, kind in enumerate(kinds):
        if kind not in wanted:
            problem = f"layer {layer} is {shown(kind)}, which is not one of {', '.join(wanted)}"
            raise f.error(key, problem, DESCRIBE_BY_HAND)
    return [tuple(at for at, kind in enumerate(kinds) if kind == want) for want in wanted]


def _layer_types(
    f: Fields, rule: Callable[[int], str] | None = None, key: str = "layer_types"
) -> list[str]:
    """The kind of each layer from the config, or from `rule` where the config has none."""
    if rule is not None and not f.has(key):
        return [rule(layer) for layer in range(f.layer_count())]
    return [_OLD_NAMES.get(kind, kind) for kind in f.texts(key)]


def _mla(f: Fields, layers: Layers, indexer_bytes: int = 0) -> MLA:
    return MLA(layers, f.count("kv_lora_rank"), f.count("qk_rope_head_dim"), indexer_bytes)


def _window(
    f: Fields, layers: Layers, kv_heads: int, k_dim: int, v_dim: int, window: int | None = None
) -> tuple[WindowedGQA, ...]:
    """The windowed layers. Without any, sliding_window may be missing, or set and unused."""
    if not layers:
        return ()
    return (WindowedGQA(layers, kv_heads, k_dim, v_dim, window or f.count("sliding_window")),)


def _kv_heads(f: Fields) -> int:
    """The number of KV heads. Null means as many as query heads. A missing field is an error,
    because config classes differ in its default."""
    if "num_key_value_heads" in f.values and not f.has("num_key_value_heads"):
        return f.count("num_attention_heads")
    return f.count("num_key_value_heads")


def _head_dim(f: Fields) -> int:
    if f.has("head_dim"):
        return f.count("head_dim")
    return _divided(f, "head_dim", f.count("hidden_size"), f.count("num_attention_heads"))


def _divided(f: Fields, key: str, total: int, heads: int) -> int:
    if total % heads:
        raise f.error(key, f"{total} channels do not divide into {heads} heads", COMPLETE)
    return total // heads


def _either(first: Fields, key: str, second: Fields, other_key: str) -> int:
    """`key` if present or if neither is present: an error then names the published spelling."""
    if not first.has(key) and second.has(other_key):
        return second.count(other_key)
    return first.count(key)
