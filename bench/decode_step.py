"""The time of greedy decode steps of the embedded engine, compared with another checkout.

\b
    python -m prfaas_lab bench decode_step --against ../other-checkout [--rounds 15] [--batches 1,8]

Runs an engine of each checkout in a process with one thread, on the same checkpoint (as `prfaas
model make` makes it, tiny). The engines take turns, so that other load on the machine affects both.
Then both are started again in the other order: of two equal engines the one that was started first
was up to 2.5% slower.
Prints JSON, per batch size: the median step of each in milliseconds, of the wall clock and of the
engine thread's processor time, and `ratio`, the median over the rounds of this checkout's step over
the other one's in the same round, and `ratio_of_least`, the same of the quickest rounds. The
processor time is the steadier figure on a busy machine: other processes lengthen it only through
the caches that they share.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import click

from prfaas.engine.checkpoint.make import make_checkpoint

HERE = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("_decode_worker.py")
Steps: TypeAlias = list[dict[str, float]]  # of one checkout and batch size, round by round


class Worker:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._line()  # the engine is loaded

    def measure(self, batch: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"an engine has ended: {self._process.args!r}")
        return line


@contextmanager
def started(checkout: Path, model: Path, largest_batch: int) -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(model), str(largest_batch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"},
    )
    with process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def compared(here: Steps, other: Steps) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for clock in ("wall_ms", "cpu_ms"):
        pairs = [(a[clock], b[clock]) for a, b in zip(here, other, strict=True)]
        found[clock] = {
            "here": round(statistics.median(a for a, _ in pairs), 3),
            "against": round(statistics.median(b for _, b in pairs), 3),
            "ratio": round(statistics.median(a / b for a, b in pairs), 4),
            "ratio_of_least": round(min(a for a, _ in pairs) / min(b for _, b in pairs), 4),
        }
    return found


def run_rounds(workers: Sequence[Worker], batch: int, rounds: int) -> tuple[Steps, Steps]:
    """The measurements of both workers. Either of them begins every second round."""
    taken: tuple[Steps, Steps] = ([], [])
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            step = workers[which].measure(batch)
            if number:  # the first round warms up
                taken[which].append(step)
    return taken


@click.command(help=__doc__)
@click.option(
    "--against",
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the other checkout.",
)
@click.option("--rounds", default=15, show_default=True, help="Measurements of each, per order.")
@click.option("--batches", default="1,8", show_default=True, help="Sequences per step.")
@click.option("--arch", default="kimi-linear", show_default=True, help="Architecture.")
def main(against: Path, rounds: int, batches: str, arch: str) -> None:
    sizes = [int(size) for size in batches.split(",")]
    taken: dict[int, tuple[Steps, Steps]] = {size: ([], []) for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        made = make_checkpoint(Path(folder) / arch, arch)
        for order in ((0, 1), (1, 0)):
            with ExitStack() as stack:
                workers: dict[int, Worker] = {}
                for which in order:
                    checkout = (HERE, against.resolve())[which]
                    made_worker = started(checkout, made.directory, max(sizes))
                    workers[which] = stack.enter_context(made_worker)
                for size in sizes:
                    here, other = run_rounds((workers[0], workers[1]), size, rounds)
                    taken[size][0].extend(here)
                    taken[size][1].extend(other)
    steps = {f"batch {size}": compared(*taken[size]) for size in sizes}
    print(json.dumps({"arch": arch, "rounds": rounds, **steps}, indent=2))


if __name__ == "__main__":
    main()
