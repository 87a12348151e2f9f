"""HFEngine: one model, one thread, continuous batching.

Each turn computes one chunk of the prompt at the head of the queue and one token of every running
sequence, so a long prefill delays a running sequence by one chunk at most.

    waiting ──► prefilling (one) ──► running (rows of the slots) ──► finished
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from prfaas.engine.api import (
    Emit,
    EngineStats,
    Failed,
    Finished,
    Job,
    Limits,
    Prefilled,
    Token,
    check_job,
)
from prfaas.engine.chunks import chunk_ends
from prfaas.engine.hf.exporter import ExportingCache
from prfaas.engine.hf.importer import import_state
from prfaas.engine.hf.load import LoadedModel
from prfaas.engine.hf.sampling import Sampler
from prfaas.engine.hf.slots import SlotCache
from prfaas.engine.job_queue import JobQueue, as_ours
from prfaas.errors import EngineError
from prfaas.kvspec import KVSpec
from prfaas.types import Compat, NotNow

CLOSE_S = 60.0
REPRODUCIBLE_ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}  # enough to fill the device, short enough to interleave


class _Sequence:
    def __init__(self, job: Job, emit: Emit) -> None:
        self.job = job
        self.emit = emit
        self.cache: ExportingCache | None = None
        self.ends: Iterator[int] = iter(())
        self.tokens = 0  # in the cache
        self.generated = 0
        self.last_token = 0
        self.sampler: Sampler | None = None


class HFEngine:
    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_tokens: int = 64,
        chunk_tokens: int | None = None,
        max_running: int = 16,
        max_waiting: int = 256,
    ) -> None:
        self._loaded = loaded
        self._compat = loaded.compat(block_tokens)
        self._limits = Limits(loaded.max_tokens, loaded.vocab_size, max_running, max_waiting)
        self._chunk_tokens = chunk_tokens or CHUNK_TOKENS[loaded.device.type]
        self._side = torch.cuda.Stream(loaded.device) if loaded.device.type == "cuda" else None
        self._slots = SlotCache(
            loaded.shapes,
            loaded.model.config.get_text_config().num_hidden_layers,
            torch.empty(0, dtype=loaded.dtype, device=loaded.device),
            additive_masks=loaded.model.config._attn_implementation == "eager",
        )
        self._desk: JobQueue[_Sequence] = JobQueue(max_waiting)
        self._prefilling: _Sequence | None = None  # the thread's own, as is the next; changed
        self._running: list[_Sequence] = []  # (row by row) under the desk's lock, for `stats`
        self._thread = threading.Thread(target=self._work, name="prfaas-engine", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> KVSpec:
        return self._loaded.spec

    @property
    def compat(self) -> Compat:
        return self._compat

    @property
    def limits(self) -> Limits:
        return self._limits

    def submit(self, job: Job, emit: Emit) -> NotNow | None:
        check_job(job, self.spec, self._limits)
        return self._desk.put(_Sequence(job, emit))

    def cancel(self, job_id: str) -> None:
        self._desk.cancel(job_id)

    def stats(self) -> EngineStats:
        with self._desk.changed:
            prefilling, running = self._prefilling, list(self._running)
            held = running + ([prefilling] if prefilling is not None else [])
            return EngineStats(
                waiting=len(self._desk.waiting),
                prefilling=int(prefilling is not None),
                running=len(running),
                kv_tokens=sum(sequence.tokens for sequence in held),
            )

    def close(self) -> None:
        self._desk.close()
        self._thread.join(CLOSE_S)

    # The engine's thread --------------------------------------------------------------------------

    def _work(self) -> None:
        # cuDNN's attention gives other bits from run to run; the other kernels do not.
        with torch.inference_mode(), sdpa_kernel(REPRODUCIBLE_ATTENTION):
            self._serve()

    def _serve(self) -> None:
        while self._desk.wait_for_work(busy=bool(self._prefilling or self._running)):
            self._end_cancelled()
            if self._prefilling is None:
                self._admit()
            if self._prefilling is not None:
                self._guarded_chunk(self._prefilling)
            if self._running:
                self._guarded_step()
        self._end(lambda sequence: True)

    def _end_cancelled(self) -> None:
        cancelled = self._desk.take_cancelled()
        if cancelled:
            self._end(lambda sequence: sequence.job.id in cancelled)

    def _end(self, which: Callable[[_Sequence], bool]) -> None:
        ended = self._desk.remove(which)
        if self._prefilling is not None and which(self._prefilling):
            ended.append(self._drop_prefilling())
        rows = [row for row, sequence in enumerate(self._running) if which(sequence)]
        ended += [self._leave(row) for row in reversed(rows)]
        for sequence in ended:
            sequence.emit(Finished("cancelled"))

    # Prefill --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        with self._desk.changed:
            if not self._desk.waiting or len(self._running) >= self._limits.max_running:
                return
            self._prefilling = self._desk.waiting.popleft()

    def _guarded_chunk(self, sequence: _Sequence) -> None:
        """A job that cannot be computed fails alone: its sink or source, or too little memory."""
        try:
            self._chunk(sequence)
        except Exception as error:  # translated here, once
            self._drop_prefilling()
            sequence.emit(Failed(_as_ours(error)))

    def _chunk(self, sequence: _Sequence) -> None:
        job = sequence.job
        if sequence.cache is None:
            self._start(sequence)
        assert sequence.cache is not None
        start, stop = sequence.tokens, next(sequence.ends)
        sequence.cache.begin(start, stop)
        ids = torch.tensor([job.prompt[start:stop]], device=self._loaded.device)
        positions = torch.arange(start, stop, device=self._loaded.device)[None]
        logits = self._forward(ids, past_key_values=sequence.cache, position_ids=positions)
        sequence.cache.end()
        sequence.tokens = stop
        if stop == len(job.prompt):
            self._prefilled(sequence, logits[0])

    def _start(self, sequence: _Sequence) -> None:
        job = sequence.job
        sequence.cache = ExportingCache(self._loaded, job.export, self._side)
        sequence.sampler = Sampler(job.sampling, self._loaded.device)
        if job.resume is not None:
            import_state(self._loaded, sequence.cache, job.resume)
            sequence.tokens = job.resume.tokens
        sequence.ends = chunk_ends(
            sequence.tokens, len(job.prompt), chunk_tokens=self._chunk_tokens, export=job.export
        )

    def _prefilled(self, sequence: _Sequence, logits: torch.Tensor) -> None:
        cache, job = sequence.cache, sequence.job
        assert cache is not None and sequence.sampler is not None
        cache.finish()
        if self._loaded.device.type == "cuda":
            torch.cuda.current_stream(self._loaded.device).synchronize()  # launched is not computed
        resumed = job.resume.tokens if job.resume is not None else 0
        sequence.emit(Prefilled(resumed, len(job.prompt) - resumed, cache.exported_bytes))
        ended = (
            self._accept(sequence, sequence.sampler.pick(logits), logits)
            if job.sampling.max_tokens
            else Finished("length")
        )
        if ended is None:
            capacity = len(job.prompt) + job.sampling.max_tokens
            self._slots.join(len(self._running), cache, sequence.tokens, capacity)
        sequence.cache = None
        with self._desk.changed:
            self._prefilling = None
            if ended is None:
                self._running.append(sequence)
        if ended is not None:
            sequence.emit(ended)

    def _drop_prefilling(self) -> _Sequence:
        sequence = self._prefilling
        assert sequence is not None
        if sequence.cache is not None:
            sequence.cache.abort()
            sequence.cache = None
        with self._desk.changed:
            self._prefilling = None
        return sequence

    # Decode ---------------------------------------------------------------------------------------

    def _guarded_step(self) -> None:
        try:
            self._step()
        except Exception as error:  # a step is everybody's: there is no telling whose fault it was
            failed = _as_ours(error)
            for row in reversed(range(len(self._running))):
                self._leave(row).emit(Failed(failed))

    def _step(self) -> None:
        lengths = [sequence.tokens for sequence in self._running]
        tokens = [[sequence.last_token] for sequence in self._running]
        ids = torch.tensor(tokens, device=self._loaded.device)
        logits = self._forward(ids, **self._slots.begin(lengths))
        greedy = logits.argmax(dim=-1).tolist()
        ended: list[tuple[int, Finished]] = []
        for row, sequence in enumerate(self._running):
            sequence.tokens += 1
            assert sequence.sampler is not None
            drawn = sequence.job.sampling.temperature > 0.0
            token = sequence.sampler.pick(logits[row]) if drawn else greedy[row]
            finished = self._accept(sequence, token, logits[row])
            if finished is not None:
                ended.append((row, finished))
        for row, finished in reversed(ended):  # from the last row: leaving moves later rows only
            self._leave(row).emit(finished)

    def _accept(self, sequence: _Sequence, token: int, logits: torch.Tensor) -> Finished | None:
        sampling = sequence.job.sampling
        sequence.generated += 1
        sequence.last_token = token
        kept = logits.float().cpu().numpy() if sampling.want_logits else None
        sequence.emit(Token(token, kept))
        eos = frozenset() if sampling.ignore_eos else self._loaded.eos_token_ids
        if token in sampling.stop_token_ids or token in eos:
            return Finished("stop")
        return Finished("length") if sequence.generated >= sampling.max_tokens else None

    def _leave(self, row: int) -> _Sequence:
        last = len(self._running) - 1
        self._slots.leave(row, last)
        with self._desk.changed:
            sequence = self._running[row]
            self._running[row] = self._running[last]
            self._running.pop()
        return sequence

    def _forward(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Logits [rows, vocab] of each row's last token."""
        output = self._loaded.model(ids, use_cache=True, logits_to_keep=1, **arguments)
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _as_ours(error: Exception) -> Exception:
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError("the device has too little memory for this job")
    return as_ours(error)
