"""From printed figures to seconds that the estimator can be compared with.

Each `Observation` has its time and, for the same quantity, the parts of which an estimate is the
sum. All conversions of rates and runs to seconds are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from prfaas.catalog import Catalog
from prfaas.estimator.efficiency import Efficiencies, EngineClass
from prfaas.estimator.instance import Instance, with_weights
from prfaas.estimator.times import Parts, decode_parts, pipelined_s, prefill_parts
from prfaas_lab.fitting.points import PointGroup, PointsFile, Use, builtin_points

# Lengths between which a run of one request shows the growth of attention.
_SHORTEST_RUN = 16384


@dataclass(frozen=True, slots=True)
class Observation:
    """One time, and the parts of its estimate."""

    kind: Literal["prefill", "decode"]
    model: str
    accelerator: str
    gpus: int
    tokens: int
    batch: int
    seconds: float
    parts: Parts
    fixed: EngineClass | None  # whose fixed time it contains; None: none
    use: Use
    source: str
    engine: str
    published_h200: bool = False  # of the paper's tables, for its bars in docs/estimates.md

    def estimate(self, constants: Efficiencies) -> float:
        fixed = 0.0 if self.fixed is None else getattr(constants.prefill_fixed_s, self.fixed)
        return fixed + self.parts.seconds(constants)

    def log_error(self, constants: Efficiencies) -> float:
        """ln(estimate / truth)"""
        return math.log(self.estimate(constants) / self.seconds)

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Observations that one measurement campaign has made on one kind of instance."""
        return (self.kind, self.source, self.model, self.accelerator)


@cache
def builtin_observations() -> tuple[Observation, ...]:
    return tuple(observations(Catalog.builtin(), builtin_points()))


def observations(catalog: Catalog, file: PointsFile) -> Iterator[Observation]:
    catalog = file.catalog(catalog)
    yield from _of_profiles(catalog, file)
    for source in file.sources:
        for group in source.points:
            model = catalog.model(group.model)
            shape = model.model_shape()
            if group.weights is not None:
                shape = with_weights(shape, group.weights)
            accelerator = catalog.accelerator(group.accelerator)
            instance = Instance(shape, model.spec(group.kv_dtype), accelerator, group.gpus)
            if group.chunk_tokens is not None:
                instance = replace(instance, chunk_tokens=group.chunk_tokens)
            for seen in _of_group(instance, group):
                yield replace(seen, source=source.source)


def _of_profiles(catalog: Catalog, file: PointsFile) -> Iterator[Observation]:
    for use in file.profiles:
        record = catalog.profile(use.model, use.accelerator, use.gpus)
        assert record is not None, f"points.toml names a profile that does not exist: {use}"
        model = catalog.model(use.model)
        instance = Instance(
            model.model_shape(), model.spec(), catalog.accelerator(use.accelerator), use.gpus
        )
        common = Observation(
            kind="prefill",
            model=use.model,
            accelerator=use.accelerator,
            gpus=use.gpus,
            tokens=0,
            batch=1,
            seconds=0.0,
            parts=Parts(),
            fixed=use.engine_class,
            use=use.use,
            source=record.source,
            engine=record.engine,
            published_h200=use.accelerator == "h200" and use.use == "fit",
        )
        times = catalog.prefill_seconds(record)
        for point, seconds in zip(record.prefill, times, strict=True):
            parts = prefill_parts(instance, point.new, point.cached, instance.domain_gpus)
            yield replace(common, tokens=point.new, seconds=seconds, parts=parts)
        for step in record.decode:
            parts = decode_parts(instance, step.batch, use.decode_context, instance.domain_gpus)
            yield replace(
                common,
                kind="decode",
                tokens=use.decode_context,
                batch=step.batch,
                seconds=step.step_s,
                parts=parts,
                fixed=None,
                # Of an inferred step only batch / time is known (profiles.toml).
                use="check" if record.status == "inferred" else use.use,
                published_h200=False,
            )


def _of_group(instance: Instance, group: PointGroup) -> Iterator[Observation]:
    if group.kind == "run_rate":
        yield from _of_runs(instance, group)
        return
    batches = group.batch or [1] * len(group.values)
    # A rate of some GPUs, as a rate of the instance.
    scale = 1.0 if group.per_gpus is None else group.gpus / group.per_gpus
    for tokens, batch, value in zip(group.tokens, batches, group.values, strict=True):
        match group.kind:
            case "prefill_s":
                parts = _prefill(instance, tokens)
                yield _observation("prefill", group, tokens, batch, value, parts)
            case "prefill_rate":
                # Prompts fill each other's chunks, the stages of a pipeline are all busy, and fixed
                # times overlap with computing.
                tensor = instance.domain_gpus
                parts = prefill_parts(instance, tokens, 0, tensor, packed=True)
                parts = Parts(*(part * tensor / instance.gpus for part in parts))
                seconds = (tokens + group.output_tokens) / (value * scale)
                yield _observation("prefill", group, tokens, batch, seconds, parts, fixed=False)
            case _:
                parts = decode_parts(instance, batch, tokens, instance.domain_gpus)
                seconds = value if group.kind == "decode_s" else batch / (value * scale)
                yield _observation("decode", group, tokens, batch, seconds, parts, fixed=False)


def _prefill(instance: Instance, tokens: int) -> Parts:
    tensor = instance.domain_gpus
    parts = prefill_parts(instance, tokens, 0, tensor)
    stages = instance.gpus / tensor
    if stages > 1:
        first = prefill_parts(instance, min(tokens, instance.chunk_tokens), 0, tensor)
        pairs = zip(parts, first, strict=True)
        parts = Parts(*(pipelined_s(whole, chunk, stages) for whole, chunk in pairs))
    return parts


def _of_runs(instance: Instance, group: PointGroup) -> Iterator[Observation]:
    """Runs of one request: a prompt, then `output_tokens` decode steps.

    After a prompt of one token the run is the decode steps. After a longer prompt the steps take
    longer, in proportion to the prompt, like the matrix products of the prefill: the two cannot be
    told apart. What grows with the square of the prompt can be: attention. With
    T(L) = run(L) - run(1), the difference T(long) - T(short) * long / short has no proportional
    part left. The same difference of the estimates is compared with it.
    """
    output = group.output_tokens
    runs = {
        tokens: (tokens + output) / value
        for tokens, value in zip(group.tokens, group.values, strict=True)
    }
    step = runs[1] / output
    parts = decode_parts(instance, 1, output // 2, instance.domain_gpus)
    yield _observation("decode", group, output // 2, 1, step, parts, fixed=False)
    short = min(tokens for tokens in runs if tokens >= _SHORTEST_RUN)
    long = max(runs)
    ratio = long / short
    seconds = (runs[long] - runs[1]) - ratio * (runs[short] - runs[1])
    at_long = prefill_parts(instance, long, 0, instance.domain_gpus)
    at_short = prefill_parts(instance, short, 0, instance.domain_gpus)
    difference = Parts(
        attention=at_long.attention - ratio * at_short.attention,
        softmax=at_long.softmax - ratio * at_short.softmax,
    )
    yield _observation("prefill", group, long, 1, seconds, difference, fixed=False)


def _observation(
    kind: Literal["prefill", "decode"],
    group: PointGroup,
    tokens: int,
    batch: int,
    seconds: float,
    parts: Parts,
    fixed: bool = True,
) -> Observation:
    return Observation(
        kind=kind,
        model=group.model,
        accelerator=group.accelerator,
        gpus=group.gpus,
        tokens=tokens,
        batch=batch,
        seconds=seconds,
        parts=parts,
        fixed=group.engine_class if fixed else None,
        use=group.use,
        source="",
        engine=group.engine,
    )
