"""The estimated profile of an instance at chosen lengths and batches, in the form of a measured
one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prfaas.catalog import Catalog, ProfileRecord
from prfaas.catalog.hf_file import read_hf_config, read_hf_shape
from prfaas.catalog.shape import ModelShape
from prfaas.estimator.efficiency import fitted
from prfaas.estimator.instance import Instance
from prfaas.estimator.memory import kv_bytes_available, most_sequences, require_fit
from prfaas.estimator.profile import ENGINE, SOURCE
from prfaas.estimator.times import decode_s, prefill_s
from prfaas.kvspec import KVSpec
from prfaas.measure.measured_profile import MeasuredProfile, check_points
from prfaas.planner.profile import DecodeStep, PrefillTime
from prfaas.studies.problem_files import config_spec


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """Memory of an estimated instance, on all its GPUs together."""

    weight_bytes: float
    kv_bytes: float  # what the weights leave
    context_tokens: int
    sequences: int  # of this context, which fit


def estimate_profile(
    model: str,
    accelerator: str,
    gpus: int,
    lengths: Sequence[int],
    cached: Sequence[int],
    batches: Sequence[int],
) -> tuple[ProfileRecord, MeasuredProfile, MemoryLeft]:
    """`model` is a name of the catalog, or the path of a config.json. Raises if the model does not
    fit, or the catalog does not have enough figures. Batches that do not fit are left out. Decode
    steps are after a prompt of the middle length."""
    check_points(lengths, cached, batches)
    catalog = Catalog.builtin()
    instance = Instance(*_described(model, catalog), catalog.accelerator(accelerator), gpus)
    points = [(new, kept) for kept in (0, *sorted(cached)) for new in sorted(lengths)]
    context = sorted(lengths)[(len(lengths) - 1) // 2]
    longest = max(new + kept for new, kept in points)
    require_fit(instance, longest)
    constants, most = fitted(), most_sequences(instance, context)
    times = MeasuredProfile(
        prefill=tuple(
            PrefillTime(new, kept, prefill_s(instance, constants, new, kept))
            for new, kept in points
        ),
        kv_bytes={new: instance.spec.kv_bytes(new) for new in lengths},
        decode=tuple(
            DecodeStep(batch, decode_s(instance, constants, batch, context))
            for batch in sorted(batches)
            if batch <= most
        ),
        context_tokens=context,
        rounds=0,
        levelled=0.0,
    )
    measured_form = times.record(
        model=instance.shape.name, accelerator=accelerator, gpus=gpus, engine=ENGINE, by=""
    )
    record = msgspec.structs.replace(measured_form, status="estimated", source=SOURCE)
    left = MemoryLeft(
        weight_bytes=instance.shape.weight_bytes,
        kv_bytes=kv_bytes_available(instance),
        context_tokens=context,
        sequences=most,
    )
    return record, times, left


def _described(model: str, catalog: Catalog) -> tuple[ModelShape, KVSpec]:
    path = Path(model)
    if path.exists():
        return read_hf_shape(path), config_spec(read_hf_config(path), None)
    found = catalog.model(model)
    return found.model_shape(), found.spec()
