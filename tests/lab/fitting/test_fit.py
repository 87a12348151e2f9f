"""The fit, and how far its estimates are off for what it has not seen."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prfaas.estimator.efficiency import Efficiencies, fitted
from prfaas_lab.fitting.fit import constants_of, error_parts, fit, unseen_errors, usable
from prfaas_lab.fitting.observations import Observation, builtin_observations
from tests.benches import bench

CASE = "case-study-1t"
ROOT = Path(__file__).parents[3]


def flat(constants: Efficiencies) -> dict[str, float]:
    tree: dict[str, Any] = msgspec.to_builtins(constants)
    return {
        f"{key}.{name}": part
        for key, value in tree.items()
        if not isinstance(value, list)
        for name, part in (value.items() if isinstance(value, dict) else [("", value)])
    }


def shares(errors: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.abs(np.expm1(errors))


def test_the_package_has_the_constants_of_a_fresh_fit() -> None:
    fresh, packaged = fit(builtin_observations()), fitted()
    assert flat(packaged) == pytest.approx(flat(fresh), rel=0.01), "run bench/estimates.py --write"
    assert packaged.fitted_accelerators == fresh.fitted_accelerators


def test_unseen_models_on_h200() -> None:
    """The bars of docs/estimates.md over the paper's 28 H200 times."""
    used = usable(builtin_observations())
    errors = unseen_errors(used, "prefill", fitted(), "model")
    published = shares([error for seen, error in errors if seen.published_h200])
    assert len(published) == 28
    assert np.median(published) <= 0.20
    assert np.quantile(published, 0.9) <= 0.45


@pytest.mark.parametrize("accelerators", [("h20",), ("h20", "h200")])
def test_the_h20_of_the_case_study_is_predicted_by_the_rest(accelerators: tuple[str, ...]) -> None:
    def hidden(seen: Observation) -> bool:
        return seen.model == CASE and seen.accelerator in accelerators

    constants = constants_of(usable(builtin_observations(), hidden))
    errors = [
        seen.log_error(constants)
        for seen in builtin_observations()
        if (seen.model, seen.accelerator, seen.kind) == (CASE, "h20", "prefill")
    ]
    assert len(errors) == 3
    assert shares(errors).max() <= 0.25


def test_the_case_study_planned_from_estimates_alone() -> None:
    estimates = bench("estimates")
    used = usable(builtin_observations(), estimates.is_case_study)
    planned = estimates.case_study(constants_of(used))
    assert planned["threshold_tokens"] == pytest.approx(19_400, rel=0.30)
    assert planned["gain"] == pytest.approx(1.54, abs=0.15)


def test_the_fit_finds_the_constants_that_made_the_times() -> None:
    truth = msgspec.structs.replace(
        fitted(), matrix=0.5, exchange=0.5, memory=0.7, softmax_flops=2e15, decode_layer_s=1e-4
    )
    made = [replace(seen, seconds=seen.estimate(truth)) for seen in usable(builtin_observations())]
    found = constants_of(made)
    names = ("matrix", "exchange", "memory", "softmax_flops", "decode_layer_s")
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.15), name


def test_single_odd_figures_count_little() -> None:
    used = usable(builtin_observations())
    odd = [
        replace(seen, seconds=seen.seconds * (10 if index % 20 == 0 else 1))
        for index, seen in enumerate(used)
    ]
    before, after = constants_of(used), constants_of(odd)
    assert after.matrix == pytest.approx(before.matrix, rel=0.15)
    assert after.memory == pytest.approx(before.memory, rel=0.15)


def test_parts_of_the_error_are_told_apart() -> None:
    """Errors drawn with known parts. Forty models on forty accelerators, four lengths each."""
    random = np.random.default_rng(1)
    models, accelerators = 0.3 * random.standard_normal(40), 0.2 * random.standard_normal(40)
    (seen, *_) = builtin_observations()
    errors = [
        (
            replace(seen, model=str(m), accelerator=str(a), source=""),
            float(models[m] + accelerators[a] + pair + 0.15 * random.standard_normal()),
        )
        for m in range(40)
        for a in range(0, 40, 2)
        for pair in [0.1 * random.standard_normal()]
        for _ in range(4)
    ]
    parts = error_parts(errors)
    expected = (np.sqrt(np.mean(models**2)), np.sqrt(np.mean(accelerators[::2] ** 2)), 0.1, 0.15)
    found = (parts.model, parts.accelerator, parts.pair, parts.length)
    assert found == pytest.approx(expected, abs=0.05)
    assert parts.total == pytest.approx(math.hypot(*found))


def test_accelerators_without_points_have_a_larger_error() -> None:
    constants = fitted()
    for kind in ("prefill", "decode"):
        known, unknown = (constants.error(kind, name) for name in ("h200", "tpu7x"))
        assert unknown.accelerator > known.accelerator
        assert unknown.model == known.model


NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_benchmark(tmp_path: Path) -> None:
    estimates = bench("estimates")
    page = tmp_path / "estimates.md"
    committed = (ROOT / "docs" / "estimates.md").read_text(encoding="utf-8")
    page.write_text(committed, encoding="utf-8")
    estimates.write_docs(estimates.Figures(builtin_observations()), page)
    fresh = page.read_text(encoding="utf-8")
    advice = "run bench/estimates.py --docs docs"
    assert re.sub(r"[+-]?" + NUMBER.pattern, "#", fresh) == re.sub(
        r"[+-]?" + NUMBER.pattern, "#", committed
    ), advice
    numbers = [
        [float(number.replace(",", "")) for number in NUMBER.findall(text)]
        for text in (fresh, committed)
    ]
    # Another machine may round the last printed digit differently.
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=1), advice
