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

import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, SegmentSink, SegmentSource
from prfaas.types import Compat, NotNow

MAX_CUTS = 8192  # in one job, and in one report of them
MAX_LOGPROBS = 20  # alternatives per token, as in vLLM
MAX_PROMPT_LOGPROBS = 1 << 19  # values of one job: its prompt's tokens, each with alternatives
MAX_BIASES = 300  # tokens with a bias, as in OpenAI's API
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 1024  # sequences and tokens of all, as in vLLM

# Jobs -------------------------------------------------------------------------------------------


class TokenMatcher(Protocol):
    """Follows one answer along its grammar. The engine's thread uses it."""

    def is_ready(self, within_s: float) -> bool:
        """Whether `allowed_bits` would not wait, now or after at most this time."""

    def allowed_bits(self) -> npt.NDArray[np.uint8] | None:
        """The tokens that may follow, one bit each, the lowest bit of a byte first. None: every
        token, because the grammar has ended. EngineError when the grammar is too complex."""

    def consume(self, token: int) -> None:
        """Adds a generated token. The end of the text ends the grammar."""


class Grammar(Protocol):
    """A compiled grammar (`engine.guided`) for generated tokens, not for the prompt."""

    @property
    def field(self) -> str:
        """The field of the request that has the grammar."""

    def matcher(self, stop_token_ids: frozenset[int] = frozenset()) -> TokenMatcher:
        """As the end of the text, stop tokens are allowed only where the grammar is complete."""


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
    top_k: int = 0  # 0: every token
    min_p: float = 0.0  # part of the likeliest token's probability that a token must have
    min_tokens: int = 0  # before them, neither the end of the text nor a stop token is generated
    presence_penalty: float = 0.0  # for tokens of the answer so far
    frequency_penalty: float = 0.0  # for each of their occurrences
    repetition_penalty: float = 1.0  # for tokens of the prompt and of the answer so far
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that are not completed
    allowed_token_ids: frozenset[int] | None = None  # None: every token
    logprobs: int | None = None  # Token events carry them, with this number of alternatives
    grammar: Grammar | None = None  # that generated tokens follow

    @property
    def logit_fields(self) -> tuple[str, ...]:
        """The fields in use that need the model's logits, even where the choice is greedy."""
        used = (
            ("min_tokens", self.min_tokens > 0),
            ("presence_penalty", self.presence_penalty != 0.0),
            ("frequency_penalty", self.frequency_penalty != 0.0),
            ("repetition_penalty", self.repetition_penalty != 1.0),
            ("logit_bias", bool(self.logit_bias)),
            ("bad_words", bool(self.bad_words_token_ids)),
            ("allowed_token_ids", self.allowed_token_ids is not None),
            ("logprobs", self.logprobs is not None),
            (self.grammar.field if self.grammar is not None else "", self.grammar is not None),
        )
        return tuple(name for name, is_used in used if is_used)


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
    # Jobs of one object resume from equal states, if they resume: an engine may compute it once.
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
    # `Prefilled` has the log-probabilities of the prompt's tokens, with this number of
    # alternatives. Such a job computes every token: it does not resume.
    prompt_logprobs: int | None = None
    # Whose sequence it is: tenants take turns, and share the slots (`contracts.slot_shares`). The
    # jobs without a name are those of one tenant, which shares with no other.
    tenant: str = ""
    # Called once, on the engine's thread, when the job has left the queue: the engine reads the
    # state to resume from, and computes. It must return at once and must not raise. Comparisons
    # ignore it.
    on_begin: Callable[[], None] | None = field(default=None, compare=False)


# Events -----------------------------------------------------------------------------------------


class PromptLogprobs(NamedTuple):
    """Of the prompt's tokens after the first one, which nothing precedes. Natural logarithms of
    probabilities, from the model's logits."""

    chosen: npt.NDArray[np.float32]  # [tokens - 1]: of the prompt's own tokens
    ranks: npt.NDArray[np.int32]  # [tokens - 1]: theirs, from 1 on
    top_ids: npt.NDArray[np.int32]  # [tokens - 1, alternatives]: the likeliest, in descending order
    top: npt.NDArray[np.float32]  # [tokens - 1, alternatives]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is computed and every segment of the export is ready."""

    resumed_tokens: int
    computed_tokens: int
    exported_bytes: int
    # The ends of the chunks in which the tokens were computed, the prompt's end included. Empty:
    # the engine does not report them. Comparisons ignore it.
    cut_tokens: tuple[int, ...] = field(default=(), compare=False)
    # Of a job that asked for them.
    prompt_logprobs: PromptLogprobs | None = field(default=None, compare=False)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities, from the model's logits before any change to them except
    by a grammar: as in vLLM, they are of the tokens that it allows."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, in descending order


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logits: npt.NDArray[np.float32] | None = None
    logprobs: TokenLogprobs | None = None
    is_stop: bool = False  # a stop token or the end of the text: Finished("stop") follows


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
    has_logits: bool = True  # False: the engine makes tokens up and refuses `logit_fields`
    eos_token_ids: frozenset[int] = frozenset()  # that end the text


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
    _check_sampling(sampling, limits)
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
    if job.prompt_logprobs is not None:
        _check_prompt_logprobs(job, job.prompt_logprobs, limits)
    if job.keep is not None and not 0 <= job.keep.held_tokens <= prompt_tokens:
        raise InputError(
            f"{job.keep.held_tokens} tokens of a prompt of {prompt_tokens} cannot be held",
            where="keep.held_tokens",
            fix="use a length from 0 to the prompt's",
        )


def _check_prompt_logprobs(job: EngineJob, alternatives: int, limits: EngineLimits) -> None:
    if not limits.has_logits:
        raise _without_logits("prompt_logprobs")
    if not 0 <= alternatives <= MAX_LOGPROBS:
        raise InputError(
            f"{alternatives}", where="prompt_logprobs", fix=f"must be from 0 to {MAX_LOGPROBS}"
        )
    if len(job.prompt) * (alternatives + 1) > MAX_PROMPT_LOGPROBS:
        raise InputError(
            f"{len(job.prompt)} prompt tokens with {alternatives} alternatives are more than "
            f"{MAX_PROMPT_LOGPROBS} log-probabilities",
            where="prompt_logprobs",
            fix="ask for fewer alternatives, or send a shorter prompt",
        )
    if job.resume is not None:
        raise InputError(
            "the log-probabilities of tokens before the resumed state are not known",
            where="prompt_logprobs",
            fix="compute the whole prompt",
        )


def _without_logits(field_name: str) -> InputError:
    return InputError(
        "this engine makes its tokens up without a model's logits",
        where=field_name,
        fix="leave it out, or use an engine with a model",
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


def _check_sampling(sampling: Sampling, limits: EngineLimits) -> None:
    ranges = (
        ("max_tokens", sampling.max_tokens >= 0, "0 or more"),
        ("temperature", 0.0 <= sampling.temperature <= 100.0, "from 0 to 100"),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "0 (every token) or more"),
        ("min_p", 0.0 <= sampling.min_p <= 1.0, "from 0 to 1"),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens, "from 0 to max_tokens"),
        ("presence_penalty", -2.0 <= sampling.presence_penalty <= 2.0, "from -2 to 2"),
        ("frequency_penalty", -2.0 <= sampling.frequency_penalty <= 2.0, "from -2 to 2"),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty < math.inf, "above 0 and finite"),
        ("logprobs", 0 <= (sampling.logprobs or 0) <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    )
    for name, good, wanted in ranges:
        if not good:
            raise InputError(f"{getattr(sampling, name)}", where=name, fix=f"must be {wanted}")
    if not limits.has_logits and sampling.logit_fields:
        raise _without_logits(sampling.logit_fields[0])
    _check_sampled_ids(sampling, limits.vocab_size)


def _check_sampled_ids(sampling: Sampling, vocab_size: int) -> None:
    words, allowed = sampling.bad_words_token_ids, sampling.allowed_token_ids
    sizes = (
        ("logit_bias", len(sampling.logit_bias) <= MAX_BIASES, f"at most {MAX_BIASES} tokens"),
        ("bad_words", len(words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} token sequences"),
        ("bad_words", all(words), "words that have at least one token"),
        (
            "bad_words",
            sum(map(len, words)) <= MAX_BAD_WORD_TOKENS,
            f"words of at most {MAX_BAD_WORD_TOKENS} tokens together",
        ),
        ("allowed_token_ids", allowed is None or len(allowed) > 0, "at least one token"),
    )
    for name, good, wanted in sizes:
        if not good:
            raise InputError("the list cannot be used", where=name, fix=f"send {wanted}")
    ids: tuple[tuple[str, Iterable[int]], ...] = (
        ("logit_bias", sampling.logit_bias),
        ("bad_words", chain.from_iterable(words)),
        ("allowed_token_ids", allowed or ()),
        ("stop_token_ids", sampling.stop_token_ids),
    )
    for name, tokens in ids:
        if any(not 0 <= token < vocab_size for token in tokens):
            raise InputError(
                f"a token id is outside 0 to {vocab_size - 1}",
                where=name,
                fix="use ids of this model's vocabulary",
            )
    for bias in sampling.logit_bias.values():
        if not math.isfinite(bias):
            raise InputError(f"{bias}", where="logit_bias", fix="send finite numbers")


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
