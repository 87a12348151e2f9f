"""Part `prefill` of `bench/gpu.py`: what exporting into a kvd's arena adds to a prefill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _gpu_models import DENSE, HYBRID, write_config
from _gpu_options import GpuOptions
from prfaas.cache.hashing import block_hashes
from prfaas.engine.api import EngineJob, Export, Sampling
from prfaas.errors import EngineError
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import WriteLease
from prfaas.launch.attached_process import attached_kvd
from prfaas_lab.testing.engine_runs import run

if TYPE_CHECKING:
    from prfaas.engine.hf import HFEngine

RUN_S = 120.0  # at most, of one prefill
FEWEST_ROUNDS = 2
BLOCK_TOKENS = 64
KVD_SPARE_BYTES = 512 << 20


@dataclass(frozen=True)
class Case:
    model: str
    tokens: int
    rounds: int
    target: float  # of the overhead


CASES = (
    Case(HYBRID, 32_768, 4, 0.01),
    Case(HYBRID, 131_072, 2, 0.01),
    Case(DENSE, 32_768, 4, 0.02),
)
SMALL_CASES = (Case(HYBRID, 512, 2, 0.01), Case(DENSE, 512, 2, 0.02))


class ExportingEngine:
    """An engine, and a kvd to whose arena it exports through leases."""

    def __init__(self, engine: HFEngine, kvd: KvdClient) -> None:
        self.engine = engine
        self._kvd = kvd

    def prompt(self, tokens: int) -> list[int]:
        return [
            (7 * token * token + token) % self.engine.limits.vocab_size for token in range(tokens)
        ]

    def plain(self, prompt: Sequence[int]) -> float:
        """Seconds of a prefill without export."""
        return self._timed(EngineJob("plain", prompt, Sampling(max_tokens=0)))

    def exporting(self, prompt: Sequence[int]) -> float:
        """Seconds of a prefill whose state is in the arena at the end. The kvd then gets its pages
        back, so that the next run uses them again: as in a pool that is full."""
        lease = self._lease(prompt)
        try:
            export = Export(lease, len(prompt), lease.checkpoint_tokens, lease.skip_tokens)
            return self._timed(EngineJob("export", prompt, Sampling(max_tokens=0), export=export))
        finally:
            lease.abort("measured")

    def _lease(self, prompt: Sequence[int]) -> WriteLease:
        hashes = block_hashes(prompt, self.engine.compat.block_tokens)
        lease = self._kvd.begin(hashes, len(prompt), checkpoint_tokens=())
        if not isinstance(lease, WriteLease):
            raise EngineError(f"the kvd grants no memory: {lease.reason}")
        return lease

    def _timed(self, job: EngineJob) -> float:
        before_s = time.perf_counter()
        run(self.engine, job, RUN_S)
        return time.perf_counter() - before_s


@contextmanager
def exporting_engine(options: GpuOptions, model: str, longest: int) -> Iterator[ExportingEngine]:
    """With random weights, and a kvd that has room for `longest` tokens."""
    from prfaas.engine.hf import HFEngine, load_model

    config = write_config(model, options)
    loaded = load_model(config, device=options.device, dtype=options.dtype, random_weights=True)
    memory = loaded.spec.kv_bytes(longest) * 5 // 4 + KVD_SPARE_BYTES
    with (
        attached_kvd(("--memory", str(memory), "--log-level", "warning"), 0.0) as address,
        KvdClient(
            address.socket,
            engine_id="bench",
            spec=loaded.spec,
            block_tokens=BLOCK_TOKENS,
            compat=loaded.compat(BLOCK_TOKENS),
        ) as kvd,
    ):
        engine = HFEngine(loaded, block_tokens=BLOCK_TOKENS)
        try:
            kvd.watch_memory(engine.use_memory)
            yield ExportingEngine(engine, kvd)
        finally:
            engine.close()  # before the client, whose memory it holds


def measure(options: GpuOptions) -> dict[str, Any]:
    """For every case a prefill with export comes first, which touches pages and compiles kernels.
    Then rounds of both kinds follow, in alternating order. The overhead is that of the medians."""
    cases = SMALL_CASES if options.small else CASES
    results: dict[str, Any] = {}
    for model in dict.fromkeys(case.model for case in cases):
        mine = [case for case in cases if case.model == model]
        before_s = time.perf_counter()
        longest = max(case.tokens for case in mine)
        with exporting_engine(options, model, longest) as exporting:
            results[f"{model}: load_s"] = round(time.perf_counter() - before_s, 2)
            for case in mine:
                name = f"{model}, {case.tokens} tokens"
                if options.left_s <= 0:
                    raise EngineError(f"the time was used up before: {name}")
                results[name] = _overhead(exporting, case, options)
                options.keep(name, results[name])
        _free(options)
    return results


def _overhead(engine: ExportingEngine, case: Case, options: GpuOptions) -> dict[str, Any]:
    prompt = engine.prompt(case.tokens)
    nbytes = engine.engine.spec.kv_bytes(case.tokens)
    first_s = engine.exporting(prompt)
    kinds: dict[str, Callable[[Sequence[int]], float]]
    kinds = {"plain": engine.plain, "export": engine.exporting}
    seconds: dict[str, list[float]] = {"plain": [], "export": []}
    for number in range(case.rounds):
        if number >= FEWEST_ROUNDS and options.left_s < 2.5 * seconds["plain"][-1]:
            break
        for kind in ("export", "plain") if number % 2 else ("plain", "export"):
            seconds[kind].append(kinds[kind](prompt))
    plain_s, export_s = (statistics.median(seconds[kind]) for kind in ("plain", "export"))
    overhead = export_s / plain_s - 1
    return {
        "gigabytes": round(nbytes / 1e9, 3),
        "first_export_s": round(first_s, 4),
        "plain_s": [round(value, 4) for value in seconds["plain"]],
        "export_s": [round(value, 4) for value in seconds["export"]],
        "export_gb_per_s": round(nbytes / 1e9 / export_s, 3),
        "overhead": round(overhead, 5),
        "target": case.target,
        "met": overhead < case.target,
    }


def _free(options: GpuOptions) -> None:
    """Gives the previous model's memory back to the device."""
    if options.device != "cpu":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
