"""How much of a prefill's time does the connector take, in the native and in the canonical form?

\b
    python -m prfaas_lab bench conversion_cost --python .venv-vllm/bin/python [--models falcon-h1]
                                               [--lengths 256,1024,1900] [--rounds 9]
                                               [--before FOLDER]

vLLM engines on the CPU (float32, one thread, chunks of 256 tokens) prefill the same number of
tokens in turns: one without a connector (`none`), one that hands over in the native form, one in
the canonical form. With `--before`, a source folder of an earlier version (its `src`), a further
engine hands over in the native form of that version. The state goes to a kvd that no engine with a
model uses. The benchmark makes the models. Turns alternate, so that a machine that gets slower
makes all of them slower. Prints JSON; per model and number of tokens, medians:

\b
    prefill_s             a whole prefill
    worker_s, copy_s      of it, in the connector's worker hooks; of that, copying (and converting)
    scheduler_s           of it, in the connector's scheduler hooks
    *_cpu_s               the same in CPU time, which other processes of the machine do not change
    share, cpu_share      worker hooks / prefill
    conversion_cpu_share  (copying in the canonical form - copying in the native form) / prefill,
                          in CPU time; below zero where the canonical form copies fewer bytes
    against_none          prefill / prefill of the engine without a connector, of the same turn
    sent_bytes            bytes of the hand-off

Exit code 1: in the canonical form the worker hooks take more than 15% of a prefill's CPU time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import click

from _engine_rack import START_S, Child, last_errors, say
from _vllm_options import lengths_option, models_option, parse_lengths, python_option
from prfaas.contracts.readiness import KvdReady
from prfaas.display.console import print_json, run_benchmark
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.errors import InputError
from prfaas_lab.testing.vllm_configurations import CHUNK_TOKENS, MAX_TOKENS, SERVED_MODELS

LENGTHS = (256, 1024, 1900)
ROUNDS = 9
MOST_SHARE = 0.15
PREFILL_S = 240.0
CACHE_BYTES = 64 << 20
NONE, NATIVE, CANONICAL, BEFORE = "none", "native", "canonical", "native_before"
_TIMES = ("prefill", "worker", "copy", "scheduler")


class PrefillEngine:
    """One engine in a process of its own, with its kvd and the kvd that receives."""

    def __init__(
        self, name: str, python: Path, model: Path, core: int, source: Path | None, stack: ExitStack
    ) -> None:
        self.name = name
        folder = model.parent
        self._log = folder / f"{name}.log"
        form = {NONE: "", BEFORE: "only-native"}.get(name, name)
        command = [str(python), str(Path(__file__).with_name("_timed_prefills.py"))]
        command += ["--model", str(model), "--form", form, "--settings", json.dumps(_SETTINGS)]
        if form:
            sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-")))
            for side, option in (("own", ""), ("target", "target")):
                socket = sockets / f"{side}.kvd"
                log = folder / f"{name}-{side}-kvd.log"
                options = ("--memory", "256MiB", "--log-level", "warning")
                kvd = Child(log, "kvd", "--socket", str(socket), *options)
                stack.callback(kvd.stop)
                url = kvd.ready(KvdReady).http
                command += [f"--{option or 'kvd'}", str(socket)]
                command += [f"--{option or 'kvd'}-url", url]
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the hooks of both sides in one process
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=environment,
                text=True,
                start_new_session=True,
            )
        stack.callback(self._stop)
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def await_ready(self) -> None:
        self._answer(START_S)

    def prefill(self, tokens: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        found: dict[str, float] = self._answer(PREFILL_S)
        return found

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, wait_s: float) -> Any:
        with suppress(Empty):
            if line := self._lines.get(timeout=wait_s):
                return json.loads(line)
        raise InputError(f"the engine {self.name!r} has failed: {last_errors(self._log)}")

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait(30)


_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_TOKENS,
    "max_num_batched_tokens": CHUNK_TOKENS,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": CACHE_BYTES,
}


@dataclass(slots=True)
class Turns:
    """What was measured of prefills of one length, by engine, turn by turn."""

    measured: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def add(self, name: str, found: dict[str, float]) -> None:
        self.measured.setdefault(name, []).append(found)

    def medians(self, name: str) -> dict[str, float]:
        turns = self.measured[name]
        keys = [f"{time}{kind}" for time in _TIMES for kind in ("_s", "_cpu_s")]
        found = {
            key: statistics.median(turn.get(key, 0.0) for turn in turns)
            for key in keys
            if key in turns[0]
        }
        if "worker_s" in found:
            found["share"] = statistics.median(t["worker_s"] / t["prefill_s"] for t in turns)
            found["cpu_share"] = statistics.median(
                t["worker_cpu_s"] / t["prefill_cpu_s"] for t in turns
            )
            found["sent_bytes"] = turns[0]["sent_bytes"]
        pairs = zip(turns, self.measured[NONE], strict=True)
        found["against_none"] = statistics.median(t["prefill_s"] / n["prefill_s"] for t, n in pairs)
        pairs = zip(turns, self.measured[NONE], strict=True)
        found["cpu_against_none"] = statistics.median(
            t["prefill_cpu_s"] / n["prefill_cpu_s"] for t, n in pairs
        )
        return {key: round(value, 5) for key, value in found.items()}

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: self.medians(name) for name in self.measured}
        native, canonical = found[NATIVE], found[CANONICAL]
        more_s = canonical["copy_cpu_s"] - native["copy_cpu_s"]
        found["conversion_cpu_share"] = round(more_s / canonical["prefill_cpu_s"], 5)
        if BEFORE in found:
            pairs = zip(self.measured[NATIVE], self.measured[BEFORE], strict=True)
            found["native_against_before"] = round(
                statistics.median(n["prefill_s"] / b["prefill_s"] for n, b in pairs), 4
            )
            found["worker_cpu_against_before"] = round(
                native["worker_cpu_s"] / found[BEFORE]["worker_cpu_s"], 4
            )
        return found


def measure(
    arch: str, lengths: Sequence[int], rounds: int, python: Path, folder: Path, before: Path | None
) -> dict[str, Any]:
    served = SERVED_MODELS[arch]
    model = folder / arch / "model"
    make_checkpoint(model, arch, served.size, force=True)
    core = sorted(os.sched_getaffinity(0))[0]
    with ExitStack() as stack:
        names = [NONE, NATIVE, CANONICAL, *([BEFORE] if before is not None else [])]
        engines = []
        for name in names:  # one after the other: four that start at once need minutes
            say(f"{arch}: starting {name}")
            source = before if name == BEFORE else None
            engines.append(PrefillEngine(name, python, model, core, source, stack))
            engines[-1].await_ready()
        found: dict[str, Any] = {}
        for tokens in lengths:
            for engine in engines:
                engine.prefill(tokens)  # the first of its size is slower
            turns = Turns()
            for number in range(rounds):
                first = number % len(engines)
                for engine in engines[first:] + engines[:first]:
                    turns.add(engine.name, engine.prefill(tokens))
            found[str(tokens)] = turns.as_dict()
            say(f"  {tokens} tokens: {found[str(tokens)][CANONICAL]}")
        return found


@click.command(help=__doc__)
@python_option
@models_option(
    [arch for arch, served in SERVED_MODELS.items() if served.is_chunked], ("falcon-h1", "qwen3")
)
@lengths_option(LENGTHS)
@click.option(
    "--rounds",
    default=ROUNDS,
    show_default=True,
    type=click.IntRange(1, 1_000),
    help="Prefills per engine.",
)
@click.option(
    "--before",
    type=click.Path(exists=True, path_type=Path, file_okay=False),
    help="Source folder of an earlier version, to compare the native form with.",
)
def main(
    python: Path, models: tuple[str, ...], lengths: str, rounds: int, before: Path | None
) -> None:
    wanted = parse_lengths(lengths, MAX_TOKENS - 1)
    with tempfile.TemporaryDirectory(prefix="cost-") as folder:
        results = {
            arch: measure(arch, wanted, rounds, python, Path(folder), before) for arch in models
        }
    shares = [
        results[arch][str(tokens)][CANONICAL]["cpu_share"] for arch in models for tokens in wanted
    ]
    print_json({"rounds": rounds, "worst_cpu_share": max(shares), "results": results})
    sys.exit(0 if max(shares) <= MOST_SHARE else 1)


if __name__ == "__main__":
    run_benchmark(main)
