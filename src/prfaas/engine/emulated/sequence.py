"""One job of the emulated engine: its state and its tokens. Independent of time."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from prfaas.engine.api import Emit, EngineJob, Finished, Prefilled, Token
from prfaas.engine.chunks import ExportPlan, resume_segments
from prfaas.engine.emulated.content import Content
from prfaas.kvspec import KVSpec, Segment

# A decode step computes the few tokens after a hand-off at no extra time, because it is bound by
# memory, not arithmetic. Longer remainders are a prefill.
RIDING_TOKENS = 128


class EmulatedSequence:
    def __init__(self, job: EngineJob, emit: Emit, spec: KVSpec, submitted_s: float) -> None:
        self.job = job
        self.emit = emit
        self.submitted_s = submitted_s
        self.resumed = job.resume.tokens if job.resume is not None else 0
        self.tokens = self.resumed  # tokens whose state exists
        self.ends: Iterator[int] | None = None  # of chunks; None before the first
        self.cuts: tuple[int, ...] = (len(job.prompt),)  # all of them; a step has one chunk
        self._spec = spec
        self._content = Content(spec, job.prompt)
        self._plan = ExportPlan(spec, job.export) if job.export is not None else None
        self._exported_bytes = 0
        self._generated = 0
        self._answer: Iterator[int] = iter(())

    @property
    def rides(self) -> bool:
        """Whether the job joins the batch at once and a decode step computes its last prompt
        tokens."""
        short = len(self.job.prompt) - self.resumed <= RIDING_TOKENS
        return bool(self.resumed and short and not self._plan and self.job.sampling.max_tokens)

    def read_state(self) -> None:
        """Checks every byte. State of another prompt or length is an EngineError."""
        if self.job.resume is not None:
            for segment in resume_segments(self._spec, self.resumed):
                self._content.check(segment, self.job.resume.source.views(segment))

    def write_layer(self, layer: int, start: int, stop: int) -> list[Segment]:
        """Writes and returns the layer's segments of the chunk [start, stop), which are not ready
        yet."""
        export = self.job.export
        if export is None or self._plan is None:
            return []
        owed = [*self._plan.growing(layer, start, stop), *self._plan.closing(layer, stop)]
        for segment in owed:
            self._exported_bytes += self._content.write(segment, export.sink.buffers(segment))
        return owed

    def ready(self, segment: Segment) -> None:
        assert self.job.export is not None
        self.job.export.sink.ready(segment)

    def prefilled(self, vocab_size: int) -> Finished | None:
        self.tokens = len(self.job.prompt)
        computed = self.tokens - self.resumed
        self.emit(Prefilled(self.resumed, computed, self._exported_bytes, self.cuts))
        sampling = self.job.sampling
        if not sampling.max_tokens:
            return Finished("length")
        seed = 0
        if sampling.temperature > 0.0:
            seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._answer = iter(self._content.tokens(sampling.max_tokens, vocab_size, seed))
        return None

    def next_token(self) -> Finished | None:
        token = next(self._answer)
        self._generated += 1
        self.emit(Token(token))
        if token in self.job.sampling.stop_token_ids:
            return Finished("stop")
        return Finished("length") if self._generated >= self.job.sampling.max_tokens else None
