"""Printed figures as seconds."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from prfaas.errors import InputError
from prfaas.estimator.efficiency import fitted
from prfaas.estimator.times import decode_parts, prefill_parts
from prfaas_lab.fitting.observations import Observation, builtin_observations, observations
from prfaas_lab.fitting.points import (
    PointGroup,
    PointsFile,
    PointSource,
    builtin_points,
    parse_points,
)
from tests.estimator.instances import CATALOG, instance

PLACE = instance("qwen3-4b", "h20", 1)
CONSTANTS = fitted()


def observed(**fields: object) -> list[Observation]:
    common: dict[str, object] = {
        "model": "qwen3-4b",
        "accelerator": "h20",
        "gpus": 1,
        "engine": "test",
        "engine_class": "vllm",
        "use": "fit",
    }
    group = PointGroup(**{**common, **fields})  # type: ignore[arg-type]
    source = PointSource(source="test", status="published", points=[group])
    return list(observations(CATALOG, PointsFile(sources=[source])))


def test_a_rate_counts_the_output_and_the_gpus_that_it_is_of() -> None:
    (seen,) = observed(
        kind="prefill_rate", gpus=8, per_gpus=1, tokens=[2000], output_tokens=100, values=[700.0]
    )
    assert seen.seconds == pytest.approx(2100 / (8 * 700))
    assert seen.fixed is None
    (step,) = observed(kind="decode_rate", tokens=[2000], batch=[32], values=[800.0])
    assert (step.kind, step.seconds) == ("decode", pytest.approx(0.04))


def test_the_time_of_one_prompt_contains_its_engines_fixed_time() -> None:
    (seen,) = observed(kind="prefill_s", tokens=[8192], values=[1.0])
    work_s = prefill_parts(PLACE, 8192, 0, 1).seconds(CONSTANTS)
    assert seen.estimate(CONSTANTS) == pytest.approx(CONSTANTS.prefill_fixed_s.vllm + work_s)
    assert seen.log_error(CONSTANTS) == pytest.approx(math.log(seen.estimate(CONSTANTS)))


def test_runs_of_one_request_show_the_decode_step_and_attention() -> None:
    """Runs made of known times: steps that slow down in proportion to the prompt, and a prefill."""
    output, step_s, slower_s = 2048, 0.01, 1e-7

    def run_s(prompt: int) -> float:
        # Any proportional part cancels, also that of the matrix products.
        parts = prefill_parts(PLACE, prompt, 0, 1)
        attention = parts._replace(memory=0.0).seconds(CONSTANTS) if prompt > 1 else 0.0
        return attention + output * (step_s + slower_s * (prompt - 1))

    lengths = [1, 30720, 122880]
    step, attention = observed(
        kind="run_rate",
        tokens=lengths,
        output_tokens=output,
        values=[(prompt + output) / run_s(prompt) for prompt in lengths],
    )
    assert (step.kind, step.seconds) == ("decode", pytest.approx(step_s))
    assert step.parts == decode_parts(PLACE, 1, output // 2, 1)
    assert attention.kind == "prefill"
    assert attention.log_error(CONSTANTS) == pytest.approx(0, abs=1e-3)


def test_builtin_points_are_complete() -> None:
    file = builtin_points()
    points = sum(len(group.values) for source in file.sources for group in source.points)
    assert points > 150
    assert not {model.name for model in file.models} & set(CATALOG.models)
    assert not {gpu.name for gpu in file.accelerators} & set(CATALOG.accelerators)
    seen = builtin_observations()
    assert sum(one.published_h200 for one in seen) == 28
    assert all(one.seconds > 0 and one.estimate(CONSTANTS) > 0 for one in seen)
    fitted_kinds = Counter((one.kind, one.use) for one in seen)
    assert fitted_kinds["prefill", "fit"] > 100 and fitted_kinds["decode", "fit"] > 100


SOURCE = """
[[sources]]
source = "a page"
status = "published"
points = [{ model = "m", accelerator = "a", gpus = 1, engine = "e", engine_class = "vllm", %s }]
"""


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ('kind = "decode_s", use = "fit", tokens = [1, 2], values = [1.0]', "do not belong"),
        ('kind = "decode_s", use = "check", tokens = [1], values = [1.0]', "no reason"),
        ('kind = "run_rate", use = "fit", tokens = [9], values = [1.0]', "prompt of one token"),
        ('kind = "decode_s", use = "fit", tokens = [1], values = [0.0]', "> 0"),
        ('kind = "guess", use = "fit", tokens = [1], values = [1.0]', "guess"),
        ('kind = "decode_s", use = "fit", tokens = [1], values = [1.0], per = 8', "per"),
    ],
)
def test_points_that_are_not_clear_are_refused(fields: str, complaint: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_points(SOURCE % fields, "points.toml")
    assert complaint in str(refused.value)
    assert "sources.0" in str(refused.value)
