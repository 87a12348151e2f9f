"""The reader against what transformers allocates, against published totals, and on bad input."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prfaas.catalog.hf_config import CLASS_DEFAULTS, geometry_of
from prfaas.catalog.hf_shape import shape_of
from prfaas.errors import InputError
from prfaas.kvspec import (
    GQA,
    MLA,
    FullAttention,
    KVSpec,
    Linear,
    LinearState,
    SlidingWindow,
    WindowedGQA,
    build_spec,
)
from tests.catalog.hf_models import NEMOTRON_NANO, PUBLISHED, Published
from tests.catalog.hf_tiny import TINY

LENGTHS = (2, 5, 15, 16, 17, 40)  # below, at and above the windows of 16
# Numbers per token, over all layers, that gates of one number per head compute: less than one
# percent of a real model's matrices, and not counted. A delta net's second one, the gate of a
# shared expert, and the gates of Ling's and Step's attention.
GATES_PER_HEAD = {
    "qwen3_next": 3 * 4 + 5,
    "qwen3_next, defaults": 4 * 4 + 5,
    "qwen3_5": 4 * 4,
    "qwen3_5_moe": 4 * 4 + 5,
    "bailing_hybrid": 2 * 4,
    "step3p5 in step3p7": 4 + 3 * 8,
}
LINEAR = ["kimi_linear", "bailing_hybrid", "qwen3_next", "qwen3_5", "falcon_h1", "nemotron_h"]


@pytest.fixture(scope="module")
def caches() -> Iterator[ModuleType]:
    """transformers, imported where it is needed: it takes seconds."""
    import torch

    from tests.catalog import hf_caches

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    yield hf_caches
    torch.set_num_threads(threads)


def by_layer(spec: KVSpec, tokens: int) -> dict[tuple[str, int], int]:
    return {
        (type(group).__name__, layer): group.layer_bytes(tokens)
        for group in spec.groups
        for layer in group.layers
    }


# --------------------------------------------------------------------------------------------------
# Against transformers' own cache


@pytest.mark.parametrize("name", TINY)
def test_counts_what_transformers_caches_and_multiplies(
    name: str, caches: ModuleType, tmp_path: Path
) -> None:
    import torch

    config = caches.load(TINY[name], tmp_path)
    prefill = caches.Prefill(config, torch.float32)
    read = geometry_of(TINY[name])
    spec = build_spec(read.geometries, kv_dtype="float32", state_dtype="float32")
    shape = shape_of(TINY[name], name)

    for tokens in LENGTHS:
        on_the_wire = prefill.wire_bytes(tokens)
        assert by_layer(spec, tokens) == on_the_wire, f"{tokens} tokens"
        assert spec.kv_bytes(tokens) == sum(on_the_wire.values())

    # The same model also tells what it computes with. AutoModel has no output matrix.
    output = 0 if shape.tied else shape.hidden * shape.vocabulary
    apart = shape.hidden * GATES_PER_HEAD.get(name, 0)
    assert shape.total_elements == prefill.matrix_elements() + output - apart

    as_saved = caches.saved(config, tmp_path)
    assert geometry_of(as_saved).geometries == read.geometries
    assert shape_of(as_saved, name) == shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        *("apertus", "arcee", "bitnet", "phi", "vaultgemma"),
        *("ernie4_5_moe", "flex_olmo", "granitemoe", "granitemoeshared", "olmoe", "phimoe"),
        # Not in any table: read as Llama's form.
        *("ernie4_5", "exaone4", "granite", "smollm3"),
    ],
)
def test_families_without_a_tiny_model_are_counted(
    model_type: str, caches: ModuleType, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    shape = shape_of(caches.saved(config, tmp_path), model_type)
    assert shape.total_elements == pytest.approx(caches.default_elements(config), rel=0.01)


# On a CPU without bfloat16 units torch warns once about a slower path.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("name", [*LINEAR, "deepseek_v32", "gpt_oss"])
def test_dtypes_are_those_of_the_cache(name: str, caches: ModuleType, tmp_path: Path) -> None:
    """Attention and convolutions in the model's dtype, recurrent states in float32."""
    import torch

    config = caches.load({**TINY[name], "dtype": "bfloat16"}, tmp_path)
    prefill = caches.Prefill(config, torch.bfloat16)
    read = geometry_of(caches.saved(config, tmp_path))
    spec = build_spec(read.geometries, kv_dtype=read.kv_dtype, state_dtype=read.state_dtype)
    assert by_layer(spec, 20) == prefill.wire_bytes(20)


def test_defaults_are_those_of_the_config_classes(caches: ModuleType) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    checked = 0
    for model_type, defaults in CLASS_DEFAULTS.items():
        fields = CONFIG_MAPPING[model_type].__dataclass_fields__
        if "text_config" in fields:
            continue  # a wrapper; its text model has a separate entry
        for key, value in defaults.items():
            # Arguments of __post_init__ are no fields; the tiny models leave them out instead.
            if key in fields:
                assert fields[key].default == value, (model_type, key)
                checked += 1
    assert checked >= 30


@pytest.mark.parametrize(
    "model_type",
    [
        "bamba",
        "bert",
        "deepseek_v4",
        "falcon",
        "gemma3n_text",
        "glm_moe_dsa",
        "granitemoehybrid",
        "jamba",
        "jetmoe",
        "lfm2",
        "llama4_text",
        "longcat_flash",
        "mamba2",
        "minimax",
        "olmo_hybrid",
        "qwen4_exp_text",
        "recurrent_gemma",
        "rwkv",
        "t5",
        "whisper",
        "zamba2",
        "zaya",
    ],
)
def test_other_caches_are_refused_not_guessed(
    model_type: str, caches: ModuleType, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    config = caches.saved(AutoConfig.for_model(model_type), tmp_path)
    with pytest.raises(InputError, match=rf"model_type '{model_type}'.*\[\[models\]\]"):
        geometry_of(config)


# --------------------------------------------------------------------------------------------------
# Against published totals


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    model = PUBLISHED[name]
    read = geometry_of(model.config)
    assert (read.kv_dtype, read.state_dtype) == ("bfloat16", "float32")
    spec = build_spec(read.geometries, kv_dtype=read.kv_dtype, state_dtype=read.state_dtype)
    windows = [group for group in spec.groups if isinstance(group, SlidingWindow)]

    assert spec.bytes_per_token == model.bytes_per_token
    assert spec.state_bytes == model.state_bytes
    per_window_token = sum(len(group.layers) * group.bytes_per_token for group in windows)
    assert per_window_token == model.window_bytes_per_token
    assert [group.window for group in windows] == ([model.window] if model.window else [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layers(name: str) -> None:
    model = PUBLISHED[name]
    full, others = placed(model)
    count = model.config.get("text_config", model.config)["num_hidden_layers"]
    assert full == (model.full_layers or tuple(range(count)))
    rest = set(range(count)).difference(full)
    if name.startswith("nemotron"):
        rest = {layer for layer in rest if NEMOTRON_NANO[layer] == "M"}
    assert set(others) == rest


def placed(model: Published) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    for geometry in geometry_of(model.config).geometries:
        if isinstance(geometry, GQA | MLA):
            full += geometry.layers
        else:
            others += geometry.layers
    return full, others


def test_the_papers_own_table_of_sizes() -> None:
    """Table 5's S_kv, at the token counts that its 1K, 8K, 32K and 128K stand for."""
    spec = build_spec(geometry_of(PUBLISHED["case-study-1t"].config).geometries)
    mebibytes = [spec.kv_bytes(tokens) / 2**20 for tokens in (1024, 8192, 32_000, 130_000)]
    assert mebibytes == pytest.approx([190.8, 308.9, 701.3, 2316.3], abs=0.06)


# --------------------------------------------------------------------------------------------------
# Reading


def test_falcon_h1_has_both_kinds_in_every_layer() -> None:
    attention, mamba = geometry_of(TINY["falcon_h1"]).geometries
    assert attention == GQA((0, 1), kv_heads=2, k_dim=10, v_dim=10)
    assert mamba == Linear((0, 1), 2, 6, 12, 8, conv_kernel=3)


def test_unequal_shapes_are_unequal_geometries() -> None:
    full, windows = geometry_of(PUBLISHED["mimo-v2-flash"].config).geometries
    assert isinstance(full, GQA) and isinstance(windows, WindowedGQA)
    assert (full.kv_heads, windows.kv_heads) == (4, 8)


def test_lightning_layers_have_no_convolution() -> None:
    spec = build_spec(geometry_of(PUBLISHED["ring-flash-linear-2.0"].config).geometries)
    (states,) = [group for group in spec.groups if isinstance(group, LinearState)]
    assert states.state_bytes == 32 * 128 * 128 * 4


def test_a_short_convolution_tells_ling_3_from_ring_2_5() -> None:
    lightning = PUBLISHED["ring-2.5-1t"].config
    for config, kernel in ((lightning, 1), ({**lightning, "short_conv_kernel_size": 4}, 4)):
        _, linear = geometry_of(config).geometries
        assert isinstance(linear, Linear) and linear.conv_kernel == kernel


def test_model_type_is_the_language_models() -> None:
    assert geometry_of(PUBLISHED["kimi-k3"].config).model_type == "kimi_linear"
    nested = {"model_type": "qwen3_5_moe", "text_config": changed("qwen3.5-397b-a17b", inner=True)}
    del nested["text_config"]["model_type"]
    assert geometry_of(nested).model_type == "qwen3_5_moe"


def test_reading_does_not_change_the_config() -> None:
    for model in PUBLISHED.values():
        before = copy.deepcopy(model.config)
        geometry_of(model.config)
        assert model.config == before


def test_one_layer_may_be_all_there_is() -> None:
    spec = build_spec(
        geometry_of(
            changed("gpt-oss-120b", num_hidden_layers=1, layer_types=["full_attention"])
        ).geometries
    )
    assert [type(group) for group in spec.groups] == [FullAttention]


@pytest.mark.parametrize(
    ("written", "kv_dtype"),
    [
        ({}, "bfloat16"),
        ({"dtype": None, "torch_dtype": None}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": "auto"}, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, "bfloat16"),
        ({"dtype": "uint8"}, "bfloat16"),
    ],
)
def test_kv_dtype(written: dict[str, Any], kv_dtype: str) -> None:
    assert geometry_of(changed("gpt-oss-120b", **written)).kv_dtype == kv_dtype


def test_a_wrappers_dtype_counts_where_the_text_model_has_none() -> None:
    nested = {"model_type": "x", "dtype": "float16", "text_config": changed("gpt-oss-120b")}
    assert geometry_of(nested).kv_dtype == "float16"
    nested["text_config"]["dtype"] = "float32"
    assert geometry_of(nested).kv_dtype == "float32"


@pytest.mark.parametrize("key", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_state_dtype(key: str) -> None:
    config = changed("qwen3-next-80b-a3b")
    assert geometry_of(config).state_dtype == "float32"
    assert geometry_of({**config, key: "bfloat16"}).state_dtype == "bfloat16"
    assert geometry_of({**config, key: "auto"}).state_dtype == "float32"


# --------------------------------------------------------------------------------------------------
# Bad input

GONE = object()


def changed(name: str, inner: bool = False, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(PUBLISHED[name].config)
    config = config["text_config"] if inner else config
    config |= changes
    return {key: value for key, value in config.items() if value is not GONE}


@pytest.mark.parametrize(
    ("name", "changes", "where", "says"),
    [
        ("gpt-oss-120b", {"model_type": GONE}, "model_type", "is missing"),
        ("gpt-oss-120b", {"model_type": 7}, "model_type", "must be a string"),
        ("gpt-oss-120b", {"num_hidden_layers": GONE}, "num_hidden_layers", "is missing"),
        ("gpt-oss-120b", {"num_hidden_layers": None}, "num_hidden_layers", "is missing"),
        ("gpt-oss-120b", {"num_hidden_layers": "36"}, "num_hidden_layers", "whole number"),
        ("gpt-oss-120b", {"num_hidden_layers": 36.0}, "num_hidden_layers", "whole number"),
        ("gpt-oss-120b", {"num_hidden_layers": True}, "num_hidden_layers", "whole number"),
        ("gpt-oss-120b", {"num_hidden_layers": 10**12}, "num_hidden_layers", "more than any"),
        ("gpt-oss-120b", {"num_key_value_heads": 0}, "num_key_value_heads", "at least 1"),
        ("gpt-oss-120b", {"num_key_value_heads": -8}, "num_key_value_heads", "at least 1"),
        ("gpt-oss-120b", {"num_key_value_heads": GONE}, "num_key_value_heads", "is missing"),
        ("gpt-oss-120b", {"num_key_value_heads": [8] * 36}, "num_key_value_heads", "not a list"),
        ("gpt-oss-120b", {"head_dim": {}}, "head_dim", "not an object"),
        ("gpt-oss-120b", {"sliding_window": None}, "sliding_window", "is missing"),
        ("gpt-oss-120b", {"sliding_window": 0}, "sliding_window", "at least 1"),
        ("gpt-oss-120b", {"layer_types": "full"}, "layer_types", "must be a list"),
        ("gpt-oss-120b", {"layer_types": [1] * 36}, "layer_types", "list of strings"),
        ("gpt-oss-120b", {"layer_types": []}, "layer_types", "0 entries"),
        ("gpt-oss-120b", {"num_hidden_layers": 35}, "layer_types", "36 entries"),
        ("gpt-oss-120b", {"layer_types": ["conv"] * 36}, "layer_types", "layer 0 is 'conv'"),
        ("gpt-oss-120b", {"dtype": 16}, "dtype", "must be a string"),
        ("gpt-oss-120b", {"dtype": "half"}, "dtype", "unknown dtype 'half'"),
        ("gpt-oss-120b", {"text_config": [1]}, "text_config", "must be an object"),
        ("gpt-oss-120b", {"text_config": {}}, "text_config.num_hidden_layers", "is missing"),
        (
            "qwen3-235b-a22b",
            {"head_dim": None, "hidden_size": None},
            "hidden_size",
            "is missing",
        ),
        (
            "qwen3-235b-a22b",
            {"head_dim": None, "hidden_size": 100},
            "head_dim",
            "100 channels do not divide into 64 heads",
        ),
        (
            "qwen3-235b-a22b",
            {"sliding_window": 8, "use_sliding_window": True},
            "layer_types",
            "is missing",
        ),
        ("minimax-m2.5", {"attn_type_list": [1] * 61}, "attn_type_list", "61 entries"),
        ("minimax-m2.5", {"attn_type_list": [0] + [1] * 61}, "attn_type_list", "layer 0 is '0'"),
        ("kimi-linear-48b-a3b", {"kv_lora_rank": 0}, "kv_lora_rank", "at least 1"),
        ("kimi-linear-48b-a3b", {"qk_rope_head_dim": GONE}, "qk_rope_head_dim", "is missing"),
        (
            "kimi-linear-48b-a3b",
            {"linear_attn_config": GONE},
            "linear_attn_config.full_attn_layers",
            "is missing",
        ),
        ("kimi-linear-48b-a3b", {"linear_attn_config": 4}, "linear_attn_config", "an object"),
        (
            "kimi-linear-48b-a3b",
            {"num_hidden_layers": 28},
            "linear_attn_config.kda_layers",
            "28 is in neither list",
        ),
        (
            "kimi-linear-48b-a3b",
            {"num_hidden_layers": 26},
            "linear_attn_config.full_attn_layers",
            "27 is outside 1 to 26",
        ),
        ("mimo-v2-flash", {"v_head_dim": GONE}, "v_head_dim", "is missing"),
        ("mimo-v2-flash", {"sliding_window_size": -1}, "sliding_window_size", "at least 1"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [2] * 48}, "hybrid_layer_pattern", "'2'"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [0]}, "hybrid_layer_pattern", "1 entries"),
        ("qwen3-next-80b-a3b", {"full_attention_interval": 0}, "full_attention_interval", "least"),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": GONE}, "linear_num_key_heads", "missing"),
        ("qwen3-next-80b-a3b", {"mamba_ssm_dtype": "int4"}, "mamba_ssm_dtype", "unknown dtype"),
        ("ring-2.5-1t", {"layer_group_size": GONE}, "layer_group_size", "is missing"),
        ("ring-2.5-1t", {"layer_group_size": 7}, "layer_group_size", "not whole groups of 7"),
        ("ring-2.5-1t", {"kv_lora_rank": GONE}, "kv_lora_rank", "is missing"),
        ("ring-flash-linear-2.0", {"head_dim": 0}, "head_dim", "at least 1"),
        ("nemotron-3-nano-30b-a3b", {"hybrid_override_pattern": "M?"}, "hybrid_over", "2 entries"),
        (
            "nemotron-3-nano-30b-a3b",
            {"num_hidden_layers": 2, "hybrid_override_pattern": "M?"},
            "hybrid_override_pattern",
            "layer 1 is '?'",
        ),
        (
            "nemotron-3-nano-30b-a3b",
            {"num_hidden_layers": 2, "hybrid_override_pattern": "E-"},
            "model_type",
            "no layer of 'nemotron_h' caches",
        ),
        ("nemotron-3-nano-30b-a3b", {"ssm_state_size": "big"}, "ssm_state_size", "whole number"),
        ("step-3.5-flash", {"attention_other_setting": 3}, "attention_other_setting", "an object"),
        ("step-3.5-flash", {"num_nextn_predict_layers": "3"}, "num_nextn_predict", "whole number"),
        ("step-3.5-flash", {"num_nextn_predict_layers": 2}, "layer_types", "48 entries"),
        ("deepseek-v3", {"use_mla": False}, "use_mla", "does not cache latents"),
        ("deepseek-v3", {"layer_types": ["full_attention"]}, "layer_types", "1 entries"),
        ("deepseek-v3.2", {"index_head_dim": 0}, "index_head_dim", "at least 1"),
    ],
)
def test_a_mistake_names_its_field(
    name: str, changes: dict[str, Any], where: str, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        geometry_of(changed(name, **changes))
    assert caught.value.where is not None and caught.value.where.startswith(where)
    assert says in caught.value.problem
    assert caught.value.fix


def test_a_nested_mistake_names_the_whole_path() -> None:
    config = changed("qwen3.5-397b-a17b")
    config["text_config"]["linear_num_value_heads"] = -1
    with pytest.raises(InputError, match=r"^text_config\.linear_num_value_heads: must be at least"):
        geometry_of(config)


@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers"])
def test_kimis_lists_must_divide_the_layers_between_them(key: str) -> None:
    config = changed("kimi-linear-48b-a3b")
    for wrong in ([0], [1, 4], ["4"], [], 4):
        config["linear_attn_config"][key] = wrong
        with pytest.raises(InputError, match=r"^linear_attn_config\.\w+_layers: "):
            geometry_of(config)


@pytest.mark.parametrize("config", [None, [], "llama", 3, [{"model_type": "llama"}]])
def test_not_an_object(config: Any) -> None:
    with pytest.raises(InputError, match="a JSON object.*config.json of a Hugging Face model"):
        geometry_of(config)


@pytest.mark.parametrize(
    "hint",
    [
        {"kv_lora_rank": 512},
        {"num_kv_shared_layers": 4},
        {"mamba_d_state": 16},
        {"linear_num_value_heads": 8},
        {"attention_chunk_size": 8192},
        {"swa_head_dim": 64},
        {"is_encoder_decoder": True},
    ],
)
def test_an_unknown_type_is_read_only_when_plain(hint: dict[str, Any]) -> None:
    plain = changed("qwen3-235b-a22b", model_type="brand_new")
    unset = {key: type(value)() for key, value in hint.items()}
    known = geometry_of(changed("qwen3-235b-a22b")).geometries
    assert geometry_of({**plain, **unset}).geometries == known
    with pytest.raises(InputError, match=rf"^{next(iter(hint))}: .*'brand_new'.*\[\[models\]\]"):
        geometry_of({**plain, **hint})


JUNK = [None, True, 0, -1, 1.5, 10**30, "", "x" * 500, [], [None], [0], ["x"], {}, {"x": 1}]


@pytest.mark.parametrize("name", PUBLISHED)
def test_junk_in_any_field_is_an_input_error_or_harmless(name: str) -> None:
    """Every field in turn, also nested ones, becomes every kind of nonsense."""
    refused = 0
    for path in paths(PUBLISHED[name].config):
        for junk in JUNK:
            config = copy.deepcopy(PUBLISHED[name].config)
            at = config
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = junk
            try:
                spec = build_spec(geometry_of(config).geometries)
            except InputError as error:
                assert error.where and error.fix
                assert len(str(error)) < 400 and "\n" not in str(error)
                refused += 1
            else:
                assert spec.kv_bytes(1000) > 0
    assert refused >= 20


def paths(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in paths(value))


def test_what_is_read_is_what_json_holds() -> None:
    for model in PUBLISHED.values():
        assert json.loads(json.dumps(model.config)) == model.config
