"""Do vLLM servers of several shapes send the same canonical bytes for the same prompt?

\b
    python -m prfaas_lab bench canonical_bytes --python .venv-vllm/bin/python [--dtype bfloat16]
                                               [--models falcon-h1]
                                               [--configurations tp1,b64,ds,tp2]
                                               [--lengths 65,129,300] [--head-size 80]

vLLM servers on the CPU, one after the other, prefill the same prompts and hand them over to a kvd
at which an engine without a model is registered. That engine reads the bytes of the committed
transfers. They are compared with those of the first configuration (`bench/pairs.py --help` says
what the names of configurations mean). Prints JSON; for each model and configuration:

\b
    bit_equal         by role (keys, values, latent, rope, state, conv): are all bytes equal?
    first_layer       by role, the first layer with unequal bytes; absent: none
    unequal           by role, the share of unequal elements
    difference        by role, the largest difference, relative to the layer's largest value

Block sizes and layouts move bytes only, so that every role has to be bit-equal. Ranks and stages
add up in another order, and attention after the first layer is computed from such sums.
vLLM 0.32 computes bfloat16 on Arm only where the CPU has the BF16 instructions. `--head-size 80`
makes a model whose heads are packed in another way than those of 32 dimensions and multiples.
Exit code 1: a configuration with the same number of ranks is not bit-equal in its attention.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import numpy.typing as npt

from _engine_rack import (
    KVD_OPTIONS,
    PATIENT,
    PROCESS_BYTES,
    WIRE_BLOCK_TOKENS,
    Child,
    NotStarted,
    await_memory,
    await_server,
    end,
    say,
)
from _vllm_options import (
    lengths_option,
    logs_option,
    models_option,
    parse_lengths,
    python_option,
)
from prfaas.catalog.hf_file import read_hf_config
from prfaas.contracts.kvd_api import KvdReport
from prfaas.contracts.readiness import KvdReady
from prfaas.display.console import print_json, run_benchmark
from prfaas.engine.checkpoint.architectures import ARCHITECTURES, Size
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.errors import InputError
from prfaas.kvspec import Geometry, Linear, Segment, build_spec, layer_parts
from prfaas.kvspec.parts import Part
from prfaas.launch.attached_process import PROGRAM, attached_prefix
from prfaas_lab.testing.vllm_configurations import (
    MAX_TOKENS,
    SERVED_MODELS,
    ServedModel,
    VllmConfiguration,
    configuration_named,
    transfer_config,
)
from prfaas_lab.testing.vllm_modelless import ModellessEngine, Recorded
from prfaas_lab.testing.vllm_server import start_vllm

LENGTHS = (65, 129, 300)
CONFIGURATIONS = ("tp1", "b64", "ds", "tp2")
ATTENTION = ("keys", "values", "latent", "rope")
Values = npt.NDArray[np.float32]


# Comparison ---------------------------------------------------------------------------------------


class Meaning:
    """What the bytes of a model's segments are."""

    def __init__(self, geometries: Sequence[Geometry], *, kv_dtype: str, state_dtype: str) -> None:
        spec = build_spec(geometries, kv_dtype=kv_dtype, state_dtype=state_dtype)
        self._groups: dict[str, tuple[bool, tuple[Part, ...]]] = {
            group.name: (
                isinstance(geometry, Linear),
                layer_parts(geometry, kv_dtype=kv_dtype, state_dtype=state_dtype),
            )
            for group, geometry in zip(spec.groups, geometries, strict=True)
        }

    def parts(self, segment: Segment, data: bytes) -> Iterator[tuple[str, bytes, Values]]:
        """(role, bytes, values) of each part of a segment."""
        is_state, parts = self._groups[segment.group]
        row_bytes = sum(part.nbytes for part in parts)
        rows = np.frombuffer(data, np.uint8).reshape(1 if is_state else -1, row_bytes)
        at = 0
        for part in parts:
            found = np.ascontiguousarray(rows[:, at : at + part.nbytes])
            at += part.nbytes
            yield part.role, found.tobytes(), _values(found, part.dtype)


def _values(found: npt.NDArray[np.uint8], dtype: str) -> Values:
    if dtype == "bfloat16":
        return (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return found.view(np.dtype(dtype)).astype(np.float32)


@dataclass(slots=True)
class Comparison:
    bit_equal: dict[str, bool] = field(default_factory=dict)
    first_layer: dict[str, int] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    unequal: dict[str, int] = field(default_factory=dict)
    difference: dict[str, float] = field(default_factory=dict)

    def add(self, meaning: Meaning, one: Recorded, two: Recorded) -> None:
        if one.keys() != two.keys():
            raise InputError("the states have other segments")
        for segment, data in one.items():
            pairs = zip(
                meaning.parts(segment, data), meaning.parts(segment, two[segment]), strict=True
            )
            for (role, mine, values), (_, theirs, others) in pairs:
                self._add(role, segment.layer, mine == theirs, values, others)

    def _add(self, role: str, layer: int, equal: bool, one: Values, two: Values) -> None:
        self.bit_equal[role] = self.bit_equal.get(role, True) and equal
        self.elements[role] = self.elements.get(role, 0) + one.size
        self.unequal[role] = self.unequal.get(role, 0) + int(np.count_nonzero(one != two))
        if not equal:
            self.first_layer[role] = min(layer, self.first_layer.get(role, layer))
        scale = float(np.abs(one).max(initial=0.0)) or 1.0
        worst = float(np.abs(one - two).max(initial=0.0)) / scale
        self.difference[role] = max(worst, self.difference.get(role, 0.0))

    def as_dict(self) -> dict[str, Any]:
        return {
            "bit_equal": self.bit_equal,
            "first_layer": self.first_layer,
            "unequal": {r: round(n / self.elements[r], 5) for r, n in self.unequal.items()},
            "difference": {r: float(f"{d:.3g}") for r, d in self.difference.items()},
        }


# Servers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    dtype: str
    lengths: Sequence[int]
    head_size: int | None = None  # None: the model's own


@dataclass(frozen=True, slots=True)
class Seen:
    states: dict[int, Recorded]  # by tokens of the prompt
    kv_dtype: str
    state_dtype: str


def observe(
    python: Path,
    model: Path,
    served: ServedModel,
    configuration: VllmConfiguration,
    plan: Plan,
) -> Seen:
    """The states of all prompts, as a server of this configuration sends them."""
    folder, name = model.parent, configuration.name
    await_memory((configuration.workers + 2) * PROCESS_BYTES, name)
    with ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-")))
        urls: dict[str, str] = {}
        for side in ("own", "recording"):
            kvd = Child(
                folder / f"{name}-{side}-kvd.log",
                *("kvd", "--socket", str(sockets / side), *KVD_OPTIONS, *PATIENT),
            )
            stack.callback(kvd.stop)
            urls[side] = kvd.ready(KvdReady).http
        log = folder / f"{name}.log"
        settings = {"form": "canonical", "block_tokens": WIRE_BLOCK_TOKENS}
        server = start_vllm(
            python,
            model,
            log,
            core=0,
            transfer=transfer_config(str(sockets / "own"), **settings),
            flags=[*configuration.flags(served), "--dtype", plan.dtype],
            env=configuration.environment(sorted(os.sched_getaffinity(0)), 0),
            launcher=[*attached_prefix(), PROGRAM],
        )
        stack.callback(end, server.process)
        await_server(server, name, log)
        say(f"  {name} serves")
        with urllib.request.urlopen(f"{urls['own']}/v1/stats", timeout=30) as answer:
            pool = msgspec.json.decode(answer.read(), type=KvdReport).pool
        if pool is None:
            raise NotStarted(f"{name} has not registered with its kvd")
        engine = ModellessEngine(sockets / "recording", urls["recording"], pool)
        stack.callback(engine.close)
        states = {n: engine.record(server, draw(n), n - 1) for n in plan.lengths}
        return Seen(states, pool.compat.kv_dtype, pool.compat.state_dtype)


def draw(tokens: int) -> list[int]:
    chance = random.Random(tokens)
    return [chance.randrange(256) for _ in range(tokens)]


def made(arch: str, size: Size, folder: Path, head_size: int | None) -> Path:
    model, name = folder / arch / "model", arch
    if head_size is not None:
        name, shape = f"{arch}, heads of {head_size}", ARCHITECTURES[arch]
        fields = {**shape.sizes[size], "head_dim": head_size}
        ARCHITECTURES[name] = dataclasses.replace(shape, sizes={**shape.sizes, size: fields})
    make_checkpoint(model, name, size, force=True)
    return model


def compare(
    arch: str, names: Sequence[str], python: Path, folder: Path, plan: Plan
) -> Iterator[dict[str, Any]]:
    """The results of one model: every configuration against the first."""
    served = SERVED_MODELS[arch]
    lengths = plan.lengths
    model = made(arch, served.size, folder, plan.head_size)
    first: tuple[VllmConfiguration, Seen] | None = None
    for name in names:
        configuration = configuration_named(name)
        found: dict[str, Any] = {"model": arch, "configuration": name}
        if (reason := configuration.refusal(served)) is not None:
            yield {**found, "skipped": reason}
            continue
        say(f"{arch}: {name}")
        try:
            seen = observe(python, model, served, configuration, plan)
        except Exception as error:  # of a server, which is a result here
            yield {**found, "ok": False, "error": f"{type(error).__name__}: {error}"[:2_000]}
            continue
        if first is None:
            first = configuration, seen
            continue
        geometries = read_hf_config(model).geometries
        meaning = Meaning(geometries, kv_dtype=seen.kv_dtype, state_dtype=seen.state_dtype)
        comparison = Comparison()
        for tokens in lengths:
            comparison.add(meaning, first[1].states[tokens], seen.states[tokens])
        same_sums = configuration.workers == first[0].workers
        equal = all(comparison.bit_equal.get(role, True) for role in ATTENTION)
        yield {
            **found,
            "against": first[0].name,
            "kv_dtype": seen.kv_dtype,
            "state_dtype": seen.state_dtype,
            "ok": equal or not same_sums,
            **comparison.as_dict(),
        }


@click.command(help=__doc__)
@python_option
@models_option(list(SERVED_MODELS), ("falcon-h1", "gemma3"))
@click.option(
    "--configurations",
    default=",".join(CONFIGURATIONS),
    show_default=True,
    help="Configurations, comma-separated; the others are compared with the first.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Type of the model and of its caches.",
)
@lengths_option(LENGTHS)
@click.option(
    "--head-size",
    type=click.IntRange(16, 512),
    help="Dimensions of a head.  [default: as the model]",
)
@logs_option
def main(
    python: Path,
    models: tuple[str, ...],
    configurations: str,
    dtype: str,
    lengths: str,
    head_size: int | None,
    logs: Path | None,
) -> None:
    wanted = parse_lengths(lengths, MAX_TOKENS - 1)
    names = configurations.split(",")
    for name in names:
        configuration_named(name)
    results: list[Mapping[str, Any]] = []
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bytes-")))
        for arch in models:
            plan = Plan(dtype, wanted, head_size)
            for found in compare(arch, names, python, folder, plan):
                say(f"  {found}")
                results.append(found)
    print_json({**dataclasses.asdict(Plan(dtype, wanted, head_size)), "results": results})
    sys.exit(0 if all(one.get("ok", True) for one in results) else 1)


if __name__ == "__main__":
    run_benchmark(main)
