"""The number formats of a checkpoint's weights, from `quantization_config` in its `config.json`.

Distinguishes two parts of a model: the routed experts and everything else. Checkpoints in 4 bits
often quantise only the experts; their lists of exceptions then name the attention.
"""

from __future__ import annotations

import re

from prfaas.catalog.hf_config import LanguageModel
from prfaas.catalog.hf_fields import Fields, shown
from prfaas.catalog.shape import BYTES_PER_WEIGHT, WeightFormat

KEY = "quantization_config"
USE_ANOTHER = "use a checkpoint in bf16, fp8, int4 or fp4, or set the weights of a [[models]] table"

# Where tools list the modules that they left in bf16.
_EXCEPTIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")
_ALGORITHMS: dict[str, WeightFormat] = {  # ModelOpt's names
    "fp8": "fp8",
    "fp8_pb_wo": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
    "nvfp4_awq": "fp4",
    "mxfp4": "fp4",
    # Four bits in memory, bf16 in arithmetic: the same work as with int4.
    "w4a16_nvfp4": "int4",
    "w4a16_awq": "int4",
}
# Quark's names, such as fp8_e4m3 and int4.
_PREFIXES: dict[str, WeightFormat] = {"fp8_": "fp8", "fp4": "fp4", "mx_fp4": "fp4", "int4": "int4"}


def weight_formats(model: LanguageModel, has_experts: bool) -> tuple[WeightFormat, WeightFormat]:
    """The formats of the matrices that every token passes, and of the routed experts."""
    owner = model.fields if model.fields.has(KEY) else model.outer
    if not owner.has(KEY):
        return "bf16", "bf16"
    own = owner.section(KEY)
    if own.has("quantized_layers"):
        return _by_layers(own.section("quantized_layers"), has_experts)
    quantised = _format(own)
    if has_experts and (_excepts_attention(own) or _targets_experts(own)):
        return "bf16", quantised
    return quantised, quantised


def _format(own: Fields) -> WeightFormat:
    method = own.text("quant_method", "modelopt" if own.has("quant_algo") else None)
    match method:
        case "fp8" | "fbgemm_fp8":
            return "fp8"
        case "mxfp4":
            return "fp4"
        case "gptq" | "awq" | "gptq_marlin" | "awq_marlin":
            return _by_bits(own, own.count("bits"), "int")
        case "quark":
            weight = own.section("global_quant_config").section("weight")
            return _by_name(weight, "dtype")
        case "compressed-tensors" | "modelopt" | "modelopt_fp4" | "modelopt_mixed":
            if own.has("quant_algo") and not own.has("config_groups"):
                return _by_name(own, "quant_algo")
            return _by_groups(own)
        case _:
            raise own.error("quant_method", f"unknown method {shown(method)}", USE_ANOTHER)


def _by_layers(layers: Fields, has_experts: bool) -> tuple[WeightFormat, WeightFormat]:
    """ModelOpt's mixed precision names the format of each matrix. Matrices that are not named are
    not quantised. The widest format stands for all others, so that memory is not understated."""
    experts: set[WeightFormat] = set()
    others: set[WeightFormat] = set()
    for name in layers.values:
        own = others if not has_experts or ".experts" not in name else experts
        own.add(_by_name(layers.section(name), "quant_algo"))

    def widest(formats: set[WeightFormat]) -> WeightFormat:
        return max(formats, key=lambda one: BYTES_PER_WEIGHT[one], default="bf16")

    return widest(others), widest(experts if has_experts else others)


def _by_groups(own: Fields) -> WeightFormat:
    """Groups of modules may have different formats. The smallest is the experts' in all published
    checkpoints that mix formats, and most bytes are theirs."""
    groups = own.section("config_groups")
    found: list[tuple[int, WeightFormat]] = []
    for name in groups.values:
        weights = groups.section(name).section("weights")
        bits = weights.count("num_bits")
        found.append((bits, _by_bits(weights, bits, weights.text("type"))))
    if not found:
        raise own.error("config_groups", "names no format of weights", USE_ANOTHER)
    return min(found)[1]


def _by_bits(f: Fields, bits: int, kind: str) -> WeightFormat:
    formats: dict[tuple[int, str], WeightFormat] = {
        (8, "float"): "fp8",
        (4, "float"): "fp4",
        (4, "int"): "int4",
    }
    if (bits, kind) not in formats:
        key = "num_bits" if f.has("num_bits") else "bits"
        raise f.error(key, f"weights of type {kind} with {bits} bits are not known", USE_ANOTHER)
    return formats[bits, kind]


def _by_name(f: Fields, key: str) -> WeightFormat:
    name = f.text(key).lower()
    known = _ALGORITHMS.get(name)
    if known is not None:
        return known
    for prefix, found in _PREFIXES.items():
        if name.startswith(prefix):
            return found
    raise f.error(key, f"unknown format of weights {shown(name)}", USE_ANOTHER)


# An exception that covers a layer's attention as a whole, or its queries: the attention is not
# quantised. MiMo's exceptions name only the output projections.
_WHOLE_ATTENTION = re.compile(r"(attn|attention)(\W*$|\.(q_|qkv))")


def _excepts_attention(own: Fields) -> bool:
    names = [name for key in _EXCEPTIONS if own.has(key) for name in own.texts(key)]
    return any(_WHOLE_ATTENTION.search(name) for name in names)


def _targets_experts(own: Fields) -> bool:
    """Kimi K3 names what is quantised instead of the exceptions."""
    groups = own.section("config_groups")
    sections = [groups.section(name) for name in groups.values]
    targets = [target for own in sections if own.has("targets") for target in own.texts("targets")]
    return bool(targets) and all("expert" in target for target in targets)
