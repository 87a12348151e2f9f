from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from prfaas.catalog import Catalog, DecodePoint, PrefillPoint, ProfileRecord
from prfaas.catalog.provenance import Status
from prfaas.errors import InputError
from prfaas.estimator.efficiency import fitted
from prfaas.estimator.times import decode_s, prefill_s
from prfaas.planner.instance_times import Lengths, PlannedModel, TimesFinder
from prfaas.planner.workload import lognormal

CATALOG = Catalog.builtin()
LENGTHS = Lengths(longest=65_536, context=8_192)
MODEL = "qwen3-235b-a22b"


def finder(
    *own: ProfileRecord, model: str = MODEL, quantised: bool = False, catalog: Catalog = CATALOG
) -> TimesFinder:
    known = Catalog(catalog.models, catalog.accelerators, (*catalog.profiles, *own))
    planned = PlannedModel.of_catalog(known, model, known.model(model).spec())
    if quantised:
        planned = PlannedModel(planned.name, planned.spec, planned.shape, quantised=True)
    return TimesFinder(known, planned, LENGTHS, own=own)


def record(
    accelerator: str,
    *prefill: tuple[int, float],
    model: str = MODEL,
    gpus: int = 8,
    decode: tuple[tuple[int, float], ...] = (),
    status: Status = "measured",
) -> ProfileRecord:
    return ProfileRecord(
        model=model,
        accelerator=accelerator,
        gpus=gpus,
        status=status,
        source="our lab",
        prefill=[PrefillPoint(new=new, seconds=seconds) for new, seconds in prefill],
        decode=[DecodePoint(batch=batch, step_s=step_s) for batch, step_s in decode],
    )


def estimate_s(new: int, accelerator: str = "b200", model: str = MODEL, gpus: int = 8) -> float:
    instance = finder(model=model).instance(accelerator, gpus)
    return prefill_s(instance, fitted(), new)


def test_lengths_of_a_workload() -> None:
    workload = lognormal(8.0, 0.5, 100, 10_000, output_tokens=500, cached_tokens=1000)
    lengths = Lengths.of(workload)
    assert lengths.longest == 11_500
    assert lengths.context == int(workload.mean_new_tokens + 1000 + 250)


def test_a_profile_of_this_size_wins() -> None:
    published = finder().times("h200", 8, decode=False)
    assert published.prefill_error is None and published.prefill.provenance.startswith("implied")
    mine = record("b200", (1024, 0.5), (32_768, 3.0), decode=((4, 0.02),))
    times = finder(mine).times("b200", 8, decode=True)
    assert times.prefill_error is None and times.decode_error is None
    assert float(times.prefill.seconds(1024)) == pytest.approx(0.5)
    assert [tuple(step) for step in times.decode] == [(4, 0.02)]


def test_other_sizes_are_estimated() -> None:
    times = finder().times("h200", 4, decode=True)
    assert times.prefill_error is not None and times.decode_error is not None
    assert times.prefill.provenance.startswith("estimated: ")
    assert times.decode_provenance.startswith("estimated: ")
    assert times.decode[-1].batch >= 1


def test_missing_decode_steps_are_estimated_beside_measured_prefill() -> None:
    times = finder(record("b200", (1024, 0.5), (32_768, 3.0))).times("b200", 8, decode=True)
    assert times.prefill_error is None and times.prefill.provenance == "measured: our lab"
    assert times.decode_error is not None and times.decode_provenance.startswith("estimated: ")


def test_one_measured_point_recalibrates_and_narrows() -> None:
    before = finder().times("b200", 8, decode=True)
    one = record("b200", (32_768, 2 * estimate_s(32_768)))
    after = finder(one).times("b200", 8, decode=True)
    assert before.prefill_error is not None and after.prefill_error is not None
    assert after.prefill_error.sigma < 0.9 * before.prefill_error.sigma
    ratio = after.prefill.seconds(8192) / before.prefill.seconds(8192)
    assert 1.3 < float(ratio) < 2.0
    assert "after known times of qwen3-235b-a22b on 8 x b200" in after.prefill.provenance
    assert after.decode == before.decode and after.decode_error == before.decode_error


@pytest.mark.parametrize(
    ("accelerator", "model", "gpus"),
    [("b200", "qwen3-4b", 1), ("b200", MODEL, 4), ("gb200", MODEL, 8)],
)
def test_measurements_of_other_instances_recalibrate_too(
    accelerator: str, model: str, gpus: int
) -> None:
    own = record(
        accelerator,
        *((new, 2 * estimate_s(new, accelerator, model, gpus)) for new in (4096, 32_768)),
        model=model,
        gpus=gpus,
    )
    before = finder().times("b200", 8, decode=False)
    after = finder(own).times("b200", 8, decode=False)
    assert before.prefill_error is not None and after.prefill_error is not None
    assert after.prefill_error.sigma < before.prefill_error.sigma
    ratio = float(after.prefill.seconds(8192) / before.prefill.seconds(8192))
    assert ratio > 1.02


def test_a_short_prompt_of_an_unknown_engine_says_little() -> None:
    def corrected(new: int) -> float:
        own = record("b200", (new, estimate_s(new) / 2))
        after, before = (f.times("b200", 8, decode=False) for f in (finder(own), finder()))
        return float(after.prefill.seconds(32_768) / before.prefill.seconds(32_768))

    assert corrected(131_072) < 0.8 < 0.9 < corrected(256) < 1.1


def test_measured_decode_steps_recalibrate_decode() -> None:
    instance = finder().instance("b200", 4)
    steps = tuple((n, 2 * decode_s(instance, fitted(), n, LENGTHS.context)) for n in (1, 8))
    own = record("b200", (1024, estimate_s(1024, gpus=4)), gpus=4, decode=steps)
    before, after = (f.times("b200", 8, decode=True) for f in (finder(), finder(own)))
    assert after.decode[0].step_s > 1.3 * before.decode[0].step_s
    assert before.decode_error is not None and after.decode_error is not None
    assert after.decode_error.sigma < before.decode_error.sigma


def test_published_times_of_the_model_elsewhere_recalibrate() -> None:
    bare = Catalog(CATALOG.models, CATALOG.accelerators, ())
    unknown = finder(catalog=bare).times("b200", 8, decode=False)
    known = finder().times("b200", 8, decode=False)  # h200 is in the catalog
    assert unknown.prefill_error is not None and known.prefill_error is not None
    assert known.prefill_error.sigma < unknown.prefill_error.sigma
    # The built-in measured times are those of an engine for tests.
    tiny = (
        finder(model="qwen3-4b", catalog=c).times("b200", 1, decode=False) for c in (bare, CATALOG)
    )
    assert len({times.prefill_error for times in tiny}) == 1


def test_another_format_of_the_weights_does_not_use_built_in_profiles() -> None:
    times = finder(quantised=True).times("h200", 8, decode=False)
    assert times.prefill_error is not None
    mine = record("b200", (1024, 0.5), (32_768, 3.0))
    assert finder(mine, quantised=True).times("b200", 8, decode=False).prefill_error is None


def test_an_estimate_in_a_file_is_still_an_estimate() -> None:
    own = record("b200", (1024, 0.5), (32_768, 3.0), decode=((4, 0.02),), status="estimated")
    times = finder(own).times("b200", 8, decode=True)
    assert float(times.prefill.seconds(1024)) == pytest.approx(0.5)
    assert times.prefill_error is not None and times.decode_error is not None


@pytest.mark.parametrize(
    ("accelerator", "gpus", "message"),
    [
        ("h20", 2, "qwen3-235b-a22b on 2 x H20: .* GB of weights and .* use at least"),
        ("x1", 8, "unknown accelerator 'x1'"),
    ],
)
def test_refusals(accelerator: str, gpus: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        finder().times(accelerator, gpus, decode=False)


def test_a_model_without_matrices_is_refused() -> None:
    model = msgspec.structs.replace(CATALOG.model(MODEL), shape=None)
    bare = Catalog({MODEL: model}, CATALOG.accelerators, ())
    with pytest.raises(InputError, match=r"does not have the matrices.*\[models.shape\]"):
        finder(catalog=bare).times("b200", 8, decode=False)


def test_measurements_that_cannot_be_compared_are_left_out() -> None:
    own = record("b200", (1024, 9.0), model="unknown-model")
    before, after = (f.times("b200", 8, decode=False) for f in (finder(), finder(own)))
    assert after.prefill_error == before.prefill_error


def test_the_class_of_engines_changes_the_fixed_time_only() -> None:
    planned = PlannedModel.of_catalog(CATALOG, MODEL, CATALOG.model(MODEL).spec())
    slow = TimesFinder(CATALOG, planned, LENGTHS)
    lean = TimesFinder(CATALOG, replace(planned, engine_class="vllm"), LENGTHS)
    fixed = fitted().prefill_fixed_s
    ratio = slow.calibration.correction("prefill", MODEL, "b200")
    assert lean.calibration.correction("prefill", MODEL, "b200") == ratio
    for new in (1024, 131_072):
        times = [f.times("b200", 8, decode=False).prefill.seconds(new) for f in (slow, lean)]
        assert times[0] - times[1] == pytest.approx((fixed.paper - fixed.vllm) * ratio)
