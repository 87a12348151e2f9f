"""One job of HFEngine: its cache while it prefills, its sampler and its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from prfaas.engine.api import Emit, EngineJob, Finished, Token
from prfaas.engine.chunks import chunk_ends
from prfaas.engine.hf.exporter import ExportingCache
from prfaas.engine.hf.importer import import_state
from prfaas.engine.hf.load import LoadedModel
from prfaas.engine.hf.sampling import Sampler


class HFSequence:
    def __init__(self, job: EngineJob, emit: Emit) -> None:
        self.job = job
        self.emit = emit
        self.cache: ExportingCache | None = None
        self.ends: Iterator[int] = iter(())  # of chunks
        self.tokens = 0  # in the cache
        self.generated = 0
        self.last_token = 0
        self.sampler: Sampler | None = None

    def start(
        self, loaded: LoadedModel, side: torch.cuda.Stream | None, chunk_tokens: int
    ) -> ExportingCache:
        """Makes the cache and reads the state to resume from."""
        job = self.job
        self.cache = ExportingCache(loaded, job.export, side)
        self.sampler = Sampler(job.sampling, loaded.device)
        if job.resume is not None:
            import_state(loaded, self.cache, job.resume)
            self.tokens = job.resume.tokens
        self.ends = chunk_ends(
            self.tokens, len(job.prompt), chunk_tokens=chunk_tokens, export=job.export
        )
        return self.cache

    def accept(
        self, token: int, logits: torch.Tensor, eos_token_ids: frozenset[int]
    ) -> Finished | None:
        """Emits the token. Returns how the job has ended, or None when it continues."""
        sampling = self.job.sampling
        self.generated += 1
        self.last_token = token
        kept = logits.float().cpu().numpy() if sampling.want_logits else None
        self.emit(Token(token, kept))
        eos = frozenset() if sampling.ignore_eos else eos_token_ids
        if token in sampling.stop_token_ids or token in eos:
            return Finished("stop")
        return Finished("length") if self.generated >= sampling.max_tokens else None
