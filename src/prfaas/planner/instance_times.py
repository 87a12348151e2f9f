"""The times of one instance: as the catalog has them, or estimated where it does not.

A profile of exactly this model, accelerator and number of GPUs always wins. Times are never mixed
silently: each of prefill and decode says where it is from, and has an error if it is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import msgspec

from prfaas.catalog import Catalog, PrefillPoint, ProfileRecord
from prfaas.catalog.shape import ModelShape
from prfaas.errors import InputError
from prfaas.estimator.efficiency import Efficiencies, EngineClass, fitted
from prfaas.estimator.instance import CHUNK_TOKENS, Instance
from prfaas.estimator.memory import require_fit
from prfaas.estimator.profile import estimated_profile
from prfaas.estimator.times import decode_s, prefill_s
from prfaas.estimator.uncertainty import (
    Calibration,
    EstimateError,
    LogRatio,
    Observation,
    Phase,
    calibrate,
    effects_of,
    observation,
)
from prfaas.kvspec import KVSpec
from prfaas.planner.profile import DecodeStep, PrefillProfile, PrefillTime
from prfaas.planner.workload import Workload, weighted_sum


@dataclass(frozen=True, slots=True)
class InstanceTimes:
    """Prefill times and decode steps of one instance. An error is None where the times are not
    estimated."""

    prefill: PrefillProfile
    prefill_error: EstimateError | None
    decode: tuple[DecodeStep, ...]  # empty: not asked for
    decode_error: EstimateError | None
    decode_provenance: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a workload that size an instance."""

    longest: int  # prompt and response
    context: int  # mean tokens of a sequence while it is decoded

    @classmethod
    def of(cls, workload: Workload) -> Lengths:
        prompts = workload.new + workload.cached
        output = workload.output_tokens
        mean = weighted_sum(prompts, workload.weight)
        return cls(int(prompts.max() + output), max(1, int(mean + output / 2)))


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The model of a problem, as far as times are concerned."""

    name: str
    spec: KVSpec
    shape: Callable[[], ModelShape]  # raises where the matrices of the model are not known
    chunk_tokens: int = CHUNK_TOKENS
    # The weights are in another format than the model's own, which the built-in profiles are of.
    quantised: bool = False
    engine_class: EngineClass = "paper"

    @classmethod
    def of_catalog(cls, catalog: Catalog, name: str, spec: KVSpec) -> PlannedModel:
        return cls(name, spec, lambda: catalog.model(name).model_shape())


class TimesFinder:
    """Finds the times of one model's instances. Each is looked up or estimated once."""

    def __init__(
        self,
        catalog: Catalog,
        model: PlannedModel,
        lengths: Lengths,
        *,
        own: Sequence[ProfileRecord] = (),
        constants: Efficiencies | None = None,
    ) -> None:
        """`own` are the user's own profiles: measured points among them recalibrate estimates."""
        # Published times of this model on other hardware say how far off its estimates are. The
        # built-in measured ones are of an engine for tests, not of a serving engine.
        published = () if model.quantised else catalog.profiles_of(model.name)
        self._catalog = catalog
        self._model = model
        self._lengths = lengths
        self._constants = constants or fitted()
        self._own = tuple(record for record in own if record.status == "measured")
        self._evidence = (
            *self._own,
            *(record for record in published if record.status not in ("measured", "estimated")),
        )
        self._found: dict[tuple[str, int, bool], InstanceTimes] = {}

    @cached_property
    def calibration(self) -> Calibration:
        return calibrate(self._constants, [seen for _, seen in self._known])

    @cached_property
    def _known(self) -> list[tuple[ProfileRecord, Observation]]:
        return [(record, seen) for record in self._evidence for seen in self._observed(record)]

    def instance(self, accelerator: str, gpus: int) -> Instance:
        return Instance(
            shape=self._model.shape(),
            spec=self._model.spec,
            accelerator=self._catalog.accelerator(accelerator),
            gpus=gpus,
            chunk_tokens=self._model.chunk_tokens,
            engine_class=self._model.engine_class,
        )

    def times(self, accelerator: str, gpus: int, *, decode: bool) -> InstanceTimes:
        """Raises where nothing is measured and nothing can be estimated. `decode` says whether
        decode steps are needed."""
        key = (accelerator, gpus, decode)
        if key not in self._found:
            self._found[key] = self._times(accelerator, gpus, decode)
        return self._found[key]

    def _times(self, accelerator: str, gpus: int, decode: bool) -> InstanceTimes:
        record = self._catalog.profile(self._model.name, accelerator, gpus)
        if self._model.quantised and record not in self._own:
            record = None
        whole = record is not None and _has_a_curve(record)
        if record is not None and whole and (record.decode or not decode):
            return self._stated(record)
        estimate = self._estimated(accelerator, gpus)
        if record is not None and whole:
            stated = self._stated(record)
            return replace(estimate, prefill=stated.prefill, prefill_error=stated.prefill_error)
        if record is not None and record.decode:
            stated_steps = tuple(DecodeStep(p.batch, p.step_s) for p in record.decode)
            return replace(
                estimate,
                decode=stated_steps,
                decode_error=None,
                decode_provenance=record.provenance,
            )
        return estimate

    def _stated(self, record: ProfileRecord) -> InstanceTimes:
        stated = InstanceTimes(
            prefill=prefill_profile(self._catalog, record),
            prefill_error=None,
            decode=tuple(DecodeStep(point.batch, point.step_s) for point in record.decode),
            decode_error=None,
            decode_provenance=record.provenance,
        )
        if record.status != "estimated":
            return stated
        # An estimate in a file is still an estimate.
        place = (record.model, record.accelerator, record.gpus)
        return replace(
            stated,
            prefill_error=self.calibration.error("prefill", *place),
            decode_error=self.calibration.error("decode", *place),
        )

    def _estimated(self, accelerator: str, gpus: int) -> InstanceTimes:
        instance = self.instance(accelerator, gpus)
        require_fit(instance, self._lengths.longest)
        record = estimated_profile(instance, self._lengths.context, self._constants)
        name, calibration = self._model.name, self.calibration
        prefill_factor = calibration.correction("prefill", name, accelerator)
        decode_factor = calibration.correction("decode", name, accelerator)
        corrected = self._corrected(record, "prefill", prefill_factor)
        return InstanceTimes(
            prefill=prefill_profile(self._catalog, corrected, prefill_factor),
            prefill_error=calibration.error("prefill", name, accelerator, gpus),
            decode=tuple(DecodeStep(p.batch, p.step_s * decode_factor) for p in record.decode),
            decode_error=calibration.error("decode", name, accelerator, gpus),
            decode_provenance=self._corrected(record, "decode", decode_factor).provenance,
        )

    def _corrected(self, record: ProfileRecord, phase: Phase, factor: float) -> ProfileRecord:
        """The estimate, with a source that names the times that correct it."""
        own = set(effects_of(phase, record.model, record.accelerator))
        places = [
            f"{known.model} on {known.gpus} x {known.accelerator}"
            for known, seen in self._known
            if own.intersection(seen.effects)
        ]
        if not places:
            return record
        source = f"{record.source}, times {factor:.2f} after known times of {', '.join(places)}"
        return msgspec.structs.replace(record, source=source)

    def _observed(self, record: ProfileRecord) -> Iterator[Observation]:
        """What a measured profile says about the errors of estimates."""
        instance = self._instance_of(record)
        if instance is None:
            return
        place, constants = (record.model, record.accelerator), self._constants
        own = record in self._own
        prefill = [
            _compared(instance, constants, point, time_s, engine_known=not own)
            for point, time_s in zip(
                record.prefill, self._catalog.prefill_seconds(record), strict=True
            )
        ]
        context = self._lengths.context
        decode = [
            LogRatio(math.log(point.step_s / decode_s(instance, constants, point.batch, context)))
            for point in record.decode
        ]
        yield observation(constants, "prefill", *place, prefill)
        if decode:
            yield observation(constants, "decode", *place, decode)

    def _instance_of(self, record: ProfileRecord) -> Instance | None:
        """The instance that a record was measured on. None if it cannot be estimated, so that it
        says nothing about estimates."""
        try:
            instance = self.instance(record.accelerator, record.gpus)
            if record.model != self._model.name:
                model = self._catalog.model(record.model)
                instance = replace(instance, shape=model.model_shape(), spec=model.spec())
            prefill_s(instance, self._constants, 1)
        except InputError:
            return None
        return instance


def _compared(
    instance: Instance,
    constants: Efficiencies,
    point: PrefillPoint,
    seconds: float,
    *,
    engine_known: bool,
) -> LogRatio:
    """A measured prefill beside its estimate. Engines differ in the time that a prefill takes
    whatever its length. So a short prompt says little about long ones where the engine is not
    known: the doubt is the difference between the slowest and the fastest class of engines.
    Published profiles are of the paper's engines."""
    if engine_known:
        instance = replace(instance, engine_class="paper")
    estimates = [
        prefill_s(replace(instance, engine_class=name), constants, point.new, point.cached)
        for name in get_args(EngineClass)
    ]
    ratio = math.log(seconds / prefill_s(instance, constants, point.new, point.cached))
    if engine_known:
        return LogRatio(ratio)
    return LogRatio(ratio, doubt=math.log(max(estimates) / min(estimates)))


def prefill_profile(catalog: Catalog, record: ProfileRecord, factor: float = 1.0) -> PrefillProfile:
    """The record's points as a curve, with every time multiplied by `factor`."""
    seconds = catalog.prefill_seconds(record)
    points = [
        PrefillTime(point.new, point.cached, time_s * factor)
        for point, time_s in zip(record.prefill, seconds, strict=True)
    ]
    return PrefillProfile(points, provenance=record.provenance)


def _has_a_curve(record: ProfileRecord) -> bool:
    """One point is a measurement, not a profile."""
    return sum(point.cached == 0 for point in record.prefill) >= 2
