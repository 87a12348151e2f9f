"""HFEngine: one model, one thread, continuous batching.

Each turn of the loop computes one chunk of the oldest prompt and one token of every running
sequence, so a long prefill delays a running sequence by one chunk at most. A sequence whose grammar
is late with a mask is left out until it comes, so that the others do not wait for it. The choices
of one prompt, which resume from the same state, are computed once, as many as find slots.

    waiting ──► prefilling (one prompt) ──► running (rows of the slots) ──► finished
"""

from __future__ import annotations

import mmap
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from prfaas.device import PagePins, PinsAhead, StagingRing
from prfaas.engine.api import (
    Emit,
    EngineJob,
    EngineLimits,
    EngineStats,
    Finished,
    JobFailed,
    Prefilled,
    Sampling,
    check_job,
)
from prfaas.engine.hf.answers import copy_boundary, take_answer
from prfaas.engine.hf.exporter import ExportingCache
from prfaas.engine.hf.load import LoadedModel
from prfaas.engine.hf.sequence import HFSequence, Late
from prfaas.engine.hf.slots import SlotCache
from prfaas.engine.job_queue import JobQueue, as_ours, slot_rule
from prfaas.errors import EngineError
from prfaas.kvspec import KVSpec
from prfaas.types import Compat, NotNow

CLOSE_S = 60.0
REPRODUCIBLE_ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MAX_RUNNING = 16
# Long enough to fill the device, short enough to interleave.
CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
# Staging on the device: 16 layers of 8,192 tokens with 4 KiB each. The bus empties it faster than
# any model fills it.
RING_BYTES = 512 << 20
LATE_S = 0.002  # that a step waits for the masks of grammars; ordinary ones come before the logits
MOST_LATE_S = 10.0  # the kernel ends a grammar's process before, unless it gets no processor
LOOK_S = 0.002  # that it waits where it has nothing else to do: a new job waits, too
RING_SHARE = 8  # at most this part of the device's free memory


class HFEngine:
    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_tokens: int = 64,
        chunk_tokens: int | None = None,
        max_running: int | None = None,
        max_waiting: int = 256,
        staging: tuple[StagingRing, PagePins] | None = None,
    ) -> None:
        """`staging`: made for the device by default, none on a CPU. The engine closes it."""
        self._loaded = loaded
        self._compat = loaded.compat(block_tokens)
        running = MAX_RUNNING if max_running is None else max_running
        self._limits = EngineLimits(
            loaded.max_tokens,
            loaded.vocab_size,
            running,
            max_waiting,
            eos_token_ids=loaded.eos_token_ids,
        )
        self._chunk_tokens = chunk_tokens or CHUNK_TOKENS[loaded.device.type]
        if staging is None and loaded.device.type == "cuda":
            staging = _staging(loaded.device)
        self._ring = staging[0] if staging is not None else None
        self._ahead = (
            PinsAhead(staging[1], is_busy=lambda: bool(self._prefilling or self._running))
            if staging is not None
            else None
        )
        self._slots = SlotCache(
            loaded.shapes,
            loaded.model.config.get_text_config().num_hidden_layers,
            torch.empty(0, dtype=loaded.dtype, device=loaded.device),
            additive_masks=loaded.model.config._attn_implementation == "eager",
        )
        self._queue: JobQueue[HFSequence] = JobQueue(max_waiting)
        # The engine's thread owns these two. It changes them under the queue's lock, because
        # `stats` reads them from other threads.
        self._prefilling: HFSequence | None = None
        self._running: list[HFSequence] = []  # row by row
        self._late = 0  # the last rows, which take part in no step until their masks come
        self._thread = threading.Thread(target=self._work, name="prfaas-engine", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> KVSpec:
        return self._loaded.spec

    @property
    def compat(self) -> Compat:
        return self._compat

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def submit(self, job: EngineJob, emit: Emit) -> NotNow | None:
        check_job(job, self.spec, self._limits)
        return self._queue.put(HFSequence(job, emit))

    def cancel(self, job_id: str) -> None:
        self._queue.cancel(job_id)

    def stats(self) -> EngineStats:
        with self._queue.changed:
            prefilling, running = self._prefilling, list(self._running)
            held = running + ([prefilling] if prefilling is not None else [])
            return EngineStats(
                waiting=len(self._queue.waiting),
                prefilling=1 + len(prefilling.alike) if prefilling is not None else 0,
                running=len(running),
                kv_tokens=sum(sequence.tokens for sequence in held),
            )

    def use_memory(self, memory: mmap.mmap, *, wait_s: float = 0.0) -> None:
        if self._ahead is not None:
            self._ahead.use(memory)
            self._ahead.wait(wait_s)

    def close(self) -> None:
        self._queue.close()
        self._thread.join(CLOSE_S)
        if self._ahead is not None:
            self._ahead.stop()
        # A thread that is still computing may also still copy.
        if self._ring is not None and not self._thread.is_alive():
            self._ring.close()

    # The engine's thread --------------------------------------------------------------------------

    def _work(self) -> None:
        # cuDNN's attention gives other bits from run to run; the other kernels do not.
        with torch.inference_mode(), sdpa_kernel(REPRODUCIBLE_ATTENTION):
            while self._queue.wait_for_work(busy=bool(self._prefilling or self._running)):
                self._guarded(self._turn)
            self._guarded(lambda: self._end(lambda sequence: True))

    def _turn(self) -> None:
        self._end_cancelled()
        if self._prefilling is None:
            self._admit()
        if self._prefilling is not None:
            self._guarded_chunk(self._prefilling)
        if self._running:
            self._step()

    def _guarded(self, work: Callable[[], None]) -> None:
        """One step computes every sequence, and rows trade places layer by layer: after an error it
        is unknown which rows are whole, so none is used again."""
        try:
            work()
        except Exception as error:
            failed = JobFailed(_as_ours(error))
            with self._queue.changed:
                running, self._running, self._late = self._running, [], 0
            self._slots.clear()
            for sequence in running:
                with suppress(Exception):  # its listener has ended
                    sequence.emit(failed)

    def _end_cancelled(self) -> None:
        cancelled = self._queue.take_cancelled()
        if cancelled:
            self._end(lambda sequence: sequence.job.id in cancelled)

    def _end(self, which: Callable[[HFSequence], bool]) -> None:
        for sequence in self._queue.remove(which):
            sequence.emit(Finished("cancelled"))
        if self._prefilling is not None:
            alike = self._prefilling.alike
            self._prefilling.alike = [sequence for sequence in alike if not which(sequence)]
            for sequence in filter(which, alike):
                sequence.emit(Finished("cancelled"))
            if which(self._prefilling):
                self._drop_prefilling(Finished("cancelled"))
        rows = [row for row, sequence in enumerate(self._running) if which(sequence)]
        for row in reversed(rows):
            answer = take_answer(self.spec, self._slots, row, self._running[row])
            self._leave(row).emit(Finished("cancelled", answer))

    # Prefill --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        with self._queue.changed:
            if not self._queue.waiting or len(self._running) >= self._limits.max_running:
                return
            has_slot = slot_rule(self._running, self._limits.max_running)
            first = self._queue.take(
                lambda sequence: not _takes_slot(sequence.job.sampling) or has_slot(sequence)
            )
            if first is not None:
                first.alike = self._take_alike(first)
            self._prefilling = first

    def _take_alike(self, first: HFSequence) -> list[HFSequence]:
        """Of the waiting jobs, those that the same computation serves, as far as they find slots.
        Their turn has come with the first one: they have nothing to compute."""
        held = [*self._running]
        if _takes_slot(first.job.sampling):
            held.append(first)

        def joins(sequence: HFSequence) -> bool:
            if not first.is_like(sequence):
                return False
            if _takes_slot(sequence.job.sampling):
                if not slot_rule(held, self._limits.max_running)(sequence):
                    return False
                held.append(sequence)
            return True

        return self._queue.remove(joins)

    def _guarded_chunk(self, sequence: HFSequence) -> None:
        """An error of its sink or source, or too little memory, fails this job only, as long as it
        has no row."""
        try:
            self._chunk(sequence)
        except Exception as error:  # translated here, once
            if self._prefilling is None:
                raise
            self._drop_prefilling(JobFailed(_as_ours(error)))

    def _chunk(self, sequence: HFSequence) -> None:
        job = sequence.job
        cache = sequence.cache
        if cache is None:
            for begun in (job, *(sequence.job for sequence in sequence.alike)):
                if begun.on_begin is not None:
                    begun.on_begin()
            chunk_tokens = min(self._chunk_tokens, job.chunk_tokens or self._chunk_tokens)
            cache = sequence.start(self._loaded, self._ring, chunk_tokens)
        start, stop = sequence.tokens, next(sequence.ends)
        cache.begin(start, stop)
        ids = _on_device(job.prompt[start:stop], self._loaded.device)[None]
        positions = torch.arange(start, stop, device=self._loaded.device)[None]
        collector = sequence.prompt_logprobs
        last = 1 if collector is None else stop - start
        logits = _forward(
            self._loaded.model, ids, last, past_key_values=cache, position_ids=positions
        )
        cache.end()
        if collector is not None:
            collector.add(start, logits[0])
        sequence.limit_launched(self._loaded.device)
        sequence.tokens = stop
        if stop == len(job.prompt):
            self._prefilled(sequence, logits[0, -1])

    def _prefilled(self, sequence: HFSequence, logits: torch.Tensor) -> None:
        cache, job = sequence.cache, sequence.job
        assert cache is not None
        cache.finish()
        if self._loaded.device.type == "cuda":
            # Wait until the kernels have run.
            torch.cuda.current_stream(self._loaded.device).synchronize()
        sequence.finish_loads()
        resumed = job.resume.tokens if job.resume is not None else 0
        computed = len(job.prompt) - resumed
        collector, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        logprobs = collector.result() if collector is not None else None
        sequence.emit(Prefilled(resumed, computed, cache.exported_bytes, sequence.cuts, logprobs))
        rows = len(self._running)
        self._place(sequence, cache, logits)
        while (other := self._prefilling) is not None:
            try:
                other.follow(sequence, self._loaded)
                other.emit(Prefilled(resumed, computed, 0, sequence.cuts))
                self._place(other, cache, logits)
            except Exception as error:  # translated here, once
                self._drop_prefilling(JobFailed(_as_ours(error)))
        self._sort_late(rows)

    def _place(self, sequence: HFSequence, cache: ExportingCache, logits: torch.Tensor) -> None:
        """Chooses the first token, and gives a sequence that has another one a row. The next one
        that is alike takes its place as the one that is prefilled."""
        job, row, ended = sequence.job, len(self._running), None
        if not job.sampling.max_tokens:
            ended = Finished("length")
        elif not sequence.is_ready(LATE_S):
            self._set_late(sequence, logits)
        else:
            ended = sequence.next_token(logits, self._loaded.eos_token_ids)
        if ended is None:
            capacity = len(job.prompt) + job.sampling.max_tokens
            self._slots.join(row, cache, sequence.tokens, capacity)
            copy_boundary(self.spec, self._slots, row, sequence, self._compat.block_tokens)
        sequence.cache = None
        with self._queue.changed:
            self._prefilling = sequence.next_alike()
            if ended is None:
                self._running.append(sequence)
        if ended is not None:
            sequence.emit(ended)

    def _sort_late(self, rows: int) -> None:
        """The late rows are the last ones again, after rows were added behind the first `rows`."""
        first = rows - self._late
        for row in range(rows, len(self._running)):
            if self._running[row].late is None:
                self._swap(first, row)
                first += 1
        self._late = len(self._running) - first

    def _drop_prefilling(self, end: Finished | JobFailed) -> None:
        """Those that are alike begin again: what has failed may be the state of this job only."""
        sequence = self._prefilling
        assert sequence is not None
        others, sequence.alike = sequence.alike, []
        self._queue.put_back(others)
        try:
            if sequence.cache is not None:
                sequence.cache.abort()
            sequence.finish_loads()
        finally:
            sequence.cache = None
            with self._queue.changed:
                self._prefilling = None
            sequence.emit(end)

    # Decode ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._end_lateness()
        stepping = self._running[: len(self._running) - self._late]
        if not stepping:
            if self._running and self._prefilling is None:
                self._running[-1].is_ready(LOOK_S)
            return
        lengths = [sequence.tokens for sequence in stepping]
        tokens = [[sequence.last_token] for sequence in stepping]
        ids = torch.tensor(tokens, device=self._loaded.device)
        logits = _forward(self._loaded.model, ids, 1, **self._slots.begin(lengths))[:, -1]
        greedy = logits.argmax(dim=-1).tolist()
        ended: dict[int, Finished | JobFailed | None] = {}  # None: late
        until_s = time.monotonic() + LATE_S
        for row, sequence in enumerate(stepping):
            sequence.tokens += 1
            patience_s = 0.0 if sequence.was_late else max(0.0, until_s - time.monotonic())
            if not sequence.is_ready(patience_s):
                self._set_late(sequence, logits[row].clone())
                ended[row] = None
                continue
            sequence.was_late = False
            end = self._next_token(row, logits[row], greedy[row])
            if end is not None:
                ended[row] = end
        # The last row first, because removing a row moves later rows only.
        for row, end in reversed(ended.items()):
            if end is None:
                self._swap(row, len(self._running) - self._late - 1)
                self._late += 1
            else:
                self._emit_end(row, end)

    def _end_lateness(self) -> None:
        """Chooses the tokens of late sequences whose masks have come."""
        for sequence in self._running[len(self._running) - self._late :]:
            assert sequence.late is not None
            logits, until_s = sequence.late
            row = self._running.index(sequence)
            if sequence.is_ready(0.0):
                sequence.late = None
                end = self._next_token(row, logits)
            elif time.monotonic() < until_s:
                continue
            else:
                end = JobFailed(EngineError("a step of the answer's grammar takes too much time"))
            if end is not None:
                self._emit_end(row, end)
            else:
                self._swap(row, len(self._running) - self._late)
                self._late -= 1

    def _set_late(self, sequence: HFSequence, logits: torch.Tensor) -> None:
        sequence.late = Late(logits, time.monotonic() + MOST_LATE_S)
        sequence.was_late = True

    def _next_token(
        self, row: int, logits: torch.Tensor, greedy: int | None = None
    ) -> Finished | JobFailed | None:
        """How the sequence ends, or None when it continues."""
        sequence = self._running[row]
        try:
            ended = sequence.next_token(logits, self._loaded.eos_token_ids, greedy=greedy)
        except EngineError as error:  # its request allows no token
            return JobFailed(error)
        copy_boundary(self.spec, self._slots, row, sequence, self._compat.block_tokens)
        return ended

    def _emit_end(self, row: int, end: Finished | JobFailed) -> None:
        if isinstance(end, Finished):
            answer = take_answer(self.spec, self._slots, row, self._running[row])
            end = Finished(end.reason, answer)
        self._leave(row).emit(end)

    def _swap(self, one: int, other: int) -> None:
        running = self._running
        self._slots.swap(one, other, max(running[one].tokens, running[other].tokens))
        with self._queue.changed:
            running[one], running[other] = running[other], running[one]

    def _leave(self, row: int) -> HFSequence:
        last = len(self._running) - 1
        stepping = len(self._running) - self._late
        if row >= stepping:
            self._late -= 1
        elif self._late:
            self._swap(row, stepping - 1)  # the late rows stay together
            row = stepping - 1
        self._slots.leave(row, last)
        with self._queue.changed:
            sequence = self._running[row]
            self._running[row] = self._running[last]
            self._running.pop()
        return sequence


def _takes_slot(sampling: Sampling) -> bool:
    """A row, at some time. Without a second token only where a grammar is late with the first."""
    return sampling.max_tokens > 1 or (sampling.max_tokens == 1 and sampling.grammar is not None)


def _on_device(tokens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64. From pinned memory, because a copy from other memory waits for the stream."""
    ids = torch.frombuffer(array("q", tokens), dtype=torch.int64)
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids


def _staging(device: torch.device) -> tuple[StagingRing, PagePins]:
    free, _ = torch.cuda.mem_get_info(device)
    pins = PagePins(device)
    ring_bytes = min(RING_BYTES, free // RING_SHARE)
    return StagingRing(device, ring_bytes=ring_bytes, pins=pins), pins


def _forward(model: Any, ids: torch.Tensor, last: int, **arguments: Any) -> torch.Tensor:
    """Logits [rows, last, vocab] of each row's last tokens."""
    output = model(ids, use_cache=True, logits_to_keep=last, **arguments)
    logits: torch.Tensor = output.logits[:, -last:]
    return logits


def _as_ours(error: Exception) -> Exception:
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError("the device has too little memory for this job")
    return as_ours(error)
