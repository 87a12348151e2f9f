from pathlib import Path

import pytest

from prfaas.catalog import Catalog
from prfaas.catalog.hf_config import geometry_of
from prfaas.catalog.hf_shape import shape_of
from prfaas.errors import InputError
from prfaas.kvspec import build_spec
from tests.catalog.hf_models import PUBLISHED

CATALOG = Catalog.builtin()

# Published or derived totals of the real models, bfloat16 KV and float32 states: bytes per token,
# fixed state bytes, window bytes per window token. From the models' configs, not from this code.
TOTALS = {
    "kimi-linear-48b-a3b": (8064, 43417600, 0),
    "mimo-v2-flash": (23040, 0, 199680),
    "qwen3.5-397b-a17b": (30720, 192061440, 0),
    "ring-2.5-1t": (11520, 293601280, 0),
    "minimax-m2.5": (253952, 0, 0),
    "qwen3-235b-a22b": (192512, 0, 0),
    "case-study-1t": (17280, 182353920, 0),
    "qwen3-next-80b-a3b": (24576, 77266944, 0),
    "ring-flash-linear-2.0": (8192, 58720256, 0),
    "gpt-oss-120b": (36864, 0, 36864),
    "step-3.5-flash": (49152, 0, 135168),
    "nemotron-3-nano-30b-a3b": (6144, 49082368, 0),
    "kimi-k2": (70272, 0, 0),
    "deepseek-v3": (70272, 0, 0),
    "deepseek-v3.2": (78324, 0, 0),
    "kimi-k3": (27648, 449372160, 0),
    "qwen3-4b": (147456, 0, 0),
}
PAPER_MODELS = list(TOTALS)[:7]


@pytest.mark.parametrize("name", TOTALS)
def test_totals_of_every_model(name: str) -> None:
    per_token, state, window_per_token = TOTALS[name]
    spec = CATALOG.model(name).spec()
    assert spec.bytes_per_token == per_token
    assert spec.state_bytes == state
    # A two-token prompt lies inside every window.
    assert spec.kv_bytes(2) == 2 * per_token + state + 2 * window_per_token


def test_every_model_is_listed() -> None:
    assert set(CATALOG.models) == set(TOTALS)


def test_the_papers_models_have_profiles_of_its_instances_and_the_rest_none() -> None:
    assert [name for name in CATALOG.models if CATALOG.profile(name, "h200", 8)] == PAPER_MODELS


def test_every_value_names_its_source() -> None:
    for model in CATALOG.models.values():
        assert model.source and model.parameters_b is not None and model.parameters_b.source
    for accelerator in CATALOG.accelerators.values():
        values = [getattr(accelerator, f) for f in accelerator.__struct_fields__[2:]]
        assert all(value.source for value in values if value is not None)
    assert all(record.source for record in CATALOG.profiles)


def test_published_throughput_implies_the_time() -> None:
    record = CATALOG.profile("minimax-m2.5", "h200", 8)
    assert record is not None and record.status == "implied"
    # 8 GiB-ish of KV at 59.93 Gbps.
    seconds = dict(
        zip((p.new for p in record.prefill), CATALOG.prefill_seconds(record), strict=True)
    )
    assert seconds[32768] == pytest.approx(253952 * 32768 * 8 / 59.93e9)


def test_there_is_no_scaling_between_instance_sizes() -> None:
    assert CATALOG.profile("case-study-1t", "h200", 4) is None


def test_a_users_file_adds_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        [[models]]
        name = "mine"
        layers = 3
        status = "measured"
        source = "me"
        [[models.groups]]
        kind = "gqa"
        layers = [0, 2]
        kv_heads = 1
        k_dim = 4
        v_dim = 4
        [[models.groups]]
        kind = "linear"
        layers = "rest"
        k_heads = 1
        v_heads = 1
        k_dim = 2
        v_dim = 2
        conv_kernel = 2
        [[accelerators]]
        name = "h20"
        usd_per_hour = { value = 9, status = "published", source = "my invoice" }
        """
    )
    catalog = CATALOG.extended([path])
    assert [g.layers for g in catalog.model("mine").spec().groups] == [(0, 2), (1,)]
    price = catalog.accelerator("h20").usd_per_hour
    assert price is not None and price.value == 9
    assert CATALOG.accelerator("h20").usd_per_hour != price


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[models]]\nname = 'x'", "models.0.layers: is missing"),
        ("models = 3", "models: expected `array`"),
        ("[[modles]]\nname = 'x'", "modles: unknown key; did you mean 'models'"),
        ("[[accelerators]]\nname = 'x'\ntdp = 3", "accelerators.0.tdp: unknown key; did you mean"),
        ("x = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        CATALOG.extended([path])
    assert str(caught.value).startswith(str(path))


MODEL = """
[[models]]
name = "m"
layers = 2
status = "inferred"
source = "s"
[[models.groups]]
kind = "gqa"
layers = {layers}
kv_heads = 1
k_dim = 1
v_dim = 1
"""


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            "[0, 2]",
            r"groups.0.layers: \[2\] is not a list of this model's layers; list each layer once",
        ),
        ("[1, 1]", "list each layer once"),
        ("[]", "list each layer once"),
        ("'some'", "models.0.groups.0.layers: .*'some'"),
        ("[-1]", "layers.0: expected `int` >= 0"),
    ],
)
def test_layers_that_cannot_be_placed(tmp_path: Path, layers: str, message: str) -> None:
    path = tmp_path / "m.toml"
    path.write_text(MODEL.format(layers=layers))
    with pytest.raises(InputError, match=message):
        CATALOG.extended([path])


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("{ new = 5 }", "give either seconds or phi_gbps"),
        ("{ new = 5, seconds = 1, phi_gbps = 1 }", "give either seconds or phi_gbps"),
        ("{ new = 5, cached = 3, phi_gbps = 1 }", "is not defined for a cached prefix"),
    ],
)
def test_a_point_needs_one_time(tmp_path: Path, point: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        "[[profiles]]\nmodel = 'kimi-k2'\naccelerator = 'h20'\ngpus = 8\nstatus = 'measured'\n"
        f"source = 's'\nprefill = [{{ new = 1, seconds = 1 }}, {point}]"
    )
    catalog = CATALOG.extended([path])
    record = catalog.profile("kimi-k2", "h20", 8)
    assert record is not None
    with pytest.raises(InputError, match=message):
        catalog.prefill_seconds(record)


def test_unknown_names_get_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match="did you mean 'kimi-linear-48b-a3b'"):
        CATALOG.model("kimi-linear")
    with pytest.raises(InputError, match="known: h100"):
        CATALOG.accelerator("abacus")


@pytest.mark.parametrize("name", TOTALS)
def test_the_catalog_says_what_the_models_own_config_says(name: str) -> None:
    """Two descriptions of one model, written apart: same layers, same bytes."""
    from_config = build_spec(geometry_of(PUBLISHED[name].config).geometries)
    assert set(CATALOG.model(name).spec().groups) == set(from_config.groups)
    assert CATALOG.model(name).model_shape() == shape_of(PUBLISHED[name].config, name)


@pytest.mark.parametrize("name", TOTALS)
def test_counted_parameters_are_the_published_ones(name: str) -> None:
    """Names such as 48B and 1T are rounded; norms, biases and layers that predict further tokens
    are not counted."""
    model = CATALOG.model(name)
    assert model.parameters_b is not None
    counted = model.model_shape().total_elements / 1e9
    assert counted == pytest.approx(model.parameters_b.value, rel=0.05)


ACTIVE = [
    (name, model.shape.active_b)
    for name, model in CATALOG.models.items()
    if model.shape is not None and model.shape.active_b is not None
]


@pytest.mark.parametrize(("name", "active_b"), ACTIVE)
def test_counted_parameters_per_token(name: str, active_b: float) -> None:
    """Published figures are rounded, and most include the output matrix or the embedding, which
    are up to a tenth of what a token passes and are counted apart here."""
    counted = CATALOG.model(name).model_shape().active_elements / 1e9
    assert counted == pytest.approx(active_b, rel=0.12)


def test_a_model_without_matrices_cannot_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(MODEL.format(layers="'all'"))
    with pytest.raises(InputError, match=r"does not have the matrices of m.*\[models.shape\]"):
        CATALOG.extended([path]).model("m").model_shape()
    shape = '[models.shape]\nhidden = 4\nvocabulary = 9\nstatus = "inferred"\nsource = "s"\n'
    path.write_text(MODEL.format(layers="'all'") + shape)
    with pytest.raises(InputError, match="number of query heads of m.*add heads"):
        CATALOG.extended([path]).model("m").model_shape()
