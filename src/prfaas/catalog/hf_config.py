"""A Hugging Face `config.json` into attention geometry: which layers cache what.

Pure: takes the parsed JSON, reads no file, needs neither torch nor transformers. One reader per
family of models. A model type without a reader of its own is read as plain (grouped-query, perhaps
sliding) attention, but only when no field hints at anything else; otherwise it is refused, because
bytes counted wrongly would go unnoticed. Layers that only predict further tokens (MTP) are left
out: they take no part in a hand-off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from prfaas.catalog.hf_fields import COMPLETE, DESCRIBE_BY_HAND, Fields, listed, shown
from prfaas.errors import InputError
from prfaas.kvspec import GQA, MLA, Geometry, Linear, Window

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
INDEXED, MOE, MLP = "indexed_attention", "moe", "mlp"

Layers: TypeAlias = tuple[int, ...]
Reader: TypeAlias = Callable[[Fields], Sequence[Geometry]]


@dataclass(frozen=True, slots=True)
class ConfigGeometry:
    """What a config says of the cache: the geometry and the dtypes an engine would keep it in.

    `model_type` is the language model's own, also when it is nested in a multimodal config.
    """

    model_type: str
    geometries: tuple[Geometry, ...]
    kv_dtype: str
    state_dtype: str


def geometry_of(config: Mapping[str, Any]) -> ConfigGeometry:
    """Layers are numbered from 0; layers of unequal shape are in unequal geometries."""
    if not isinstance(config, Mapping):
        raise InputError(
            f"a model's config must be a JSON object, not {shown(config)}",
            fix="name the config.json of a Hugging Face model",
        )
    outer = Fields(config)
    # Multimodal models keep their language model here, most with a model_type of its own.
    fields = outer.section("text_config") if outer.has("text_config") else outer
    model_type = fields.text("model_type", outer.get("model_type"))
    fields = fields.with_defaults(_CLASS_DEFAULTS.get(model_type, {}))
    geometries = _READERS.get(model_type, _plain)(fields)
    geometries = tuple(geometry for geometry in geometries if geometry.layers)
    if not geometries:
        raise InputError(f"no layer of model_type {model_type!r} caches anything", fix=COMPLETE)
    return ConfigGeometry(
        model_type=model_type,
        geometries=geometries,
        kv_dtype=_kv_dtype(fields if fields.has("dtype") or fields.has("torch_dtype") else outer),
        state_dtype=_state_dtype(fields),
    )


# --------------------------------------------------------------------------------------------------
# Families


def _plain(f: Fields) -> Sequence[Geometry]:
    """Llama and its many relatives: grouped-query attention, in some layers over a window."""
    for key, value in f.values.items():
        if value and key.startswith(_NOT_PLAIN):
            problem = f"model_type {f.get('model_type')!r} is not plain attention, or not only"
            raise f.error(key, problem, DESCRIBE_BY_HAND)
    full, sliding = _layers(f, _plain_kinds(f), FULL, SLIDING)
    heads, dim = _kv_heads(f), _head_dim(f)
    return (GQA(full, heads, dim, dim), *_window(f, sliding, heads, dim, dim))


def _minimax_m2(f: Fields) -> Sequence[Geometry]:
    # The published file marks its full-attention layers with 1; a 0 was lightning attention in
    # MiniMax's earlier models.
    if f.has("attn_type_list"):
        kinds = [FULL if number == 1 else LINEAR for number in f.numbers("attn_type_list")]
        _layers(f, kinds, FULL, key="attn_type_list")
    return _plain(f)


def _step(f: Fields) -> Sequence[Geometry]:
    kinds = _layer_types(f)
    # The published list goes on to the MTP layers.
    if len(kinds) == f.layer_count() + (f.get("num_nextn_predict_layers") or 0):
        kinds = kinds[: f.layer_count()]
    full, sliding = _layers(f, kinds, FULL, SLIDING)
    heads = f.count("num_key_value_heads" if f.has("num_key_value_heads") else _STEP_KV_HEADS)
    dim = _head_dim(f)
    other = f.section("attention_other_setting")  # what differs in the sliding layers
    other_heads, other_dim = other.count(_STEP_KV_HEADS, heads), other.count("head_dim", dim)
    return (GQA(full, heads, dim, dim), *_window(f, sliding, other_heads, other_dim, other_dim))


def _mimo(f: Fields) -> Sequence[Geometry]:
    if f.has("layer_types"):
        kinds = _layer_types(f)
        full, sliding = _layers(f, kinds, FULL, SLIDING)
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
        # `sliding_window_size` counts the tokens before the current one, `sliding_window` (in
        # files saved by transformers) the current one too.
        f.count("sliding_window_size") + 1 if f.has("sliding_window_size") else None,
    )
    return (GQA(full, heads, k_dim, v_dim), *windows)


def _latent(f: Fields) -> Sequence[Geometry]:
    """DeepSeek's latent attention, from V3.2 on with an indexer that keeps keys of its own."""
    if f.get("use_mla") is False:
        raise f.error("use_mla", "this variant does not cache latents", DESCRIBE_BY_HAND)
    indexed = f.has("index_head_dim")
    kind = INDEXED if indexed else FULL
    (layers,) = _layers(f, _layer_types(f, lambda _: kind), kind)
    # One byte (FP8) per element and a float32 scale per 128, as vLLM and SGLang keep them.
    dim = f.count("index_head_dim") if indexed else 0
    return (_mla(f, layers, indexer_bytes=dim + 4 * -(-dim // 128)),)


def _kimi_linear(f: Fields) -> Sequence[Geometry]:
    own = f.section("linear_attn_config")
    if f.has("layer_types"):
        full, kda = _layers(f, _layer_types(f), FULL, LINEAR)
    else:
        full, kda = _kimi_layers(f, own)
    return (_mla(f, full), _kda(f, kda, own))


def _kimi_layers(f: Fields, own: Fields) -> tuple[Layers, Layers]:
    """`linear_attn_config` numbers layers from 1."""
    every = range(1, f.layer_count() + 1)
    full, kda = own.numbers("full_attn_layers"), own.numbers("kda_layers")
    for key, numbers in (("full_attn_layers", full), ("kda_layers", kda)):
        if beyond := set(numbers).difference(every):
            raise own.error(key, f"{listed(beyond)} is outside layers 1 to {every[-1]}")
    if both := set(full).intersection(kda):
        raise own.error("kda_layers", f"{listed(both)} is also in full_attn_layers")
    if neither := set(every).difference(full, kda):
        raise own.error("kda_layers", f"{listed(neither)} is in neither list of layers")
    return tuple(sorted({n - 1 for n in full})), tuple(sorted({n - 1 for n in kda}))


def _kda(f: Fields, layers: Layers, own: Fields) -> Linear:
    """Fields as Moonshot's files nest them, or flat as transformers saves them."""
    heads = own.count("num_heads") if own.has("num_heads") else f.count("linear_num_heads")
    dim = own.count("head_dim") if own.has("head_dim") else f.count("linear_head_dim")
    kernel = own.count("short_conv_kernel_size", f.get("linear_conv_kernel_dim"))
    return Linear(layers, heads, heads, dim, dim, kernel)


def _gated_delta(f: Fields) -> Sequence[Geometry]:
    """Qwen3-Next and Qwen3.5."""
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


def _bailing(f: Fields) -> Sequence[Geometry]:
    """Ring and Ling: the last layer of each group attends (GQA in 2.0, MLA from 2.5 on), the
    others are Lightning up to 2.6 and KDA, known by its short convolution, from 3.0 on."""
    size, count = f.count("layer_group_size"), f.layer_count()
    if not f.has("layer_types") and count % size:
        # The models' own code gives a last, shorter group full attention; SGLang does not.
        problem = f"{count} layers are not whole groups of {size}, and engines differ on the rest"
        raise f.error("layer_group_size", problem, DESCRIBE_BY_HAND)
    kinds = _layer_types(f, lambda layer: LINEAR if (layer + 1) % size else FULL)
    full, linear = _layers(f, kinds, FULL, LINEAR)
    heads = f.count("num_attention_heads")  # states are per query head, whatever the keys' heads
    # transformers saves the rope part's size as head_dim, and the true one as linear_head_dim.
    dim = f.count("linear_head_dim") if f.has("linear_head_dim") else _head_dim(f)
    kernel = f.count("short_conv_kernel_size", 1)
    latent = f.has("kv_lora_rank") or f.get("model_type") == "bailing_hybrid"
    attention = _mla(f, full) if latent else GQA(full, _kv_heads(f), dim, dim)
    return (attention, Linear(linear, heads, heads, dim, dim, kernel))


def _falcon_h1(f: Fields) -> Sequence[Geometry]:
    """Attention and Mamba-2 side by side in every layer."""
    layers, dim = tuple(range(f.layer_count())), _head_dim(f)
    heads = f.count("mamba_n_heads")
    if f.get("mamba_d_head") in (None, "auto"):
        inner = f.count("mamba_d_ssm", f.count("mamba_expand") * f.count("hidden_size"))
        head_dim = _divided(f, "mamba_d_ssm", inner, heads)
    else:
        head_dim = f.count("mamba_d_head")
    groups, state = f.count("mamba_n_groups"), f.count("mamba_d_state")
    mamba = Linear(layers, groups, heads, state, head_dim, f.count("mamba_d_conv"))
    return (GQA(layers, _kv_heads(f), dim, dim), mamba)


def _nemotron_h(f: Fields) -> Sequence[Geometry]:
    """Each layer is one of Mamba-2, attention, experts or a dense MLP; the last two cache nothing.

    `hybrid_override_pattern` is NVIDIA's way to say it, `layers_block_type` transformers'.
    """
    if f.has("layers_block_type"):
        key, kinds = "layers_block_type", _layer_types(f, key="layers_block_type")
    else:
        key = "hybrid_override_pattern"
        letters = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}
        kinds = [letters.get(letter, letter) for letter in f.text(key)]
    # transformers saves no num_hidden_layers, as the list has it.
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
# Which layers


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
            problem = f"layer {layer} is {shown(kind)}, which is none of {', '.join(wanted)}"
            raise f.error(key, problem, DESCRIBE_BY_HAND)
    return [tuple(at for at, kind in enumerate(kinds) if kind == want) for want in wanted]


def _layer_types(
    f: Fields, rule: Callable[[int], str] | None = None, key: str = "layer_types"
) -> list[str]:
    """What the config says of each layer, or what `rule` says where the config does not."""
    if rule is not None and not f.has(key):
        return [rule(layer) for layer in range(f.layer_count())]
    return [_OLD_NAMES.get(kind, kind) for kind in f.texts(key)]


def _plain_kinds(f: Fields) -> list[str]:
    if f.has("layer_types"):
        return _layer_types(f)
    model_type, layers = f.get("model_type"), f.layer_count()
    if not f.has("sliding_window") or f.get("use_sliding_window") is False:
        return [FULL] * layers
    if model_type in _FIRST_SLIDING:
        first = f.count("max_window_layers")
        return [FULL if layer < first else SLIDING for layer in range(layers)]
    if model_type not in _FULL_EVERY:
        raise f.error("layer_types", f"is missing: which layers slide in {model_type!r}?", COMPLETE)
    every = f.count("sliding_window_pattern", _FULL_EVERY[model_type])
    return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]


# --------------------------------------------------------------------------------------------------
# Shapes and dtypes


def _mla(f: Fields, layers: Layers, indexer_bytes: int = 0) -> MLA:
    return MLA(layers, f.count("kv_lora_rank"), f.count("qk_rope_head_dim"), indexer_bytes)


def _window(
    f: Fields, layers: Layers, kv_heads: int, k_dim: int, v_dim: int, window: int | None = None
) -> tuple[Window, ...]:
    """None where no layer slides: then the window's size may be missing or meaningless."""
    if not layers:
        return ()
    return (Window(layers, kv_heads, k_dim, v_dim, window or f.count("sliding_window")),)


def _kv_heads(f: Fields) -> int:
    """Null says: as many as there are query heads. Left out altogether is another matter, for each
    class has its own default: only the ones in `_CLASS_DEFAULTS` are taken."""
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


def _kv_dtype(f: Fields) -> str:
    """Weights that are quantised, or of a dtype left open, are computed with in bfloat16."""
    key = "dtype" if f.has("dtype") else "torch_dtype"
    dtype = f.text(key, "bfloat16").removeprefix("torch.")
    if dtype in ("bfloat16", "float16", "float32"):
        return dtype
    if dtype == "auto" or dtype.startswith(("float8", "fp", "int", "uint", "mxfp", "nvfp")):
        return "bfloat16"
    raise f.error(key, f"unknown dtype {shown(dtype)}", "use bfloat16, float16 or float32")


def _state_dtype(f: Fields) -> str:
    key = "mamba_ssm_dtype" if f.has("mamba_ssm_dtype") else "mamba_ssm_cache_dtype"
    dtype = f.text(key, "float32").removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32", "auto"):
        raise f.error(key, f"unknown dtype {shown(dtype)}", "use bfloat16, float16 or float32")
    return "float32" if dtype == "auto" else dtype


# --------------------------------------------------------------------------------------------------
# Tables

_STEP_KV_HEADS = "num_attention_groups"

_OLD_NAMES = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}

# Plain attention whose config classes fill in a missing layer_types: every n-th layer is full ...
_NEVER = 1 << 30
_FULL_EVERY = {
    "gpt_oss": 2,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "cohere2": 4,
    "olmo3": 4,
    "mistral": _NEVER,
    "mixtral": _NEVER,
    "phi3": _NEVER,
}
# ... or the first max_window_layers are.
_FIRST_SLIDING = ("qwen2", "qwen3")

# A field whose name begins so, unless it is null, zero or empty, means that layers cache something
# other than keys and values of one shape: latents, states, windows of another shape, shared layers.
_NOT_PLAIN = (
    ("kv_lora", "v_head_dim", "index_", "indexer", "compress", "sparse_attention")
    + ("linear_", "mamba", "ssm_", "conv_", "short_conv", "lightning", "recurrent", "block_types")
    + ("hybrid_", "swa_", "attn_layer_period", "attn_type_list", "layer_group_size")
    + ("attention_chunk_size", "attention_other_setting", "block_configs", "per_layer_config")
    + ("global_head_dim", "num_global", "attention_k_eq_v", "num_kv_shared_layers", "use_cla")
    + ("cross_attention", "add_cross_attention", "is_encoder_decoder", "multi_query")
    + ("use_bidirectional_attention",)
)

# What transformers' config classes fill in where published files leave a field out.
_QWEN_GDN = {"head_dim": 256, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
_QWEN_PLAIN = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
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
    "qwen2": _QWEN_PLAIN,
    "qwen2_moe": _QWEN_PLAIN,
    "qwen3": {"head_dim": 128, **_QWEN_PLAIN},
    "qwen3_moe": _QWEN_PLAIN,
    "qwen3_next": _QWEN_GDN,
    "qwen3_5": _QWEN_GDN,
    "qwen3_5_text": _QWEN_GDN,
    "qwen3_5_moe": _QWEN_GDN,
    "qwen3_5_moe_text": _QWEN_GDN,
}

_READERS: dict[str, Reader] = {
    "bailing_hybrid": _bailing,
    "bailing_moe_linear": _bailing,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "deepseek_v32": _latent,
    "falcon_h1": _falcon_h1,
    "kimi_k2": _latent,
    "kimi_linear": _kimi_linear,
    "mimo_v2_flash": _mimo,
    "minimax_m2": _minimax_m2,
    "nemotron_h": _nemotron_h,
    "qwen3_5": _gated_delta,
    "qwen3_5_moe": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "step3p5": _step,
}
