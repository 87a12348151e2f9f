"""One job of HFEngine: its cache while it prefills, its sampler and its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from prfaas.device import StagingRing
from prfaas.engine.api import Emit, EngineJob, Finished, Token
from prfaas.engine.chunks import chunk_ends
from prfaas.engine.hf.answers import BoundaryCopy
from prfaas.engine.hf.exporter import ExportingCache
from prfaas.engine.hf.importer import import_state
from prfaas.engine.hf.load import LoadedModel
from prfaas.engine.hf.prompt_logprobs import PromptLogprobsCollector, chunk_limit
from prfaas.engine.hf.sampling import Sampler


class Late(NamedTuple):
    """A step whose token cannot be chosen yet: the grammar has not said what it allows."""

    logits: torch.Tensor
    until_s: float  # when the sequence fails


class HFSequence:
    def __init__(self, job: EngineJob, emit: Emit) -> None:
        self.job = job
        self.emit = emit
        self.cache: ExportingCache | None = None
        self.cuts: tuple[int, ...] = ()  # ends of chunks
        self.ends: Iterator[int] = iter(())  # those that are not computed yet
        self.tokens = 0  # in the cache
        self.alike: list[HFSequence] = []  # begin to decode where it does, with the same state
        self._loads: StagingRing | None = None  # that reads the state to resume from
        self._launched: torch.cuda.Event | None = None  # the latest chunk
        self.generated = 0
        self.last_token = 0
        self.sampler: Sampler | None = None
        self.late: Late | None = None
        self.was_late = False  # with its latest mask: no step waits for the next one
        self.prompt_logprobs: PromptLogprobsCollector | None = None
        self.boundary: BoundaryCopy | None = None  # the last one that decoding has passed

    def start(
        self, loaded: LoadedModel, ring: StagingRing | None, chunk_tokens: int
    ) -> ExportingCache:
        """Makes the cache and reads the state to resume from."""
        job = self.job
        self.cache = ExportingCache(loaded, job.export, ring)
        self.sampler = Sampler(job.sampling, loaded.device, job.prompt, loaded.eos_token_ids)
        if job.resume is not None:
            self._loads = ring
            import_state(loaded, self.cache, job.resume, ring)
            self.tokens = job.resume.tokens
        if job.prompt_logprobs is not None:
            self.prompt_logprobs = PromptLogprobsCollector(job.prompt, job.prompt_logprobs)
            chunk_tokens = min(chunk_tokens, chunk_limit(loaded.vocab_size))
        self.cuts = chunk_ends(
            self.tokens,
            len(job.prompt),
            chunk_tokens=chunk_tokens,
            export=job.export,
            cuts=job.cut_tokens,
        )
        self.ends = iter(self.cuts)
        return self.cache

    def is_like(self, other: HFSequence) -> bool:
        """Whether one computation is enough for both."""
        one, two = self.job, other.job
        return (
            one.prompt is two.prompt
            and one.tenant == two.tenant
            and (one.resume.tokens if one.resume else 0) == (two.resume.tokens if two.resume else 0)
            and (one.cut_tokens, one.chunk_tokens) == (two.cut_tokens, two.chunk_tokens)
            and two.export is None
            and two.prompt_logprobs is None
        )

    def next_alike(self) -> HFSequence | None:
        """The first one that is like this one, with the others."""
        alike, self.alike = self.alike, []
        if not alike:
            return None
        alike[0].alike = alike[1:]
        return alike[0]

    def follow(self, computed: HFSequence, loaded: LoadedModel) -> None:
        """Takes over what was computed for one that it is like."""
        self.tokens, self.cuts = computed.tokens, computed.cuts
        self.sampler = Sampler(
            self.job.sampling, loaded.device, self.job.prompt, loaded.eos_token_ids
        )

    def finish_loads(self) -> None:
        """Returns when the device reads the job's source no more."""
        if self._loads is not None:
            self._loads.finish_loads()
            self._loads = None

    def limit_launched(self, device: torch.device) -> None:
        """Lets the host launch one chunk ahead of the device: the device need not wait for the
        host, and a cancellation waits for one chunk."""
        if device.type == "cuda":
            launched = torch.cuda.Event(blocking=True)
            launched.record(torch.cuda.current_stream(device))
            if self._launched is not None:
                self._launched.synchronize()
            self._launched = launched

    def is_ready(self, within_s: float) -> bool:
        """Whether `next_token` need not wait for the grammar."""
        assert self.sampler is not None
        return self.sampler.is_ready(within_s)

    def next_token(
        self, logits: torch.Tensor, eos_token_ids: frozenset[int], greedy: int | None = None
    ) -> Finished | None:
        """Chooses and emits a token from the row of logits. `greedy`: its largest one, where the
        caller knows it. Returns how the job has ended, or None when it continues."""
        sampling, sampler = self.job.sampling, self.sampler
        assert sampler is not None
        known = greedy if sampler.is_plain_greedy else None
        token = sampler.pick(logits) if known is None else known
        self.generated += 1
        self.last_token = token
        kept = logits.float().cpu().numpy() if sampling.want_logits else None
        is_eos = token in eos_token_ids and not sampling.ignore_eos
        is_stop = is_eos or token in sampling.stop_token_ids
        self.emit(Token(token, kept, sampler.logprobs(logits, token), is_stop))
        if is_stop:
            return Finished("stop")
        return Finished("length") if self.generated >= sampling.max_tokens else None
