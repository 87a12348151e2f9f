"""The cost of exporting KV during a prefill, and the gain from batched decode, on small models.

\b
    python -m prfaas_lab bench engine [--tokens 2048] [--batch 16] [--rounds 7]

The benchmark makes the models (as `prfaas model make` does, hidden size 256). Every round measures
both variants of a pair, and the results are medians. Prints JSON, per model: `export_overhead`
(prefill time with every layer's state exported over prefill time without, minus 1), `sink_share`
(time inside the export over prefill time) and `batched_decode` (tokens/s at `batch` over tokens/s
at 1).
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from prfaas.clock import MonotonicClock
from prfaas.engine.api import EngineJob, Export, Sampling
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.engine.hf import HFEngine, LoadedModel, load_model
from prfaas.kvspec import Segment
from prfaas_lab.testing.engine_profiler import Profiler
from prfaas_lab.testing.engine_runs import ScratchSink, run

ARCHITECTURES = ("kimi-linear", "qwen3")


class TimedSink(ScratchSink):
    """A sink that sums the time from each request for a buffer until that buffer is full."""

    def __init__(self, loaded: LoadedModel, nbytes: int) -> None:
        super().__init__(loaded.spec, nbytes)
        self.inside_s = 0.0
        self._since = 0.0

    def buffers(self, segment: Segment) -> Any:
        self._since = time.perf_counter()
        return super().buffers(segment)

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        super().ready(segment, heads)
        self.inside_s += time.perf_counter() - self._since


def export_cost(engine: HFEngine, loaded: LoadedModel, tokens: int, rounds: int) -> dict[str, Any]:
    prompt = [token % loaded.vocab_size for token in range(tokens)]
    sink = TimedSink(loaded, loaded.spec.kv_bytes(tokens))
    plain = EngineJob("plain", prompt, Sampling(max_tokens=0))
    exporting = EngineJob("export", prompt, Sampling(max_tokens=0), export=Export(sink, tokens))
    times: dict[str, list[float]] = {"plain": [], "export": []}
    inside: list[float] = []
    for number in range(rounds + 1):
        for job in (plain, exporting) if number % 2 else (exporting, plain):
            before_s, sink.inside_s = time.perf_counter(), 0.0
            run(engine, job)
            if number:  # the first round warms up
                times[job.id].append(time.perf_counter() - before_s)
                if job is exporting:
                    inside.append(sink.inside_s / times[job.id][-1])
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "tokens": tokens,
        "kv_bytes": loaded.spec.kv_bytes(tokens),
        "prefill_s": round(medians["plain"], 4),
        "prefill_exporting_s": round(medians["export"], 4),
        "export_overhead": round(medians["export"] / medians["plain"] - 1, 4),
        "sink_share": round(statistics.median(inside), 4),
    }


def batched_decode(engine: HFEngine, batch: int, rounds: int) -> dict[str, Any]:
    """Times decode steps like `prfaas profile` does. Every round measures both batch sizes."""
    profiler = Profiler(
        engine,
        lengths=(128, 256),
        cached=(),
        batches=(1, batch),
        rounds=rounds,
        clock=MonotonicClock(),
    )
    for task in profiler.tasks:
        profiler.perform(task)
    steps = {step.batch: step.step_s for step in profiler.measured().decode}
    return {
        "context_tokens": profiler.measured().context_tokens,
        "step_ms": {str(size): round(1e3 * step_s, 2) for size, step_s in steps.items()},
        "batched_decode": round(batch * steps[1] / steps[batch], 2),
    }


@click.command(help=__doc__)
@click.option("--tokens", default=2048, show_default=True, help="Tokens of the prompt.")
@click.option("--batch", default=16, show_default=True, help="Sequences per decode batch.")
@click.option("--rounds", default=7, show_default=True, help="Measurements of each variant.")
def main(tokens: int, batch: int, rounds: int) -> None:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arch in ARCHITECTURES:
            made = make_checkpoint(Path(folder) / arch, arch, "small")
            loaded = load_model(made.directory)
            engine = HFEngine(loaded, max_running=batch)
            try:
                results[arch] = {
                    "device": str(loaded.device),
                    "layers": made.layers,
                    **export_cost(engine, loaded, tokens, rounds),
                    **batched_decode(engine, batch, rounds),
                }
            finally:
                engine.close()
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
