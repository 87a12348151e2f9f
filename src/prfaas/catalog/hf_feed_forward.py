"""The feed-forward layers of a Hugging Face config: which are dense, which have experts, how wide.

Families spell the same numbers differently. A known family is read by its rules; an unknown one
only where its own fields say everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from prfaas.catalog.hf_fields import COMPLETE, Fields, listed, shown
from prfaas.catalog.shape import Dense, Experts

DESCRIBE_SHAPE = "describe the model in a [[models]] table with [models.shape] of a catalog TOML"

COUNT = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "share_expert_dim",
    "shared_intermediate_size",
)
SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
LATENT = ("moe_latent_size", "routed_expert_hidden_size")

# Whether each layer has experts. None: the fields do not say.
Placement: TypeAlias = list[bool] | None


@dataclass(frozen=True, slots=True)
class Family:
    matrices: int = 3  # gate, up and down; 2 without a gate
    experts: bool = False
    everywhere: bool = False  # every layer has experts where no field says otherwise
    width: str = "moe_intermediate_size"  # the field with the width of one expert
    shared: bool = False  # the family has shared experts: their number or width must be given


_PLAIN = Family()
_MIXTRAL = Family(experts=True, everywhere=True, width="intermediate_size")
_QWEN = Family(experts=True, everywhere=True, shared=True)
_DEEPSEEK = Family(experts=True, shared=True)
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text"), _PLAIN),
    **dict.fromkeys(("phi3", "olmo3", "cohere2", "seed_oss", "falcon_h1"), _PLAIN),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma"), _PLAIN),
    "bitnet": _PLAIN,
    **dict.fromkeys(("apertus", "arcee", "nemotron", "phi", "starcoder2"), Family(matrices=2)),
    **dict.fromkeys(("mixtral", "gpt_oss", "minimax_m2", "olmoe", "flex_olmo"), _MIXTRAL),
    **dict.fromkeys(("phimoe", "granitemoe"), _MIXTRAL),
    "granitemoeshared": Family(
        experts=True, everywhere=True, width="intermediate_size", shared=True
    ),
    "qwen3_moe": Family(experts=True, everywhere=True),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _DEEPSEEK),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid", "bailing_moe_linear"), _DEEPSEEK),
    **dict.fromkeys(("glm4_moe", "afmoe", "step3p5", "ernie4_5_moe", "dots1"), _DEEPSEEK),
    "mimo_v2_flash": Family(experts=True),
    "nemotron_h": Family(matrices=2, experts=True, shared=True),
}


def read(f: Fields, model_type: str) -> tuple[Dense | None, Experts | None]:
    family = FAMILIES.get(model_type) or _unknown_family(f)
    if model_type == "nemotron_h":
        return _nemotron(f, family)
    if not family.experts:
        return _dense(f, family, layer_count(f)), None
    sparse = sum(_placement(f, family))
    return _dense(f, family, layer_count(f) - sparse), _experts(f, family, sparse)


def layer_count(f: Fields) -> int:
    """Nemotron's files may have only the list of layers."""
    if not f.has("num_hidden_layers") and f.has("layers_block_type"):
        return len(f.texts("layers_block_type"))
    return f.layer_count()


def _unknown_family(f: Fields) -> Family:
    """A family that is not listed: Llama's form if its activation is SwiGLU's, and experts only
    if a field says in which layers they are."""
    activation = f.get("hidden_act") or f.get("hidden_activation")
    if activation != "silu":
        problem = f"{shown(activation)} does not tell whether a feed-forward layer has two or three"
        raise f.error("hidden_act", f"{problem} matrices", DESCRIBE_SHAPE)
    experts = any(f.get(key) for key in COUNT)
    if not experts:
        for key, value in f.values.items():
            if value and ("expert" in key or "moe" in key):
                problem = "suggests experts whose number is not given"
                raise f.error(key, problem, DESCRIBE_SHAPE)
    return Family(experts=experts)


def _dense(f: Fields, family: Family, layers: int) -> Dense | None:
    if layers == 0:
        return None
    return Dense(layers=layers, width=f.count("intermediate_size"), matrices=family.matrices)


def _experts(f: Fields, family: Family, layers: int) -> Experts | None:
    if layers == 0:
        return None
    count, per_token = _first(f, COUNT), _first(f, PER_TOKEN)
    if per_token > count:
        raise f.error(PER_TOKEN[0], f"{per_token} experts per token, but there are {count}")
    width = f.count(family.width)
    return Experts(
        layers=layers,
        count=count,
        per_token=per_token,
        width=width,
        shared_width=_shared_width(f, family, width),
        latent=next((f.count(key) for key in LATENT if f.has(key)), 0),
        matrices=family.matrices,
    )


def _shared_width(f: Fields, family: Family, width: int) -> int:
    """A null is a statement: no shared experts."""
    for key in SHARED_WIDTH:
        if f.has(key):
            return f.count(key, least=0)
    for key in SHARED_COUNT:
        if f.has(key):
            return f.count(key, least=0) * width
    stated = any(key in f.values for key in SHARED_COUNT + SHARED_WIDTH)
    if family.shared and not stated:
        raise f.error(SHARED_COUNT[0], "is missing, and the family has shared experts", COMPLETE)
    return 0


def _first(f: Fields, keys: tuple[str, ...]) -> int:
    """The first of the spellings that the config has; an error names the first of all."""
    return f.count(next((key for key in keys if f.has(key)), keys[0]))


# --------------------------------------------------------------------------------------------------
# Which layers have experts


def _placement(f: Fields, family: Family) -> list[bool]:
    for rule in (_by_list, _by_frequency, _by_numbers, _after_dense, _by_step, _by_interval):
        placed = rule(f)
        if placed is not None:
            return placed
    if family.everywhere:
        return [True] * f.layer_count()
    problem = "is missing, so the layers with experts are not known"
    raise f.error("first_k_dense_replace", problem, COMPLETE)


def _by_list(f: Fields) -> Placement:
    if not f.has("mlp_layer_types"):
        return None
    kinds = f.texts("mlp_layer_types")
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise f.error("mlp_layer_types", f"{shown(kind)} is not dense or sparse")
    return _one_per_layer(f, "mlp_layer_types", [kind == "sparse" for kind in kinds])


def _by_frequency(f: Fields) -> Placement:
    """MiMo gives one number per layer; DeepSeek's single number is in `_after_dense`."""
    if not isinstance(f.get("moe_layer_freq"), list | tuple):
        return None
    return _one_per_layer(f, "moe_layer_freq", [bool(n) for n in f.numbers("moe_layer_freq")])


def _one_per_layer(f: Fields, key: str, sparse: list[bool]) -> list[bool]:
    """Step's and GLM's lists may go on to the layers that predict further tokens."""
    layers, further = f.layer_count(), f.count("num_nextn_predict_layers", 0, least=0)
    if len(sparse) not in (layers, layers + further):
        problem = f"{len(sparse)} entries, but num_hidden_layers is {layers}"
        raise f.error(key, problem, "give one entry per layer")
    return sparse[:layers]


def _by_numbers(f: Fields) -> Placement:
    """Step: the numbers of the layers with experts, as a list or separated by commas."""
    key = "moe_layers_enum"
    if not f.has(key):
        return None
    value = f.get(key)
    try:
        numbers = [int(part) for part in value.split(",")] if isinstance(value, str) else None
    except ValueError:
        raise f.error(key, f"must be numbers of layers, not {shown(value)}") from None
    chosen = set(f.numbers(key) if numbers is None else numbers)
    return [layer in chosen for layer in range(f.layer_count())]


def _after_dense(f: Fields) -> Placement:
    """DeepSeek and its relatives: dense layers first, then experts in every n-th layer."""
    keys = [key for key in ("first_k_dense_replace", "num_dense_layers") if f.has(key)]
    if not keys:
        return None
    first, every = f.count(keys[0], least=0), f.count("moe_layer_freq", 1)
    return [layer >= first and layer % every == 0 for layer in range(f.layer_count())]


def _by_step(f: Fields) -> Placement:
    """Qwen: experts in every n-th layer, without those that are listed as dense."""
    if not f.has("decoder_sparse_step") and not f.has("mlp_only_layers"):
        return None
    step = f.count("decoder_sparse_step", 1)
    dense = set(f.numbers("mlp_only_layers")) if f.has("mlp_only_layers") else set()
    beyond = {layer for layer in dense if not 0 <= layer < f.layer_count()}
    if beyond:
        raise f.error("mlp_only_layers", f"{listed(beyond)} is not a layer of the model")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(f.layer_count())]


def _by_interval(f: Fields) -> Placement:
    """ERNIE: experts in every n-th layer between two layers, both included."""
    if not f.has("moe_layer_start_index"):
        return None
    first, every = f.count("moe_layer_start_index", least=0), f.count("moe_layer_interval", 1)
    last = f.count("moe_layer_end_index", -1, least=-1)
    layers = range(f.layer_count())
    last = len(layers) - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % every == 0 for layer in layers]


def _nemotron(f: Fields, family: Family) -> tuple[Dense | None, Experts | None]:
    """Each layer is only one of attention, Mamba-2, experts and dense."""
    if f.has("layers_block_type"):
        kinds = f.texts("layers_block_type")
        dense, sparse = kinds.count("mlp"), kinds.count("moe")
    else:
        letters = f.text("hybrid_override_pattern")
        dense, sparse = letters.count("-"), letters.count("E")
    return _dense(f, family, dense), _experts(f, family, sparse)
