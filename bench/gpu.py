"""A GPU's figures: copies, exports, the start of a node, hand-offs between two nodes.

\b
    python -m prfaas_lab bench gpu [--only PART] [--minutes 20] [--out FILE]

Needs one CUDA device, 40 GB of its memory, 40 GB of host memory, 8 GB of disk and no network. All
weights are random. The hybrid model has Kimi-Linear's shape with 8 experts (6.9 GB in bfloat16).
Prints JSON with one entry for each part:

\b
  copies   GB/s between the device and an arena's pages, fresh and fragmented
  prefill  prefill time with its state exported into a kvd's arena over the time without, minus 1
  start    seconds until a node with the 6.9 GB checkpoint is ready, for the first and for the
           second time, and its first ten requests after that
  live     two nodes on the device, 100,000 tokens: from the commit to the first token
  compare  20 hand-offs whose answers must be equal to the prefill node's, and one with changed
           exponent bits whose answer must differ

Every part runs for at most --part-minutes and leaves rounds out rather than exceed them. `start`,
`live` and `compare` share one checkpoint and two nodes. A part that fails has an `error` in the
JSON; the other parts run, and the exit code is 1. A target that is not met is not an error (`met`).
With --device cpu --small all parts run with tiny models on a CPU, to try the benchmark itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from _gpu_nodes import NodeRack
from _gpu_options import GpuOptions
from prfaas.errors import InputError

PARTS = ("copies", "prefill", "start", "live", "compare")
WITH_NODES = ("start", "live", "compare")
ERROR_LINES = 12
SHOWN_CHARACTERS = 300  # of a result, while the benchmark runs
LONGEST_MINUTES = 24 * 60.0


class Results:
    """The results of all parts; written to a file, if one was named, after every change."""

    def __init__(self, file: Path | None) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self._file = file

    def keep(self, part: str, name: str, value: Any) -> None:
        self.parts.setdefault(part, {})[name] = value
        self._write()
        click.echo(f"{part}: {name}: {json.dumps(value)[-SHOWN_CHARACTERS:]}", err=True)

    def end(self, part: str, found: dict[str, Any]) -> None:
        self.parts[part] = {**self.parts.get(part, {}), **found}
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            temporary = self._file.with_name(f".{self._file.name}.new")
            temporary.write_text(json.dumps(self.parts, indent=2), encoding="utf-8")
            temporary.replace(self._file)


def run_part(part: str, options: GpuOptions, rack: NodeRack) -> dict[str, Any]:
    """The part's results, or an `error`. The part's module is imported here, so that a part that
    cannot be imported fails alone."""
    began_s = time.monotonic()
    try:
        if options.left_s <= 0:
            raise InputError("the time is used up", where="--minutes", fix="allow more")
        measure: Callable[..., dict[str, Any]]
        measure = importlib.import_module(f"_gpu_{part}").measure
        found = measure(options, rack) if part in WITH_NODES else measure(options)
    except Exception as error:  # one part's failure stays its own
        traceback.print_exc(file=sys.stderr)
        lines = f"{type(error).__name__}: {error}".splitlines()
        found = {"error": lines[:ERROR_LINES]}
    return {**found, "took_s": round(time.monotonic() - began_s, 1)}


def has_error(found: Any) -> bool:
    """Whether a part has failed, or a case of it."""
    if isinstance(found, dict):
        return "error" in found or any(map(has_error, found.values()))
    return isinstance(found, list) and any(map(has_error, found))


def machine(device: str) -> dict[str, Any]:
    import os

    import torch

    from _hardware import hardware

    found = hardware(torch.device(device))
    return {"device": found.title, "software": found.software, "cores": os.cpu_count()}


def _check_minutes(value: float, where: str) -> float:
    if not 0 < value <= LONGEST_MINUTES:
        raise InputError(f"{value:g} is out of range", where=where, fix="give from 0.1 to 1440")
    return value


@click.command(help=__doc__)
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Part to run; repeatable.  [default: all]",
)
@click.option("--device", default="cuda", show_default=True, help="Torch device.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    help="Type of weights and caches.  [default: bfloat16, on a CPU float32]",
)
@click.option("--small", is_flag=True, help="Tiny models and short prompts.")
@click.option("--minutes", default=20.0, show_default=True, help="Time for all parts together.")
@click.option("--part-minutes", default=8.0, show_default=True, help="Time for one part.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Work folder, which is kept.  [default: a temporary one]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the JSON as well, rewritten after every result.",
)
def main(
    parts: tuple[str, ...],
    device: str,
    dtype: str | None,
    small: bool,
    minutes: float,
    part_minutes: float,
    folder: Path | None,
    out: Path | None,
) -> None:
    all_end_s = time.monotonic() + 60.0 * _check_minutes(minutes, "--minutes")
    part_s = 60.0 * _check_minutes(part_minutes, "--part-minutes")
    results = Results(out)
    results.end("machine", machine(device))
    with ExitStack() as stack:
        if folder is None:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-gpu-"))
            folder = Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = dtype or ("float32" if device == "cpu" else "bfloat16")
        options = GpuOptions(device, chosen, small, folder)
        rack = NodeRack(options)
        stack.callback(rack.close)
        for part in dict.fromkeys(parts or PARTS):
            click.echo(f"{part} begins", err=True)
            mine = replace(
                options,
                end_s=min(all_end_s, time.monotonic() + part_s),
                keep=functools.partial(results.keep, part),
            )
            results.end(part, run_part(part, mine, rack))
            click.echo(f"{part} took {results.parts[part]['took_s']} s", err=True)
    click.echo(json.dumps(results.parts, indent=2))
    if has_error(results.parts):
        sys.exit(1)


if __name__ == "__main__":
    main()
