"""Tables 3 and 5 and section 2.3 from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.runner import Result

Run = Callable[..., Result]

# Table 3, Phi_kv in Gbps.
TABLE_3 = {
    "kimi-linear-48b-a3b": [1.19, 2.29, 3.87, 4.88],
    "mimo-v2-flash": [0.82, 2.85, 4.66, 4.71],
    "qwen3.5-397b-a17b": [4.13, 6.28, 8.25, 7.47],
    "ring-2.5-1t": [7.27, 4.47, 2.59, 1.46],
    "minimax-m2.5": [4.94, 32.87, 59.93, 47.82],
    "qwen3-235b-a22b": [4.12, 22.42, 33.35, 21.50],
}
# Table 5: tokens, S_kv MiB, T_prefill s, Phi_kv Gbps.
TABLE_5 = [
    (1_024, 190.8, 0.44, 3.61),
    (8_192, 308.9, 0.72, 3.59),
    (32_000, 701.3, 1.84, 3.19),
    (130_000, 2316.3, 7.40, 2.62),
]


def test_tables_3_and_5(prfaas: Run) -> None:
    models = {model["name"]: model for model in prfaas("kv", "--json").json["models"]}
    assert list(models) == [*TABLE_3, "case-study-1t"]
    for name, printed in TABLE_3.items():
        rows = models[name]["lengths"]
        assert [row["tokens"] for row in rows] == [1_024, 8_192, 32_768, 131_072]
        assert [row["phi_kv_gbps"] for row in rows] == pytest.approx(printed, rel=0.01)
        assert all(row["source"].startswith("T_prefill implied") for row in rows)
    rows = models["case-study-1t"]["lengths"]
    assert all(row["source"].startswith("T_prefill published") for row in rows)
    for row, (tokens, mebibytes, seconds, gbps) in zip(rows, TABLE_5, strict=True):
        assert row["tokens"] == tokens
        assert row["kv_bytes"] / 2**20 == pytest.approx(mebibytes, rel=0.01)
        assert row["t_prefill_s"] == pytest.approx(seconds)
        assert row["phi_kv_gbps"] == pytest.approx(gbps, rel=0.01)


@pytest.mark.parametrize(
    ("model", "arguments", "printed_gbps"),
    [
        ("minimax-m2.5", (), 3800),
        ("qwen3-235b-a22b", (), 2100),
        ("ring-2.5-1t", (), 170),
        ("ring-2.5-1t", ("--gpus", 10_000, "--lengths", 131_072), 1800),
    ],
)
def test_egress_of_section_2_3(
    prfaas: Run, model: str, arguments: tuple[object, ...], printed_gbps: float
) -> None:
    (entry,) = prfaas("kv", model, "--json", *arguments).json["models"]
    assert entry["egress_gbps"] == pytest.approx(printed_gbps, rel=0.03)
    at = next(r for r in entry["lengths"] if r["tokens"] == entry["egress_at_tokens"])
    assert at["egress_gbps"] == entry["egress_gbps"]


def test_below_100_gbps_at_128k(prfaas: Run) -> None:
    (ring,) = prfaas("kv", "ring-2.5-1t", "--json").json["models"]
    assert ring["lengths"][-1]["egress_gbps"] < 100


def test_lengths_between_and_beyond_points_say_so(prfaas: Run) -> None:
    (model,) = prfaas("kv", "case-study-1t", "--lengths", "8192,9000,500000", "--json").json[
        "models"
    ]
    at, between, beyond = (row["source"] for row in model["lengths"])
    assert at.startswith("T_prefill published")
    assert between.startswith("T_prefill inferred: interpolated")
    assert beyond.startswith("T_prefill inferred: extrapolated beyond 1,024 to 130,000")


def test_another_dtype_changes_bytes_but_not_times(prfaas: Run) -> None:
    (own,) = prfaas("kv", "minimax-m2.5", "--json").json["models"]
    (half,) = prfaas("kv", "minimax-m2.5", "--kv-dtype", "float8_e4m3fn", "--json").json["models"]
    for ours, theirs in zip(own["lengths"], half["lengths"], strict=True):
        assert theirs["kv_bytes"] * 2 == ours["kv_bytes"]
        assert theirs["t_prefill_s"] == ours["t_prefill_s"]


def test_times_without_a_profile_are_estimated(prfaas: Run) -> None:
    (model,) = prfaas("kv", "deepseek-v3", "--json").json["models"]
    assert [row["tokens"] for row in model["lengths"]] == [1024, 8192, 32768, 131072]
    assert all(row["t_prefill_s"] > 0 for row in model["lengths"])
    assert all(row["source"].startswith("T_prefill estimated: ") for row in model["lengths"])
    assert "estimated" in prfaas("kv", "deepseek-v3").out


def test_no_times_where_the_model_does_not_fit(prfaas: Run) -> None:
    arguments = ("kv", "ring-2.5-1t", "--gpus-per-instance", 4)
    (model,) = prfaas(*arguments, "--json").json["models"]
    assert model["egress_gbps"] is None
    assert all(row["kv_bytes"] > 0 for row in model["lengths"])
    assert all(row["t_prefill_s"] is None for row in model["lengths"])
    assert all("do not fit into" in row["source"] for row in model["lengths"])
    assert "unknown" in prfaas(*arguments).out


def test_a_config_json(prfaas: Run, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        (model,) = prfaas("kv", "--config", path, "--lengths", "100", "--json").json["models"]
        assert model["lengths"][0]["kv_bytes"] == 100 * 2 * 2 * (16 + 16) * 2
        # Without its feed-forward layers and vocabulary, the model's work cannot be counted.
        assert "cannot be estimated: " in model["lengths"][0]["source"]
    config |= {"intermediate_size": 128, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (model,) = prfaas("kv", "--config", tmp_path, "--lengths", "100", "--json").json["models"]
    assert model["lengths"][0]["source"].startswith("T_prefill estimated: ")


def test_the_table_for_people(prfaas: Run) -> None:
    out = prfaas("kv", "ring-2.5-1t").out
    assert "Ring-2.5-1T" in out and "165.8 Gbps" in out and "implied" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing-like-it",), "unknown model 'nothing-like-it'"),
        (("kimi-linear",), "did you mean 'kimi-linear-48b-a3b'"),
        (("--lengths", "32K"), "--lengths: '32K' is not a token count; use plain numbers"),
        (("--lengths", "0"), "--lengths: 0 tokens"),
        (("--lengths", "1024,,2048"), "--lengths: '' is not a token count"),
        (("--gpus", "0"), "--gpus: 0 is out of range"),
        (("--gpus", "4"), "--gpus: 4 GPUs are fewer than the 8 of one instance"),
        (("--gpus", "many"), "is not a valid integer"),
        (("--accelerator", "h2000"), "unknown accelerator 'h2000'; did you mean 'h200'"),
        (("kimi-k2", "--kv-dtype", "fp8"), "unknown dtype 'fp8'"),
        (("--config", "missing.json"), "missing.json: no such file"),
        (("--catalog", "missing.toml"), "missing.toml: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    prfaas: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = prfaas("kv", *arguments)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err and not result.out


def test_a_config_that_is_no_config(prfaas: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, message in (("{", "not valid JSON"), ("[]", str(path)), ('{"a": 1}', "model_type")):
        path.write_text(text)
        result = prfaas("kv", "--config", path)
        assert result.code == 2
        assert message in result.err and str(path) in result.err
        assert len(result.err.splitlines()) == 1
