"""One job of the emulated engine: its state and its tokens. Independent of time."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence

from prfaas.engine.api import Emit, EngineJob, Finished, Prefilled, Token
from prfaas.engine.chunks import ExportPlan, resume_segments
from prfaas.engine.emulated.content import Content
from prfaas.kvspec import FullAttention, KVSpec, Segment, SegmentSink

# A decode step computes the few tokens after a hand-off at no extra time, because it is bound by
# memory, not arithmetic. Longer remainders are a prefill.
RIDING_TOKENS = 128


class EmulatedAnswer:
    """Made up from the tokens when it is written, so it takes no memory."""

    nbytes = 0

    def __init__(self, spec: KVSpec, ids: Sequence[int], tokens: int, held_tokens: int) -> None:
        self.tokens = tokens
        self._spec = spec
        self._ids = ids
        self._held_tokens = held_tokens

    def write(self, sink: SegmentSink, skip_tokens: Mapping[str, int]) -> None:
        content = Content(self._spec, self._ids)
        for segment in resume_segments(self._spec, self.tokens):
            if isinstance(self._spec[segment.group], FullAttention):
                first = max(self._held_tokens, skip_tokens.get(segment.group, 0))
                if first >= segment.stop:
                    continue
                segment = Segment(segment.group, segment.layer, first, segment.stop)
            content.write(segment, sink.buffers(segment))
            sink.ready(segment)


class EmulatedSequence:
    def __init__(
        self, job: EngineJob, emit: Emit, spec: KVSpec, block_tokens: int, submitted_s: float
    ) -> None:
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
        self._generated: list[int] = []
        self._answer: Iterator[int] = iter(())
        self._block_tokens = block_tokens

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
        self._generated.append(token)
        is_stop = token in self.job.sampling.stop_token_ids
        self.emit(Token(token, is_stop=is_stop))
        if is_stop:
            return Finished("stop")
        done = len(self._generated) >= self.job.sampling.max_tokens
        return Finished("length") if done else None

    def finish(self, finished: Finished) -> None:
        """Emits the end, with the state of the answer if it is to be kept."""
        keep, size = self.job.keep, self._block_tokens
        tokens = self.tokens // size * size
        answer: EmulatedAnswer | None = None
        if keep is not None and tokens > keep.held_tokens and tokens >= len(self.job.prompt):
            ids = [*self.job.prompt, *self._generated][:tokens]
            answer = EmulatedAnswer(self._spec, ids, tokens, keep.held_tokens)
        self.emit(Finished(finished.reason, answer))
