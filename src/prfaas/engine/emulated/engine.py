"""EmulatedEngine: the engines' contract at a profile's pace, on one thread, without torch.

Prefill serves jobs one after another, in chunks; each layer's state becomes ready at its share of
the chunk. Running sequences advance together, one step between chunks. The schedule is absolute:
work begins when the work before it was due to end (`schedule.py`).

    chunk     layer 0 | layer 1 | ... | layer L-1       layer i is ready at (i + 1) / L of the chunk
    step      one token of every running sequence       T_decode of the number of them
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prfaas.clock import Clock, MonotonicClock
from prfaas.engine.api import (
    Emit,
    EngineJob,
    EngineLimits,
    EngineStats,
    Finished,
    JobFailed,
    check_job,
)
from prfaas.engine.chunks import chunk_ends
from prfaas.engine.emulated.pace import Pace, Scales, scaled_spec
from prfaas.engine.emulated.schedule import Schedule
from prfaas.engine.emulated.sequence import EmulatedSequence
from prfaas.engine.job_queue import JobQueue, as_ours, slot_rule
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec
from prfaas.planner.profile import DecodeStep, PrefillProfile
from prfaas.types import Compat, NotNow

CLOSE_S = 60.0
CHUNK_TOKENS = 8192
# Layers that become ready within this time are exported together, so that a dozen engines on two
# cores do not spend the cores on wake-ups.
TOGETHER_S = 0.02


@dataclass(frozen=True, slots=True)
class EmulatedModel:
    """What is emulated: a model's state, and the times of one instance."""

    name: str
    spec: KVSpec
    profile: PrefillProfile
    decode_steps: Sequence[DecodeStep]


class EmulatedEngine:
    def __init__(
        self,
        model: EmulatedModel,
        *,
        limits: EngineLimits,
        block_tokens: int,
        chunk_tokens: int = CHUNK_TOKENS,
        scales: Scales | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`limits.max_running` of 0 makes an instance that only prefills: a job gets its first
        token and no more."""
        scales = scales or Scales()
        self._pace = Pace(model.profile, model.decode_steps, scales)
        if limits.max_running > self._pace.largest_batch:
            raise InputError(
                f"max_running is {limits.max_running}; the profile has decode steps of up to "
                f"{self._pace.largest_batch} sequences",
                where="max_running",
                fix="measure larger batches or lower it",
            )
        self._spec = scaled_spec(model.spec, scales.bytes)
        self._layers = 1 + max(max(group.layers) for group in model.spec.groups)
        self._limits = replace(limits, has_logits=False)
        self._chunk_tokens = chunk_tokens
        self._clock = clock or MonotonicClock()
        self._compat = Compat(
            model=model.name,
            revision=f"bytes x {scales.bytes:g}",
            kv_dtype="bytes",
            state_dtype="bytes",
            block_tokens=block_tokens,
            layout="emulated",
        )
        self._queue: JobQueue[EmulatedSequence] = JobQueue(limits.max_waiting)
        # The engine's thread owns these three. It changes the first two under the queue's lock,
        # because `stats` reads them from other threads.
        self._prefilling: EmulatedSequence | None = None
        self._running: list[EmulatedSequence] = []
        self._schedule = Schedule(self._clock)
        self._thread = threading.Thread(target=self._work, name="prfaas-emulated", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> KVSpec:
        return self._spec

    @property
    def compat(self) -> Compat:
        return self._compat

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def submit(self, job: EngineJob, emit: Emit) -> NotNow | None:
        check_job(job, self._spec, self._limits)
        if job.sampling.max_tokens > 1 and not self._limits.max_running:
            raise InputError(
                f"this engine only prefills and cannot generate {job.sampling.max_tokens} tokens",
                where="max_tokens",
                fix="use a profile with decode steps",
            )
        block_tokens = self._compat.block_tokens
        sequence = EmulatedSequence(job, emit, self._spec, block_tokens, self._clock.now())
        return self._queue.put(sequence)

    def cancel(self, job_id: str) -> None:
        self._queue.cancel(job_id)

    def stats(self) -> EngineStats:
        with self._queue.changed:
            prefilling = [self._prefilling] if self._prefilling is not None else []
            return EngineStats(
                waiting=len(self._queue.waiting),
                prefilling=len(prefilling),
                running=len(self._running),
                kv_tokens=sum(sequence.tokens for sequence in (*self._running, *prefilling)),
                timing=self._schedule.timing,
            )

    def use_memory(self, memory: mmap.mmap, *, wait_s: float = 0.0) -> None:
        pass  # no device reads it

    def close(self) -> None:
        self._queue.close()
        self._thread.join(CLOSE_S)

    # The engine's thread --------------------------------------------------------------------------

    def _work(self) -> None:
        while self._queue.wait_for_work(busy=bool(self._prefilling or self._running)):
            self._end_cancelled()
            self._admit()
            if self._prefilling is not None:
                self._guarded_chunk(self._prefilling)
            if self._running:
                self._step()
        with self._queue.changed:
            ended = self._removed(lambda sequence: True)
        for sequence in ended:
            sequence.emit(Finished("cancelled"))

    def _sleep(self, until_s: float, chunk_of: EmulatedSequence | None = None) -> None:
        """Sleeps until then and ends cancelled jobs meanwhile. Returns early when the engine closes
        or when the job of this chunk has ended."""
        while True:
            self._end_cancelled()
            with self._queue.changed:
                left_s = until_s - self._clock.now()
                if self._queue.closing or left_s <= 0:
                    return
                if chunk_of is not None and self._prefilling is not chunk_of:
                    return
                if not self._queue.has_cancelled:
                    self._queue.changed.wait(left_s)

    def _end_cancelled(self) -> None:
        cancelled = self._queue.take_cancelled()
        if not cancelled:
            return
        with self._queue.changed:
            ended = self._removed(lambda sequence: sequence.job.id in cancelled)
        for sequence in ended:
            sequence.finish(Finished("cancelled"))

    def _removed(self, which: Callable[[EmulatedSequence], bool]) -> list[EmulatedSequence]:
        """Removes jobs from the queue, the prefill and the batch. The caller holds the lock."""
        ended = self._queue.remove(which)
        ended += [sequence for sequence in self._running if which(sequence)]
        self._running = [sequence for sequence in self._running if not which(sequence)]
        if self._prefilling is not None and which(self._prefilling):
            ended.append(self._abandon_prefill())
        return ended

    def _abandon_prefill(self) -> EmulatedSequence:
        with self._queue.changed:
            sequence, self._prefilling = self._prefilling, None
        assert sequence is not None
        self._schedule.abandon()
        return sequence

    # Prefill --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts jobs in the order of their tenants' turns, as long as they have room."""
        while (sequence := self._take_next()) is not None:
            if sequence.job.on_begin is not None:
                sequence.job.on_begin()
            try:
                sequence.read_state()
            except Exception as error:  # state of another prompt fails this job only
                sequence.emit(JobFailed(as_ours(error)))
                continue
            with self._queue.changed:
                if _rides(sequence, self._limits):
                    self._running.append(sequence)
                else:
                    self._prefilling = sequence

    def _take_next(self) -> EmulatedSequence | None:
        with self._queue.changed:
            if not self._queue.waiting:
                return None
            busy = [*self._running, *([self._prefilling] if self._prefilling is not None else [])]
            has_slot = slot_rule(busy, self._limits.max_running)

            def may_begin(sequence: EmulatedSequence) -> bool:
                rides = _rides(sequence, self._limits)
                will_run = rides or sequence.job.sampling.max_tokens > 1
                if will_run and not has_slot(sequence):
                    return False
                return rides or self._prefilling is None

            sequence = self._queue.take(may_begin)
            if sequence is not None and not busy:
                self._schedule.start_after(sequence.submitted_s)
            return sequence

    def _guarded_chunk(self, sequence: EmulatedSequence) -> None:
        try:
            self._chunk(sequence)
        except Exception as error:  # its sink failed: only this job ends
            self._abandon_prefill()
            sequence.emit(JobFailed(as_ours(error)))

    def _chunk(self, sequence: EmulatedSequence) -> None:
        job = sequence.job
        if sequence.ends is None:
            tokens = len(job.prompt)
            chunk = min(self._chunk_tokens, job.chunk_tokens or self._chunk_tokens)
            sequence.cuts = chunk_ends(
                sequence.resumed,
                tokens,
                chunk_tokens=chunk,
                export=job.export,
                cuts=job.cut_tokens,
            )
            sequence.ends = iter(sequence.cuts)
        start, stop = sequence.tokens, next(sequence.ends)
        begin_s = self._schedule.add(self._pace.prefill_s(sequence.resumed, start, stop))
        layer_s = (self._schedule.free_s - begin_s) / self._layers
        together = self._layers
        if layer_s * self._layers > TOGETHER_S:
            together = max(1, round(TOGETHER_S / layer_s))
        for first in range(0, self._layers, together):
            layers = range(first, min(first + together, self._layers))
            # The bytes are written early and become ready when the layer is due.
            owed = [s for layer in layers for s in sequence.write_layer(layer, start, stop)]
            if owed or layers.stop == self._layers:
                self._sleep(begin_s + layers.stop * layer_s, chunk_of=sequence)
            if self._queue.closing or self._prefilling is not sequence:
                return
            for segment in owed:
                sequence.ready(segment)
        self._schedule.count_step(self._schedule.free_s - begin_s)
        sequence.tokens = stop
        if stop == len(job.prompt):
            self._prefilled(sequence)

    def _prefilled(self, sequence: EmulatedSequence) -> None:
        """The prompt's last position gives the first token, without a decode step."""
        finished = sequence.prefilled(self._limits.vocab_size) or sequence.next_token()
        with self._queue.changed:
            self._prefilling = None
            if finished is None:
                self._running.append(sequence)
        if finished is not None:
            sequence.emit(finished)

    # Decode ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        step_s = self._pace.step_s(len(self._running))
        self._schedule.add(step_s)
        self._sleep(self._schedule.free_s)
        if self._queue.closing:
            return
        self._schedule.count_step(step_s)
        ended: dict[EmulatedSequence, Finished] = {}
        for sequence in self._running:
            if sequence.tokens < len(sequence.job.prompt):
                # This step has computed the rest of its prompt.
                sequence.prefilled(self._limits.vocab_size)
            else:
                sequence.tokens += 1
            finished = sequence.next_token()
            if finished is not None:
                ended[sequence] = finished
        if ended:
            with self._queue.changed:
                self._running = [one for one in self._running if one not in ended]
        for sequence, finished in ended.items():
            sequence.finish(finished)


def _rides(sequence: EmulatedSequence, limits: EngineLimits) -> bool:
    return sequence.rides and limits.max_running > 0
