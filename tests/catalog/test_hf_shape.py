"""Which fields of a config tell the model's matrices, and which configs are refused.

The counts themselves are compared with transformers' models in test_hf_config.py and with the
catalog in test_load.py.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.catalog.hf_file import read_hf_config, read_hf_shape
from prfaas.catalog.hf_shape import shape_of
from prfaas.errors import InputError
from tests.catalog.hf_models import PUBLISHED
from tests.catalog.hf_tiny import TINY

GONE = object()


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    merged = copy.deepcopy(config) | changes
    return {key: value for key, value in merged.items() if value is not GONE}


def published(name: str, **changes: Any) -> dict[str, Any]:
    return changed(PUBLISHED[name].config, **changes)


def interval(first: int, last: int, every: int) -> dict[str, Any]:
    gone = {"decoder_sparse_step": GONE, "mlp_only_layers": GONE}
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    return {**gone, **dict(zip(names, (first, last, every), strict=True))}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, 94),
        ({"decoder_sparse_step": 2}, 47),
        ({"mlp_only_layers": [0, 1, 93]}, 91),
        ({"decoder_sparse_step": GONE, "mlp_only_layers": GONE}, 94),
        ({"mlp_layer_types": ["dense"] * 90 + ["sparse"] * 4}, 4),
        ({"first_k_dense_replace": 4}, 90),
        ({"first_k_dense_replace": 4, "moe_layer_freq": 2}, 45),
        ({"moe_layer_freq": [1, 0] * 47}, 47),
        ({"moe_layers_enum": "3,4, 93"}, 3),
        ({"moe_layers_enum": [3, 4]}, 2),
        ({"num_dense_layers": 94}, 0),
        (interval(1, -1, 1), 93),
        (interval(4, 11, 2), 4),
    ],
)
def test_which_layers_have_experts(fields: dict[str, Any], layers: int) -> None:
    shape = shape_of(published("qwen3-235b-a22b", **fields), "m")
    assert (shape.experts.layers if shape.experts else 0) == layers
    assert (shape.dense.layers if shape.dense else 0) == 94 - layers


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"n_shared_experts": 2}, 2 * 2048),
        ({"n_shared_experts": None}, 0),
        ({"n_shared_experts": 0}, 0),
        ({"n_shared_experts": GONE, "num_shared_experts": 3}, 3 * 2048),
        ({"n_shared_experts": 2, "moe_shared_expert_intermediate_size": 77}, 77),
    ],
)
def test_shared_experts(fields: dict[str, Any], width: int) -> None:
    experts = shape_of(published("deepseek-v3", **fields), "m").experts
    assert experts is not None and experts.shared_width == width


FLOAT_8, INT_4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}


def compressed(*weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {f"group_{at}": {"weights": own} for at, own in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


def mixed(algorithms: dict[str, str]) -> dict[str, Any]:
    layers = {name: {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("quantised", "common", "experts"),
    [
        (GONE, "bf16", "bf16"),
        (None, "bf16", "bf16"),
        ({"quant_method": "fp8"}, "fp8", "fp8"),
        # Only the output projections are left out, as in MiMo.
        ({"quant_method": "fp8", "ignored_layers": ["model.0.self_attn.o_proj"]}, "fp8", "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["*.self_attn"]}, "bf16", "fp4"),
        (compressed(FLOAT_8, ignore=["lm_head"]), "fp8", "fp8"),
        (compressed(INT_4), "int4", "int4"),
        (compressed(INT_4, ignore=["re:.*self_attn.*"]), "bf16", "int4"),
        (compressed(INT_4, ignore=["model.layers.0.self_attn.q_proj"]), "bf16", "int4"),
        (compressed(FLOAT_8, INT_4), "int4", "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}, "fp4", "fp4"),
        ({"quant_algo": "NVFP4", "exclude_modules": ["*.self_attn*"]}, "bf16", "fp4"),
        ({"quant_algo": "FP8"}, "fp8", "fp8"),
        (mixed({"0.mlp.experts.1.up_proj": "NVFP4", "0.self_attn.q_proj": "MXFP8"}), "fp8", "fp4"),
        (mixed({"0.mlp.experts": "W4A16_NVFP4"}), "bf16", "int4"),
        ({"quant_method": "awq", "bits": 4}, "int4", "int4"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
            "fp8",
            "fp8",
        ),
    ],
)
def test_weight_formats(quantised: Any, common: str, experts: str) -> None:
    shape = shape_of(published("deepseek-v3", quantization_config=quantised), "m")
    assert (shape.weights, shape.expert_weights) == (common, experts)


def test_a_dense_model_has_one_format() -> None:
    quantised = compressed(INT_4, ignore=["re:.*self_attn.*"])
    assert shape_of(published("qwen3-4b", quantization_config=quantised), "m").weights == "int4"


def test_a_wrappers_format_counts_where_the_text_model_has_none() -> None:
    nested = published("qwen3.5-397b-a17b", quantization_config={"quant_method": "fp8"})
    assert shape_of(nested, "m").weights == "fp8"


@pytest.mark.parametrize(
    ("name", "changes", "where", "says"),
    [
        ("deepseek-v3", {"hidden_size": GONE}, "hidden_size", "is missing"),
        ("deepseek-v3", {"vocab_size": GONE}, "vocab_size", "is missing"),
        ("deepseek-v3", {"qk_nope_head_dim": GONE}, "qk_nope_head_dim", "is missing"),
        ("deepseek-v3", {"n_routed_experts": GONE}, "num_experts", "is missing"),
        ("deepseek-v3", {"n_routed_experts": 0}, "n_routed_experts", "at least 1"),
        ("deepseek-v3", {"num_experts_per_tok": 300}, "num_experts_per_tok", "there are 256"),
        ("deepseek-v3", {"moe_intermediate_size": GONE}, "moe_intermediate_size", "is missing"),
        ("deepseek-v3", {"n_shared_experts": GONE}, "n_shared_experts", "has shared experts"),
        ("deepseek-v3", {"first_k_dense_replace": GONE}, "first_k_dense_replace", "not known"),
        ("deepseek-v3", {"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
        ("deepseek-v3.2", {"index_topk": GONE}, "index_topk", "is missing"),
        ("qwen3-235b-a22b", {"mlp_layer_types": ["moe"] * 94}, "mlp_layer_types", "'moe' is not"),
        ("qwen3-235b-a22b", {"mlp_layer_types": ["dense"]}, "mlp_layer_types", "1 entries"),
        ("qwen3-235b-a22b", {"mlp_only_layers": [94]}, "mlp_only_layers", "94 is not a layer"),
        ("qwen3-235b-a22b", {"moe_layers_enum": "a,b"}, "moe_layers_enum", "numbers of layers"),
        ("qwen3-4b", {"intermediate_size": GONE}, "intermediate_size", "is missing"),
        # Not a known family: its own fields must say everything.
        ("qwen3-4b", {"model_type": "new", "hidden_act": "relu"}, "hidden_act", "two or three"),
        ("qwen3-4b", {"model_type": "new", "moe_k": 2}, "moe_k", "number is not given"),
        ("minimax-m2.5", {"model_type": "new", "hidden_act": "silu"}, "first_k_dense", "not known"),
        (
            "qwen3-4b",
            {"quantization_config": {"quant_method": "gguf"}},
            "quantization_config.quant_method",
            "unknown method 'gguf'",
        ),
        (
            "qwen3-4b",
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            "quantization_config.bits",
            "3 bits are not known",
        ),
        (
            "qwen3-4b",
            {"quantization_config": {"quant_algo": "MIXED_PRECISION"}},
            "quantization_config.quant_algo",
            "unknown format",
        ),
        (
            "qwen3-4b",
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            "quantization_config.config_groups",
            "no format",
        ),
    ],
)
def test_bad_input_names_field_and_fix(
    name: str, changes: dict[str, Any], where: str, says: str
) -> None:
    config = published(name, **changes)
    with pytest.raises(InputError) as caught:
        shape_of(config, "m")
    error = caught.value
    assert error.where is not None and error.where.startswith(where)
    assert says in error.problem and error.fix
    assert repr(config["model_type"]) in error.problem


def test_an_unknown_family_is_read_when_its_fields_say_everything() -> None:
    """Llama's form with DeepSeek's names, under a type that no table has."""
    known = shape_of(TINY["glm4_moe"], "m")
    config = changed(TINY["glm4_moe"], model_type="new", hidden_act="silu")
    assert shape_of(config, "m") == known


def test_a_file_has_a_geometry_without_a_shape(tmp_path: Path) -> None:
    config = published("minimax-m2.5", vocab_size=GONE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hf_config(tmp_path).geometries
    with pytest.raises(InputError, match=r"config\.json: vocab_size: is missing"):
        read_hf_shape(tmp_path)


def test_the_format_may_be_in_a_file_of_modelopt(tmp_path: Path) -> None:
    """NVIDIA's NVFP4 checkpoints; with quantization_config in both places, config.json counts."""
    beside = tmp_path / "hf_quant_config.json"
    for format_, quantised in (("fp4", GONE), ("fp8", {"quant_method": "fp8"})):
        config = published("qwen3-235b-a22b", quantization_config=quantised)
        (tmp_path / "config.json").write_text(json.dumps(config))
        beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
        assert read_hf_shape(tmp_path).expert_weights == format_
    (tmp_path / "config.json").write_text(json.dumps(published("qwen3-235b-a22b")))
    beside.write_text("[]")
    with pytest.raises(
        InputError, match=r"hf_quant_config\.json: has no object named quantization"
    ):
        read_hf_shape(tmp_path)


def test_a_shape_is_named_like_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "MiniMax-M2.5"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published("minimax-m2.5")))
    assert read_hf_shape(folder).name == "MiniMax-M2.5"
    assert read_hf_shape(folder / "config.json", "mine").name == "mine"
