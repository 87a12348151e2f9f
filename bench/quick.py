"""Has this checkout become slower? Measures, in less than three minutes, what users wait for.

\b
    python -m prfaas_lab bench quick [--only gateway,index]  what make bench-quick runs
    python -m prfaas_lab bench quick --update                commits to today's ratios; calm machine

Gateway (every routing policy), block hashes and match, simulator, transfers and the start of a
command, with defaults. Each figure is a ratio to a yardstick that is measured beside it
(`bench/_yardsticks.py`), because a slow or busy machine slows both. `bench/quick.json` has the
committed ratios per architecture (`platform.machine()`). A figure below two thirds of its committed
ratio is measured again and fails if it is low again. Without a committed ratio it is only shown.

A change that lowers a committed ratio gives the reason in its commit.

Prints a table to stderr, then JSON. Exit code 1: a figure has become slower.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from _quick_judge import LEAST, Judged, Measured, best, fails, judge
from _quick_parts import FIGURES, PARTS
from prfaas.display.console import print_json, rounded, run_benchmark
from prfaas.errors import InputError

COMMITTED = Path(__file__).with_suffix(".json")
LIMIT_S = 900.0  # a part that hangs ends the run, and shows where


@click.command(help=__doc__)
@click.option("--only", metavar="PARTS", help=f"Some of {','.join(PARTS)}.  [default: all]")
@click.option("--update", is_flag=True, help="Write the measured ratios of this architecture.")
@click.option("--json", "as_json", is_flag=True, help="Print only JSON, no table.")
def main(only: str | None, update: bool, as_json: bool) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    began_s = time.perf_counter()
    parts = _chosen(only)
    committed = {
        name: ratio
        for name, ratio in read_committed(COMMITTED).get(platform.machine(), {}).items()
        if part_of(name) in parts
    }
    measured = _measure(parts)
    judged = judge(measured, {} if update else committed)
    if low := fails(judged):
        click.echo(f"measured again: {', '.join(low)}", err=True)
        again = _measure(sorted({part_of(name) for name in low}))
        judged = judge(
            {**measured, **{name: again[name] for name in low if name in again}}, committed
        )
    if update:
        write_committed(COMMITTED, platform.machine(), measured)
    if not as_json:
        _show(judged)
    low = fails(judged)
    seconds = time.perf_counter() - began_s
    print_json(
        {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "seconds": round(seconds, 1),
            "figures": {one.figure: _plain(one) for one in judged},
            "slower": low,
        }
    )
    for name in low:
        click.echo(f"{name} is below {LEAST:.2f} of its committed ratio, twice", err=True)
    sys.exit(1 if low else 0)


def part_of(figure: str) -> str:
    return figure.partition(".")[0]


def _chosen(only: str | None) -> list[str]:
    names = list(PARTS) if only is None else only.split(",")
    for name in names:
        if name not in PARTS:
            fix = f"give some of {','.join(PARTS)}"
            raise InputError(f"there is no part {name!r}", where="--only", fix=fix)
    return names


def _measure(parts: Iterable[str]) -> dict[str, Measured]:
    samples = []
    for part in parts:
        began_s = time.perf_counter()
        samples += list(PARTS[part]())
        click.echo(f"{part}: {time.perf_counter() - began_s:.1f} s", err=True)
    return best(FIGURES, samples)


# The committed ratios -----------------------------------------------------------------------------


def read_committed(file: Path) -> dict[str, dict[str, float]]:
    """Architecture -> figure -> ratio."""
    found: dict[str, dict[str, float]] = json.loads(file.read_text())
    return found


def write_committed(file: Path, machine: str, measured: dict[str, Measured]) -> None:
    """Replaces the measured figures of one architecture."""
    every = read_committed(file)
    ratios = {name: float(f"{one.ratio:.3g}") for name, one in measured.items()}
    every[machine] = {**every.get(machine, {}), **ratios}
    file.write_text(json.dumps(every, indent=2) + "\n")


# Display ------------------------------------------------------------------------------------------


def _plain(one: Judged) -> dict[str, object]:
    seen = None if one.measured is None else rounded(one.measured._asdict(), 6)
    return {"verdict": one.verdict, "committed": one.committed, **(seen or {})}


def _show(judged: Sequence[Judged]) -> None:
    table = Table(title=f"speeds on {platform.machine()}", title_justify="left")
    for column in ("figure", "seen", "yardstick", "ratio", "committed", "of it", ""):
        table.add_column(column)
    for one in judged:
        figure, seen = FIGURES[one.figure], one.measured
        committed = "-" if one.committed is None else f"{one.committed:.3g}"
        if seen is None:
            table.add_row(figure.title, "-", figure.yardstick, "-", committed, "-", one.verdict)
            continue
        share = "-" if one.committed is None else f"{seen.ratio / one.committed:.2f}"
        table.add_row(
            figure.title,
            f"{seen.value:.4g} {figure.unit}",
            f"{figure.yardstick}: {seen.yardstick:.4g}",
            f"{seen.ratio:.3g}",
            committed,
            share,
            one.verdict,
        )
    Console(stderr=True, highlight=False, width=140).print(table)


if __name__ == "__main__":
    run_benchmark(main)
