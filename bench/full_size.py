"""A full-size hybrid model beside a dense one of similar active size, on a GPU (Table 3's trend).

\b
    python -m prfaas_lab bench full_size [--model kimi-linear-48b-a3b --model qwen3-4b] [--out DIR]

Weights are random; shapes and arithmetic are those of the real models (bench/models/*.json;
Kimi-Linear-48B takes 98 GB in bfloat16). For each model, the benchmark prints JSON. With --out, it
also writes the result after every stage:

\b
  exact      greedy tokens of a run resumed from exported bytes equal those of a local run
  profile    T_prefill(new, cached), decode steps and S_kv, warm-up excluded, as catalog TOML
  phi_gbps   KV throughput S_kv / T_prefill per length (eq. 1), beside the paper's
  export     prefill time with state streamed out over prefill time without, minus 1
"""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from _hardware import hardware
from prfaas.catalog import Catalog, ProfileRecord
from prfaas.catalog.write import profile_toml
from prfaas.clock import MonotonicClock
from prfaas.engine.api import EngineJob, Export, Resume, Sampling
from prfaas.engine.hf import HFEngine, LoadedModel, load_model
from prfaas.engine.memory import MemorySegments
from prfaas.measure.measured_profile import MeasuredProfile
from prfaas.planner.equations import eq1_kv_throughput_bps
from prfaas.studies.token_identical import GeneratedTokens, compare
from prfaas_lab.testing.engine_profiler import Profiler
from prfaas_lab.testing.engine_runs import JobOutcome, ScratchSink, run

MODELS = Path(__file__).parent / "models"
NAMES = ("kimi-linear-48b-a3b", "qwen3-4b")
LENGTHS = (1_024, 8_192, 32_768, 131_072)
CACHED = (32_768,)
BATCHES = (1, 8, 32)
EXPORT_LENGTHS = (32_768, 131_072)
EXACT_LENGTHS = (65, 500, 3_000)
STAGES = ("exact", "profile", "export")
PAPER_HYBRID, PAPER_DENSE = "kimi-linear-48b-a3b", "qwen3-235b-a22b"


def exact(engine: HFEngine, tokens: int, generated: int = 64) -> dict[str, Any]:
    """Compares a run resumed from exported bytes with the local run that exported them.

    It also compares a repeated local run: where repeating changes tokens, resuming may too."""
    prompt = [(7 * token * token + token) % engine.limits.vocab_size for token in range(tokens)]
    sampling = Sampling(max_tokens=generated, ignore_eos=True, want_logits=True)
    state, handoff = MemorySegments(engine.spec), tokens - 1
    scratch = ScratchSink(engine.spec, engine.spec.kv_bytes(handoff))
    # Kernels tune themselves in the first run at a new shape, and write some results several times.
    run(engine, EngineJob("warm up", prompt, sampling, export=Export(scratch, handoff)))
    # An export splits the local run where the other run resumes: bfloat16 sums depend on the split.
    local = run(engine, EngineJob("local", prompt, sampling, export=Export(state, handoff)))
    again = run(engine, EngineJob("again", prompt, sampling, export=Export(scratch, handoff)))
    carried = MemorySegments.load(engine.spec, state.dump())
    resumed = run(engine, EngineJob("import", prompt, sampling, Resume(handoff, carried)))
    return {
        "prompt_tokens": tokens,
        "generated": generated,
        "distinct": len(set(local.tokens)),
        "resumed_equals_local": resumed.tokens == local.tokens,
        "repeated_equals_local": again.tokens == local.tokens,
        "resumed": str(compare(_generation(local), _generation(resumed))),
        "repeated": str(compare(_generation(local), _generation(again))),
        "kv_bytes_exact": state.nbytes == engine.spec.kv_bytes(handoff),
    }


def _generation(outcome: JobOutcome) -> GeneratedTokens:
    return GeneratedTokens(outcome.tokens, outcome.logits)


def export_cost(engine: HFEngine, loaded: LoadedModel, tokens: int, rounds: int) -> dict[str, Any]:
    prompt = [token % loaded.vocab_size for token in range(tokens)]
    nbytes = loaded.spec.kv_bytes(tokens)
    sink = ScratchSink(loaded.spec, nbytes)
    plain = EngineJob("plain", prompt, Sampling(max_tokens=0))
    streaming = EngineJob("streaming", prompt, Sampling(max_tokens=0), export=Export(sink, tokens))
    times: dict[str, list[float]] = {"plain": [], "streaming": []}
    for number in range(rounds + 1):
        for job in (plain, streaming) if number % 2 else (streaming, plain):
            before_s = time.perf_counter()
            run(engine, job)
            if number:  # the first round warms up
                times[job.id].append(time.perf_counter() - before_s)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "tokens": tokens,
        "gigabytes": round(nbytes / 1e9, 3),
        **{f"{name}_s": round(seconds, 4) for name, seconds in medians.items()},
        "overhead": round(medians["streaming"] / medians["plain"] - 1, 4),
    }


def profiled(engine: HFEngine, cached: Sequence[int], rounds: int) -> MeasuredProfile:
    profiler = Profiler(
        engine,
        lengths=LENGTHS,
        cached=cached,
        batches=BATCHES,
        rounds=rounds,
        clock=MonotonicClock(),
    )
    for task in profiler.tasks:
        profiler.perform(task)
    return profiler.measured()


def as_record(name: str, loaded: LoadedModel, measured: MeasuredProfile) -> ProfileRecord:
    machine = hardware(loaded.device)
    today = datetime.date.today().isoformat()
    return measured.record(
        model=name,
        accelerator=machine.name,
        engine=f"prfaas HFEngine, {machine.software}, random weights",
        by=f"bench/full_size.py, {today}, {machine.title}, bfloat16",
    )


def phi_gbps(loaded: LoadedModel, measured: MeasuredProfile) -> dict[str, float]:
    return {
        str(p.new_tokens): round(
            float(eq1_kv_throughput_bps(loaded.spec.kv_bytes(p.new_tokens), p.seconds)) / 1e9, 2
        )
        for p in measured.prefill
        if not p.cached_tokens
    }


def paper_phi(name: str) -> dict[str, float | None]:
    record = Catalog.builtin().profile(name, "h200", 8)
    assert record is not None
    return {str(point.new): point.phi_gbps for point in record.prefill}


@click.command(help=__doc__)
@click.option(
    "--model",
    "names",
    multiple=True,
    default=NAMES,
    show_default=True,
    help="Model in bench/models; repeatable.",
)
@click.option("--device", default=None, help="Torch device.")
@click.option("--rounds", default=3, show_default=True, help="Measurements of each variant.")
@click.option(
    "--cached", multiple=True, default=CACHED, show_default=True, help="Cached tokens; repeatable."
)
@click.option(
    "--export-tokens",
    multiple=True,
    default=EXPORT_LENGTHS,
    show_default=True,
    help="Tokens of a prompt to export; repeatable.",
)
@click.option(
    "--stage",
    "stages",
    multiple=True,
    default=STAGES,
    type=click.Choice(STAGES),
    show_default=True,
    help="Stage to run; repeatable.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder to write each result to after its stage."
)
def main(
    names: tuple[str, ...],
    device: str | None,
    rounds: int,
    cached: tuple[int, ...],
    export_tokens: tuple[int, ...],
    stages: tuple[str, ...],
    out: Path | None,
) -> None:
    results: dict[str, Any] = {
        "paper_phi_gbps": {name: paper_phi(name) for name in (PAPER_HYBRID, PAPER_DENSE)}
    }

    def keep(name: str, stage: str, result: Any) -> None:
        results.setdefault(name, {})[stage] = result
        if out is not None:
            (out / "full_size.json").write_text(json.dumps(results, indent=2))
        click.echo(f"{name}: {stage}: {json.dumps(result)}", err=True)

    for name in names:
        before_s = time.perf_counter()
        loaded = load_model(MODELS / f"{name}.json", device=device, random_weights=True)
        parameters = sum(p.numel() for p in loaded.model.parameters())
        keep(name, "load_s", round(time.perf_counter() - before_s, 1))
        keep(name, "parameters_b", round(parameters / 1e9, 2))
        engine = HFEngine(loaded, max_running=max(BATCHES))
        try:
            if "exact" in stages:
                keep(name, "exact", [exact(engine, tokens) for tokens in EXACT_LENGTHS])
            if "profile" in stages:
                measured = profiled(engine, [tokens for tokens in cached if tokens], rounds)
                keep(name, "profile", profile_toml(as_record(name, loaded, measured)))
                keep(name, "phi_gbps", phi_gbps(loaded, measured))
            if "export" in stages:
                costs = [export_cost(engine, loaded, tokens, rounds) for tokens in export_tokens]
                keep(name, "export", costs)
        finally:
            engine.close()
        del engine, loaded
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
