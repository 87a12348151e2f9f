from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.config import load_deployment
from prfaas.config.advice import parse_question
from prfaas.config.deployment import Trace
from prfaas.config.strict import parse_toml
from prfaas.studies.advice_market import MarketStudy
from prfaas.studies.problem_files import Study
from tests.catalog.hf_models import PUBLISHED
from tests.cli.runner import Result

Run = Callable[..., Result]
ROOT = Path(__file__).parents[2]
OWNED = ROOT / "configs" / "advise" / "owned.toml"
FLAGS = ("--model", "kimi-linear-48b-a3b", "--prompt-tokens", 20000, "--link", 10)
ONE_PAIR = ("--here", "h20", "--there", "h200", "--price", "h20=1.8", "--price", "h200=3.6")


def test_json_has_the_answer_and_what_it_rests_on(prfaas: Run) -> None:
    answer = prfaas("advise", *FLAGS, *ONE_PAIR, "--budget", 60, "--json").json
    best = answer["prfaas"][0]
    assert best["here"]["accelerator"] == "h20" and best["there"]["accelerator"] == "h200"
    assert best["usd_per_hour"] <= 60
    assert best["rate_rps"] == pytest.approx(best["lambda_max_rps"] * 0.8)
    assert best["here"]["times"].startswith("estimated")
    assert set(best["certainty"]) == {"gain", "wins", "measure"}
    (lost,) = best["lost_sites"]
    assert 0 < lost["rate_rps"] < best["lambda_max_rps"]
    assert all(single["lost_sites"] == [] for single in answer["single"])
    assert answer["gain"] == best["gain"]
    assert answer["prices"]["h20"] == {"usd_per_gpu_hour": 1.8, "source": "given"}
    assert {single["here"]["site"] for single in answer["single"]} == {"here", "there"}


def test_a_table_and_a_verdict_for_people(prfaas: Run) -> None:
    out = prfaas("advise", *FLAGS, *ONE_PAIR, "--rate", 4).out
    assert "the least cost of 4 requests/s" in out
    for words in ("threshold t", "USD per 1M output tokens", "5% to 95% range", "orth it:"):
        assert words in out
    assert "without the other site" in out and "Without prfaas or its link: " in out
    assert "$1.8 per GPU and hour, given" in out
    assert "are estimated, not measured" in out


@pytest.mark.slow
def test_the_recommendation_is_a_deployment_that_plans_and_simulates(
    prfaas: Run, tmp_path: Path
) -> None:
    file = tmp_path / "deployment.toml"
    answer = prfaas("advise", OWNED, "--write", file, "--json").json
    assert answer["written"] == [str(file)]
    planned = prfaas("plan", file, "--reading", "exact", "--json").json["prfaas_pd"]
    best = answer["prfaas"][0]
    assert planned["lambda_max_rps"] == pytest.approx(best["lambda_max_rps"], rel=5e-3)
    assert planned["n_prefill"] == best["n_prefill"]
    simulated = prfaas("simulate", file, "--requests", 50, "--json")
    assert simulated.code == 0, simulated.err


def test_paths_of_the_question_are_kept_for_the_deployment(prfaas: Run, tmp_path: Path) -> None:
    config = PUBLISHED["qwen3-next-80b-a3b"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.toml").write_text('[[accelerators]]\nname = "mine"\n')
    rows = [
        {"timestamp": i, "input_length": 900 * i, "output_length": 300, "hash_ids": [i]}
        for i in range(1, 40)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    question = tmp_path / "question.toml"
    question.write_text(
        """
        catalog = ["own.toml"]
        rate_rps = 2
        model = { name = "own", config = "config.json" }
        workload = { kind = "trace", path = "trace.jsonl", block_tokens = 100000 }
        slo = { output_tokens_per_s = 30 }
        links = [{ gbps = 10 }]
        """
    )
    file = tmp_path / "below" / "deployment.toml"
    file.parent.mkdir()
    result = prfaas("advise", question, "--here", "h20", "--there", "h200", "--write", file)
    assert result.code == 0, result.err
    written = load_deployment(file)
    assert written.catalog == ["../own.toml"] and written.model.config == "../config.json"
    assert isinstance(written.workload, Trace) and written.workload.path == "../trace.jsonl"
    assert Study(file, "exact").problem(written).local.pool.accelerator == "h20"


def test_flags_win_over_the_file(prfaas: Run) -> None:
    answer = prfaas("advise", OWNED, "--rate", 1, "--own", "h20=8", "--json").json
    assert answer["budget_usd_per_hour"] is None and answer["rate_rps"] == 1
    assert answer["single"][0]["here"]["owned_gpus"] <= 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", 0), "no GPU is owned"),
        (("--budget", -1), "budget_usd_per_hour: expected `float` >= 0.0"),
        (("--budget", 9, "--rate", 2), "a budget and a rate are both given"),
        ((), "neither a budget nor a rate is given"),
        (("--budget", 1, *ONE_PAIR), "give at least $"),
        (("--budget", 50, "--here", "h21"), "hardware.here.0: unknown accelerator 'h21'; did you"),
        (("--budget", 50, "--price", "h20"), "--price: 'h20' is not understood; example: h20=1.5"),
        (("--budget", 50, "--own", "h20=x"), "--own: 'h20=x' is not understood"),
        (("--budget", 50, "--link", "10=5"), "--link: '10=5' is not understood"),
        (("--budget", 50, "--link", "0"), "links.1.gbps: expected `float` > 0.0"),
        (("--budget", 50, "--gpus-per-instance", "a"), "--gpus-per-instance: 'a' is not"),
        (("--budget", 50, "--here", "groq-lp30", "--there", "none"), "no price is known"),
        (
            ("--budget", 50, "--here", "groq-lp30", "--there", "none", "--price", "groq-lp30=1"),
            "do not fit",
        ),
        (("--budget", 50, "--median-prompt", 9), "the mean and the median are both given"),
        (("--budget", 50, "--utilisation", 2), "utilisation: expected `float` <= 1.0"),
        (("--budget", 0, "--own", "h200=1", "--here", "none", "--there", "none"), "two instances"),
        (("--budget", 50, "--tokens-per-s", 1e6), "lower it, or allow larger instances"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_bad_questions_are_refused(prfaas: Run, arguments: tuple[object, ...], words: str) -> None:
    result = prfaas("advise", *FLAGS, *arguments)
    assert result.code == 2 and result.err.startswith("error: ")
    assert words in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt-tokens", 100, "--link", 1, "--budget", 9), "model: no model is given"),
        (("--model", "kimi-k2", "--link", 1, "--budget", 9), "add --prompt-tokens N"),
        (("--model", "kimi-k2", "--prompt-tokens", 100, "--budget", 9), "add --link 10"),
    ],
)
def test_what_is_missing_is_named(prfaas: Run, arguments: tuple[object, ...], words: str) -> None:
    result = prfaas("advise", *arguments)
    assert result.code == 2 and words in result.err


def test_unknown_keys_and_double_entries_of_the_file(prfaas: Run, tmp_path: Path) -> None:
    question = tmp_path / "question.toml"
    for old, new, words in (
        ("gbps = 100", "gpbs = 100", "links.0.gpbs: unknown key; did you mean 'gbps'?"),
        ('site = "there"', 'site = "away"', "owned.1.site: invalid enum value"),
        (
            "gbps = 100",
            "gbps = 100\nusd_per_month = 1\nusd_per_hour = 1",
            "links.0: has two prices",
        ),
        (
            'accelerator = "h200"\ngpus = 16\nsite = "there"',
            'accelerator = "h20"\ngpus = 1',
            "twice",
        ),
        ("mu = 9.90", "mu = 90", "workload.mu: exp(90) tokens is not a plausible median"),
    ):
        text = OWNED.read_text()
        assert old in text
        question.write_text(text.replace(old, new, 1))
        result = prfaas("advise", question)
        assert result.code == 2 and str(question) in result.err and words in result.err


def test_a_profile_of_the_catalog_is_used(prfaas: Run) -> None:
    """The paper's own model: its H200 and H20 profiles are published or inferred."""
    answer = prfaas(
        *("advise", "--model", "case-study-1t", "--median-prompt", 19930, "--link", 100),
        *(*ONE_PAIR, "--budget", 250, "--gpus-per-instance", 8, "--json"),
    ).json
    best = answer["prfaas"][0] if answer["prfaas"] else answer["single"][0]
    assert not best["here"]["times"].startswith("estimated")


def test_owned_gpus_of_a_kind_that_is_not_for_sale() -> None:
    raw = parse_toml(OWNED.read_text(), OWNED)
    raw["hardware"] = {"here": [], "there": []}
    market = MarketStudy(OWNED, parse_question(raw, OWNED)).offer().market
    assert {place.supply.buy_usd for place in market.places} == {None}
    assert {place.supply.accelerator for place in market.here} == {"h20"}
