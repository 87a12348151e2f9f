"""The example deployments can be planned and simulated, and their page shows what was run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from prfaas.config import load_deployment
from prfaas.studies.problem_files import Study
from tests.benches import bench
from tests.cli.runner import run

ROOT = Path(__file__).parents[2]
EXAMPLES = bench("examples")
NAMES = [example.config for example in EXAMPLES.EXAMPLES]
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


def config(name: str) -> Path:
    return ROOT / "configs" / f"{name}.toml"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_planned(name: str) -> None:
    file = config(name)
    plan = Study(file, "paper").plan(load_deployment(file))
    assert plan.homogeneous is not None and plan.naive is not None
    best = plan.prfaas_pd
    assert best.threshold_tokens and best.n_prefill and best.n_decode and best.egress_bps


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.grid) for name in NAMES[1:])]
)
def test_an_example_is_simulated(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--policy", "paper", "--load", "1", "--requests", "60", "--json")
    report = run(capsys, monkeypatch, "simulate", config(name), *arguments).json
    result = report["runs"]["paper"]
    assert result["requests"] == 60 and 0 < result["offload_fraction"] < 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(NAMES[0], marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.grid) for name in NAMES[1:]),
    ],
)
def test_the_plan_of_an_example_has_ranges(name: str) -> None:
    file = config(name)
    deployment, study = load_deployment(file), Study(file, "paper")
    ranges = study.ranges(deployment)
    assert ranges is not None and ranges.narrow_with is not None
    low, _, high = ranges.lambda_max_rps
    assert low < study.plan(deployment).prfaas_pd.lambda_max_rps < high


@pytest.mark.parametrize("example", EXAMPLES.EXAMPLES, ids=NAMES)
def test_the_page_shows_the_commands_that_make_it(example: Any) -> None:
    assert f"## {example.title}\n" in PAGE
    assert (ROOT / "docs" / "img" / f"examples-{example.config}.png").is_file()
    for block, arguments in (("plan", example.plan), ("simulate", example.simulate)):
        found = re.search(
            rf"<!-- begin {block} {re.escape(example.config)} -->\n```sh\n(.*?)\n```", PAGE
        )
        assert found is not None and found[1].startswith(" ".join(["prfaas", *arguments]))


def report(ratio: float | None, low: float = 0.0, high: float = 0.0) -> dict[str, Any]:
    name = "prfaas_over_equal_cost"
    return {"ratios": {name: ratio}, "ranges": {name: {"low": low, "high": high}}}


@pytest.mark.parametrize(
    ("ratio", "low", "high", "says"),
    [
        (1.4, 1.1, 1.7, "1.40 (1.10-1.70) times the requests: it pays, also at the lower end"),
        (1.4, 1.0, 1.7, "it probably pays, but the range includes 1"),
        (1.001, 0.7, 1.2, "it is about even, and the range includes 1"),
        (0.9, 0.7, 1.2, "it probably does not pay, but the range includes 1"),
        (0.6, 0.5, 0.7, "it does not pay, even at the upper end"),
        (None, 0.0, 0.0, "not known, because a price is missing"),
    ],
)
def test_an_answer_is_as_sure_as_its_range(
    ratio: float | None, low: float, high: float, says: str
) -> None:
    assert says in EXAMPLES.answer(report(ratio, low, high), "equal_cost", "the same money")


def test_output_is_shown_without_its_wall_time() -> None:
    lines = EXAMPLES.shown("a  \n- 12,000 requests simulated; 7.1 s in all.\nb\n")
    assert lines == ["```text", "a", "b", "```"]


def test_the_anchor_of_a_heading() -> None:
    assert EXAMPLES.anchor("Qwen3.5-397B, H200 and H20") == "qwen35-397b-h200-and-h20"
