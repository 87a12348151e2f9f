"""The contract between an engine and its caller (a node, a profiler, a test). Torch-free.

One job is one sequence: the engine prefills its prompt, perhaps resuming from existing state,
perhaps exporting state while it computes, and then generates. A job on a prefill node exports and
generates nothing; a job on a decode node resumes and generates.

    submit(job, emit) ──► Prefilled ──► Token ... Token ──► Finished     every export is ready
                      └─────────┴──────── JobFailed ───────┘             before Prefilled

An engine runs on its own thread. It calls `emit` there, in order; `emit` must neither block nor
raise. After Finished or JobFailed the engine touches neither the job's source nor its sink again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, SegmentSink, SegmentSource
from prfaas.types import Compat, NotNow

MAX_CUTS = 8192  # in one job, and in one report of them

# Jobs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The caller handles stop *strings*: it detokenises and cancels."""

    max_tokens: int = 16  # 0: prefill only
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int | None = None  # the same seed gives the same tokens in any batch
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    want_logits: bool = False  # Token events carry them


@dataclass(frozen=True, slots=True)
class Resume:
    """State after exactly the first `tokens` tokens of the prompt; the engine reads `source`."""

    tokens: int
    source: SegmentSource


@dataclass(frozen=True, slots=True)
class Export:
    """State to export while the engine computes the prompt.

    The engine writes full attention up to `tokens` as it computes it, starting after the
    receiver's `skip_tokens` or the job's resume point. It writes windows and linear states as of
    exactly `tokens` tokens, and as of each of `checkpoint_tokens`.
    """

    sink: SegmentSink
    tokens: int
    checkpoint_tokens: tuple[int, ...] = ()
    skip_tokens: Mapping[str, int] = field(default_factory=dict)  # per full-attention group


@dataclass(frozen=True, slots=True)
class KeepAnswer:
    """The caller wants the state of prompt and answer when the job ends (`Finished.answer`).

    While it decodes, the engine copies windows and linear states at each block boundary. The caller
    has full attention of the first `held_tokens` tokens already.
    """

    held_tokens: int


@dataclass(frozen=True, slots=True)
class EngineJob:
    id: str
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    resume: Resume | None = None
    export: Export | None = None
    # Where given, chunks end at exactly these lengths of the prompt (and where state is exported)
    # instead of at the engine's own. A piece that is longer than the engine's chunks is still cut.
    # Sums depend on the cuts: to repeat another job's numbers bit by bit, repeat its cuts.
    cut_tokens: tuple[int, ...] = ()
    keep: KeepAnswer | None = None  # None: nothing is copied for it
    # Chunks are no longer than this, and no longer than the engine's own. Sequences that decode
    # meanwhile wait for a chunk between two steps.
    chunk_tokens: int | None = None


# Events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is computed and every segment of the export is ready."""

    resumed_tokens: int
    computed_tokens: int
    exported_bytes: int
    # The ends of the chunks in which the tokens were computed, the prompt's end included. Empty:
    # the engine does not report them. Comparisons ignore it.
    cut_tokens: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logits: npt.NDArray[np.float32] | None = None


class KeptAnswer(Protocol):
    """The state after the last block boundary that a job has passed, in memory of its own: the
    engine computes other jobs meanwhile."""

    @property
    def tokens(self) -> int:
        """The boundary, beyond `KeepAnswer.held_tokens`."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes until it is dropped."""

    def write(self, sink: SegmentSink, skip_tokens: Mapping[str, int]) -> None:
        """Writes full attention from the tokens to skip on, at least `held_tokens`, and windows and
        states, and reports each segment as ready. Any one thread may call it, once."""


@dataclass(frozen=True, slots=True)
class Finished:
    reason: Literal["stop", "length", "cancelled"]
    # Of a job with `keep` that has passed a boundary while it decoded. Comparisons ignore it.
    answer: KeptAnswer | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class JobFailed:
    error: Exception


Event: TypeAlias = Prefilled | Token | Finished | JobFailed
Emit: TypeAlias = Callable[[Event], None]


# The engine -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine accepts. `submit` refuses everything beyond."""

    max_tokens: int  # of prompt and generated tokens together
    vocab_size: int
    max_running: int  # sequences decoded together
    max_waiting: int  # jobs that wait for their prefill; `submit` refuses one more with NotNow


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How well an emulated engine has kept its profile's times since its start.

    A step is one chunk of a prefill or one decode step. Its lateness is the time between its
    scheduled end and the moment at which the engine's thread ends it.
    """

    steps: int = 0
    wanted_s: float = 0.0
    late_s: float = 0.0

    def plus_step(self, wanted_s: float, late_s: float) -> StepTiming:
        return StepTiming(self.steps + 1, self.wanted_s + wanted_s, self.late_s + max(0.0, late_s))


@dataclass(frozen=True, slots=True)
class EngineStats:
    waiting: int
    prefilling: int
    running: int
    kv_tokens: int  # tokens of all sequences held now
    # None for a real engine, which has no schedule. Comparisons ignore it.
    timing: StepTiming | None = field(default=None, compare=False)


class Engine(Protocol):
    @property
    def spec(self) -> KVSpec:
        """The canonical wire form, in which the engine uses `source` and `sink`."""

    @property
    def compat(self) -> Compat: ...

    @property
    def limits(self) -> EngineLimits: ...

    def submit(self, job: EngineJob, emit: Emit) -> NotNow | None:
        """Queues the job. InputError when the job can never run. Any thread may call it."""

    def cancel(self, job_id: str) -> None:
        """Ends the job soon, with Finished("cancelled"). Does nothing to an ended job. Any thread
        may call it."""

    def stats(self) -> EngineStats: ...

    def use_memory(self, memory: mmap.mmap, *, wait_s: float = 0.0) -> None:
        """Most sources and sinks will be in this mapping, until the next call. The engine may
        prepare it, in the background; with `wait_s`, the call returns when what the next jobs will
        use is prepared, or after that time. It does not raise. Any thread may call it."""

    def close(self) -> None:
        """Cancels the remaining jobs and waits for the engine's thread."""


def check_job(job: EngineJob, spec: KVSpec, limits: EngineLimits) -> None:
    """Raises InputError when no engine could run the job."""
    prompt_tokens, sampling = len(job.prompt), job.sampling
    if not prompt_tokens:
        raise InputError("the prompt is empty", where="prompt", fix="send at least one token")
    total = prompt_tokens + sampling.max_tokens
    if total > limits.max_tokens:
        raise InputError(
            f"{prompt_tokens} prompt tokens and {sampling.max_tokens} to generate are more than "
            f"the model's {limits.max_tokens}",
            where="prompt",
            fix="shorten the prompt or lower max_tokens",
        )
    ids = np.asarray(job.prompt)
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise InputError(
            f"a token id is outside 0 to {limits.vocab_size - 1}",
            where="prompt",
            fix="tokenise with this model's tokenizer",
        )
    _check_sampling(sampling)
    if job.resume is not None and not 0 < job.resume.tokens < prompt_tokens:
        raise InputError(
            f"cannot resume after {job.resume.tokens} of {prompt_tokens} tokens",
            where="resume.tokens",
            fix="resume after at least one token and before the prompt's last",
        )
    if job.export is not None:
        _check_export(job.export, job, spec)
    check_cuts(job.cut_tokens, prompt_tokens, "cut_tokens")
    if job.chunk_tokens is not None and job.chunk_tokens < 1:
        raise InputError(
            f"chunks of {job.chunk_tokens} tokens", where="chunk_tokens", fix="use 1 or more"
        )
    if job.keep is not None and not 0 <= job.keep.held_tokens <= prompt_tokens:
        raise InputError(
            f"{job.keep.held_tokens} tokens of a prompt of {prompt_tokens} cannot be held",
            where="keep.held_tokens",
            fix="use a length from 0 to the prompt's",
        )


def check_cuts(cuts: Sequence[int], prompt_tokens: int, where: str) -> None:
    """Raises InputError when a prompt cannot be cut at these lengths."""
    if len(cuts) > MAX_CUTS:
        raise InputError(
            f"{len(cuts)} lengths to cut at", where=where, fix=f"send at most {MAX_CUTS}"
        )
    for before, cut in pairwise((0, *cuts)):
        if not before < cut < prompt_tokens:
            raise InputError(
                f"a prompt of {prompt_tokens} tokens cannot be cut at {cut} after {before}",
                where=where,
                fix="send ascending lengths, from 1 to the prompt's length less 1",
            )


def _check_sampling(sampling: Sampling) -> None:
    ranges = (
        ("max_tokens", sampling.max_tokens >= 0, "0 or more"),
        ("temperature", 0.0 <= sampling.temperature <= 100.0, "from 0 to 100"),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "above 0 and at most 1"),
    )
    for name, good, wanted in ranges:
        if not good:
            raise InputError(f"{getattr(sampling, name)}", where=name, fix=f"must be {wanted}")


def _check_export(export: Export, job: EngineJob, spec: KVSpec) -> None:
    first = job.resume.tokens if job.resume else 0
    for length in (*export.checkpoint_tokens, export.tokens):
        if not first < length <= len(job.prompt):
            raise InputError(
                f"cannot export the state after {length} tokens: the job computes tokens "
                f"{first} to {len(job.prompt)}",
                where="export",
                fix="export lengths that this job computes",
            )
    if max(export.checkpoint_tokens, default=0) > export.tokens:
        raise InputError(
            "a checkpoint lies after the hand-off",
            where="export.checkpoint_tokens",
            fix="leave it out",
        )
    growing = {group.name: group for group in spec.groups if isinstance(group, FullAttention)}
    for name, skip in export.skip_tokens.items():
        if name not in growing or skip < 0:
            raise InputError(
                f"cannot skip {skip} tokens of {name!r}",
                where="export.skip_tokens",
                fix=f"full-attention groups are: {', '.join(growing) or 'none'}",
            )
    for name in growing:
        # Tokens that neither the receiver holds nor this job computes would be missing.
        if first > export.skip_tokens.get(name, 0):
            raise InputError(
                f"the job resumes after {first} tokens; the receiver holds only "
                f"{export.skip_tokens.get(name, 0)} of {name}",
                where="export.skip_tokens",
                fix="resume no later than the end of the receiver's prefix",
            )
