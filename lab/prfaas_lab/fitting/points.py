"""Published and measured times of models on accelerators, to which the estimator is fitted.

A group is what one source prints for one instance: a list of values at some lengths and batches.
Its `kind` says what a value is; conversions to seconds are in `fitting/observations.py`, not in the
file. The file also describes a few models and accelerators that points refer to and that the
catalog does not offer for planning.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Literal, TypeAlias

import msgspec

from prfaas.catalog.hardware import Accelerator, PositiveFloat, PositiveInt
from prfaas.catalog.load import Catalog
from prfaas.catalog.models import Model
from prfaas.catalog.provenance import Status
from prfaas.catalog.shape import WeightFormat
from prfaas.config.strict import decode, parse_toml
from prfaas.errors import InputError
from prfaas.estimator.efficiency import EngineClass

# prefill_s:    seconds until the first token of one prompt.
# prefill_rate: tokens (prompt and output_tokens) per second, with many prompts at once.
# decode_s:     seconds of one decode step of `batch` sequences.
# decode_rate:  output tokens per second of `batch` sequences.
# run_rate:     (prompt + output_tokens) / seconds of one request at batch 1, prompt of 1 included.
Kind: TypeAlias = Literal["prefill_s", "prefill_rate", "decode_s", "decode_rate", "run_rate"]
# fit: the constants are fitted to it. check: it is only compared with; `reason` says why.
Use: TypeAlias = Literal["fit", "check"]


class PointGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values of one instance."""

    model: str
    accelerator: str
    gpus: PositiveInt
    kind: Kind
    tokens: Annotated[list[PositiveInt], msgspec.Meta(min_length=1)]  # prompt, or decode context
    values: Annotated[list[PositiveFloat], msgspec.Meta(min_length=1)]
    engine: str
    engine_class: EngineClass
    use: Use
    reason: str = ""  # why a value is only a check, or which reservation applies
    batch: list[PositiveInt] = []  # one per value; empty: 1
    parallelism: str = ""
    weights: WeightFormat | None = None  # None: as the model's entry says
    kv_dtype: str | None = None
    chunk_tokens: PositiveInt | None = None
    output_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    per_gpus: PositiveInt | None = None  # a rate of so many GPUs; None: of the instance


class PointSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one page or file prints."""

    source: str
    status: Status
    points: Annotated[list[PointGroup], msgspec.Meta(min_length=1)]
    date: str = ""


class ProfileUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the points of one of the catalog's profiles are used."""

    model: str
    accelerator: str
    gpus: PositiveInt
    engine_class: EngineClass
    use: Use
    reason: str
    decode_context: PositiveInt = 8192  # tokens of the sequences of its decode points


class PointsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    profiles: list[ProfileUse] = []
    sources: list[PointSource] = []
    models: list[Model] = []
    accelerators: list[Accelerator] = []

    def catalog(self, base: Catalog) -> Catalog:
        """The catalog with the models and accelerators that only points refer to."""
        return Catalog(
            models={**{m.name: m for m in self.models}, **base.models},
            accelerators={**{a.name: a for a in self.accelerators}, **base.accelerators},
            profiles=base.profiles,
        )


@cache
def builtin_points() -> PointsFile:
    data = resources.files("prfaas_lab.fitting") / "data" / "points.toml"
    return parse_points(data.read_text(encoding="utf-8"), data.name)


def parse_points(text: str, file: str) -> PointsFile:
    parsed = decode(parse_toml(text, file), PointsFile, file)
    for number, source in enumerate(parsed.sources):
        for index, group in enumerate(source.points):
            _check(group, f"sources.{number}.points.{index}", file)
    return parsed


def _check(group: PointGroup, where: str, file: str) -> None:
    lengths = {len(group.tokens), len(group.values), len(group.batch) or len(group.values)}
    if len(lengths) > 1:
        raise InputError(
            f"{len(group.tokens)} tokens, {len(group.values)} values and {len(group.batch)} "
            "batches do not belong together",
            file=file,
            where=where,
            fix="give one value for each length, and one batch for each value or none",
        )
    if group.use == "check" and not group.reason:
        raise InputError(
            "a check has no reason",
            file=file,
            where=f"{where}.reason",
            fix="say why the value is not used for the fit",
        )
    if group.kind == "run_rate" and (1 not in group.tokens or not group.output_tokens):
        raise InputError(
            "a run_rate has no run with a prompt of one token, or no output_tokens",
            file=file,
            where=where,
            fix="add both: the decode steps are taken from that run",
        )
