from __future__ import annotations

import math
from statistics import fmean, median

import pytest
from msgspec.structs import replace

from prfaas.estimator.efficiency import Efficiencies, ErrorParts, fitted
from prfaas.estimator.uncertainty import Calibration, LogRatio, Phase, calibrate, observation
from prfaas_lab.fitting.fit import unseen_errors, usable
from prfaas_lab.fitting.observations import Observation, builtin_observations


def constants(**parts: float) -> Efficiencies:
    error = ErrorParts(**{"model": 0.3, "accelerator": 0.2, "pair": 0.0, "length": 0.1} | parts)
    known = ["x", "y"]
    return replace(fitted(), prefill_error=error, decode_error=error, fitted_accelerators=known)


def sigma(calibration: Calibration, model: str, accelerator: str) -> float:
    return calibration.error("prefill", model, accelerator, 8).sigma


def test_without_measurements_the_error_is_that_of_the_fit() -> None:
    prior = calibrate(constants(pair=0.1), [])
    assert sigma(prior, "a", "x") == pytest.approx(math.hypot(0.3, 0.2, 0.1, 0.1))
    assert prior.correction("prefill", "a", "x") == 1.0


def test_instances_of_one_model_are_wrong_together() -> None:
    prior = calibrate(constants(), [])
    one, other = (prior.error("prefill", "a", on, 8) for on in ("x", "y"))
    assert set(dict(one.common)) & set(dict(other.common)) == {"prefill model a"}
    assert not set(dict(one.common)) & set(dict(prior.error("decode", "a", "x", 8).common))


def test_one_measurement_corrects_and_narrows() -> None:
    known = constants()
    seen = observation(known, "prefill", "a", "x", [LogRatio(math.log(1.5))])
    after = calibrate(known, [seen])
    # The posterior mean of a sum of normal effects, measured with the noise of one length.
    share = (0.3**2 + 0.2**2) / (0.3**2 + 0.2**2 + 0.1**2)
    assert after.correction("prefill", "a", "x") == pytest.approx(1.5**share)
    remaining = math.sqrt((0.3**2 + 0.2**2) * (1 - share))
    assert sigma(after, "a", "x") == pytest.approx(math.hypot(remaining, 0.1))
    # Other models on the accelerator and other accelerators of the model gain less.
    other_model = after.correction("prefill", "b", "x")
    other_accelerator = after.correction("prefill", "a", "y")
    assert 1 < other_model < other_accelerator < after.correction("prefill", "a", "x")
    assert sigma(after, "b", "x") < sigma(calibrate(known, []), "b", "x")
    # A measured prefill says nothing about decode, nor about other models elsewhere.
    assert after.correction("decode", "a", "x") == 1.0
    assert after.correction("prefill", "b", "y") == 1.0


def test_more_measurements_narrow_more() -> None:
    known = constants()

    def after(*seen: tuple[str, str]) -> Calibration:
        return calibrate(
            known, [observation(known, "prefill", m, a, [LogRatio(0.2)] * 3) for m, a in seen]
        )

    one = sigma(after(("b", "x")), "a", "x")
    two = sigma(after(("b", "x"), ("a", "y")), "a", "x")
    direct = sigma(after(("b", "x"), ("a", "y"), ("a", "x")), "a", "x")
    assert direct < two < one < sigma(after(), "a", "x")
    repeated = after(("a", "x"), ("a", "x"))  # also where two observations are the same
    assert sigma(repeated, "a", "x") < sigma(after(("a", "x")), "a", "x")


def test_doubt_about_the_engine_weakens_a_point() -> None:
    known = constants()
    sure, unsure = LogRatio(0.1), LogRatio(-2.0, doubt=1.0)
    both = observation(known, "prefill", "a", "x", [sure, unsure])
    assert both.log_ratio == pytest.approx(0.1, abs=0.05)
    assert observation(known, "prefill", "a", "x", [unsure]).noise == pytest.approx(1.0, rel=0.01)


def test_an_accelerator_without_points_has_a_larger_error() -> None:
    known = replace(constants(), unfitted_accelerator_error=0.6)
    prior = calibrate(known, [])
    assert sigma(prior, "a", "z") == pytest.approx(math.hypot(0.3, 0.6, 0.1))
    seen = observation(known, "prefill", "b", "z", [LogRatio(0.5)])
    after = calibrate(known, [seen])
    assert sigma(after, "a", "z") < 0.75 * sigma(prior, "a", "z")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_stated_errors_cover_unseen_points_before_and_after_one_measurement(phase: Phase) -> None:
    """Of the known points, estimated by constants that have seen neither their model nor their
    accelerator, nine of ten should be within 1.645 standard deviations."""
    known = fitted()
    errors = unseen_errors(usable(builtin_observations()), phase, known)
    campaigns: dict[tuple[object, ...], list[tuple[Observation, float]]] = {}
    for seen, error in errors:
        campaigns.setdefault((*seen.group, seen.gpus, seen.engine), []).append((seen, error))
    before: list[tuple[float, float]] = []  # error, and its stated standard deviation
    after: list[tuple[float, float]] = []
    for points in campaigns.values():
        place = points[0][0].model, points[0][0].accelerator
        for index, (_, error) in enumerate(points):
            before.append((error, calibrate(known, []).error(phase, *place, 8).sigma))
            one = calibrate(known, [observation(known, phase, *place, [LogRatio(-error)])])
            shift, left = one.correction(phase, *place), one.error(phase, *place, 8).sigma
            others = points[:index] + points[index + 1 :]
            after += [(other + math.log(shift), left) for _, other in others]
    for found in (before, after):
        assert len(found) > 150
        covered = fmean(abs(error) < 1.645 * stated for error, stated in found)
        assert 0.88 < covered < 0.98
    sizes = [median(abs(error) for error, _ in found) for found in (before, after)]
    assert sizes[1] < 0.6 * sizes[0]


def test_the_error_in_words() -> None:
    error = calibrate(constants(accelerator=0.0, length=0.0), []).error("prefill", "a", "x", 8)
    assert error.in_words == "two of three are within a factor of 1.35"
