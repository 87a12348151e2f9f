"""From a request to an engine's job: which prefix to resume from, and which state to keep.

    plain            resume at the longest cached prefix; keep the prompt up to its last boundary
    remainder        as plain, in small chunks, if only a few tokens are not cached; otherwise fail
    remote decode    the same up to the hand-off length, pushed to the grant's kvd as it is computed
    remote prefill   continue from a committed transfer, or fail: never compute a long prompt again
    reference        compute everything, cut where the request says; the pool is not used

When an answer has ended, `keep` adds its state to the pool.

Synchronous: callers use threads that may wait for the kvd. Independent of HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.cache.hashing import block_hashes, tail_hash
from prfaas.contracts.kv_transfer_params import (
    Reference,
    Remainder,
    RemoteDecode,
    RemotePrefill,
    RequestedTransfer,
)
from prfaas.engine.api import EngineJob, Export, KeepAnswer, KeptAnswer, Resume, Sampling
from prfaas.errors import ConnectionLost, InputError, PeerError, TransferFailed
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.node.errors import not_now, request_error
from prfaas.types import BlockHash, Grant, NotNow, TransferId

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """One request, parsed and tokenised."""

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    salt: str = ""
    transfer: RequestedTransfer | Reference | Remainder | None = None
    continuation: int = 0  # of the same prompt; the first one has 0
    prompt_logprobs: int | None = None  # alternatives per token of the prompt
    tenant: str = ""  # the gateway's tag: tenants share the slots and the pool


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job and the lease on the pages it reads or writes. `end` ends the lease in any case."""

    job: EngineJob | None  # None: the pool has all state of the hand-off
    lease: WriteLease | ReadLease | None = None
    hashes: Sequence[BlockHash] = ()  # of the prompt's whole blocks that the pool looks up or keeps
    resumed_tokens: int = 0
    external_tokens: int = 0  # of those: from a transfer

    def on_transfer_lost(self, call: Callable[[BaseException], None]) -> None:
        """Calls `call`, on any thread, when the transfer to the receiver has failed."""

        def settled(sent: Future[None]) -> None:
            error = sent.exception()
            if error is not None:
                call(error)

        if isinstance(self.lease, WriteLease):
            self.lease.sent.add_done_callback(settled)

    def computed(self) -> None:
        """The prompt is computed: commits what the engine wrote, and releases what it read, because
        the engine has copied it."""
        match self.lease:
            case ReadLease():
                self.lease.release()
            case WriteLease():
                self.lease.commit()

    def end(self) -> None:
        match self.lease:
            case ReadLease():
                self.lease.release()
            case WriteLease():
                self.lease.abort("the prefill did not complete")  # no effect after a commit


def without_pool(request: TokenizedRequest) -> PreparedJob:
    return PreparedJob(_job(request))


def _job(request: TokenizedRequest) -> EngineJob:
    return EngineJob(
        request.id,
        request.prompt,
        request.sampling,
        prompt_logprobs=request.prompt_logprobs,
        tenant=request.tenant,
    )


class LeaseProvider(Protocol):
    """The leases of a kvd (`kvd.engine_socket.client.KvdClient`)."""

    def begin(
        self,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        grant: Grant | None = None,
        tail: bytes = b"",
        tenant: str = "",
    ) -> WriteLease | NotNow: ...

    def attach(self, transfer_id: TransferId, attachments: int = 1) -> ReadLease: ...

    def pin(self, hashes: Sequence[bytes]) -> ReadLease | NotNow: ...

    def begin_answer(
        self, hashes: Sequence[bytes], tokens: int, *, first_token: int, tenant: str = ""
    ) -> WriteLease | NotNow: ...


class JobBuilder:
    """Without a kvd, plain requests run uncached and hand-offs fail."""

    def __init__(
        self, kvd: LeaseProvider, block_tokens: int, *, keeps_answers: bool = False
    ) -> None:
        self._kvd = kvd
        self._block_tokens = block_tokens
        self._keeps_answers = keeps_answers

    def prepare(self, request: TokenizedRequest) -> PreparedJob:
        match request.transfer:
            case None:
                return self._plain(request)
            case Remainder():
                return self._remainder(request, request.transfer)
            case RemoteDecode():
                return self._remote_decode(request, request.transfer)
            case RemotePrefill():
                return self._remote_prefill(request, request.transfer)
            case Reference():
                cuts = request.transfer.cut_tokens
                return PreparedJob(replace(_job(request), cut_tokens=cuts))

    def _plain(self, request: TokenizedRequest) -> PreparedJob:
        # The engine always computes the last token, so it could not resume at the prompt's end.
        hashes = self._hashes(request, len(request.prompt) - 1)
        if not hashes:
            return self._keeping(without_pool(request), 0)
        tokens = len(hashes) * self._block_tokens
        try:
            lease: WriteLease | ReadLease | NotNow
            lease = self._kvd.begin(hashes, tokens, tenant=request.tenant)
            if isinstance(lease, NotNow) and request.prompt_logprobs is None:
                lease = self._kvd.pin(hashes)  # no room to keep the state, but perhaps a hit
        except PeerError as error:
            _LOG.warning("the request is computed without the pool: %s", error)
            return replace(without_pool(request), hashes=hashes)
        if isinstance(lease, NotNow):
            return replace(without_pool(request), hashes=hashes)
        prepared = self._with_lease(request, lease, hashes)
        if isinstance(lease, ReadLease):
            return prepared  # there was no room for the prompt, and so there is none for its answer
        return self._keeping(prepared, lease.tokens)

    def _remainder(self, request: TokenizedRequest, bound: Remainder) -> PreparedJob:
        prepared = self._plain(request)
        assert prepared.job is not None
        computed = len(request.prompt) - prepared.resumed_tokens
        if computed > bound.max_computed_tokens:
            prepared.end()
            raise request_error(
                "transfer_lost",
                f"this node has only {prepared.resumed_tokens} of {len(request.prompt)} tokens "
                f"cached; {computed} to compute are more than {bound.max_computed_tokens}",
            )
        job = replace(prepared.job, chunk_tokens=bound.chunk_tokens)
        return replace(prepared, job=job)

    def _keeping(self, prepared: PreparedJob, held_tokens: int) -> PreparedJob:
        """The same job, whose answer is kept. The pool has `held_tokens` when it has ended."""
        if prepared.job is None or not self._keeps_answers:
            return prepared
        return replace(prepared, job=replace(prepared.job, keep=KeepAnswer(held_tokens)))

    def keep(
        self,
        request: TokenizedRequest,
        generated: Sequence[int],
        job: EngineJob,
        answer: KeptAnswer,
    ) -> bool:
        """Adds the state of an answer to the pool. False when the pool does not take it."""
        assert job.keep is not None
        tokens = answer.tokens
        conversation = replace(request, prompt=[*request.prompt, *generated][:tokens])
        hashes = self._hashes(conversation, tokens)
        try:
            lease = self._kvd.begin_answer(
                hashes, tokens, first_token=job.keep.held_tokens, tenant=request.tenant
            )
            if isinstance(lease, NotNow):
                _LOG.info("an answer was not kept: %s", lease.reason)
                return False
            try:
                if lease.match_tokens < tokens:  # otherwise the pool has all of it already
                    answer.write(lease, lease.skip_tokens)
                lease.commit()
            finally:
                lease.abort("the answer was not written")  # no effect after a commit
        except PeerError as error:
            _LOG.info("an answer was not kept: %s", error)
            return False
        return True

    def _remote_decode(self, request: TokenizedRequest, transfer: RemoteDecode) -> PreparedJob:
        part = replace(
            request,
            prompt=request.prompt[: transfer.handoff_tokens],
            sampling=replace(request.sampling, max_tokens=0),
        )
        hashes = self._hashes(part, len(part.prompt))
        try:
            tail = self._tail(part, len(part.prompt), hashes)
            lease = self._kvd.begin(hashes, len(part.prompt), grant=transfer.grant, tail=tail)
        except ConnectionLost as error:
            raise request_error("kvd_unavailable", str(error)) from error
        except TransferFailed as error:
            raise request_error("transfer_lost", str(error)) from error
        if isinstance(lease, NotNow):
            raise not_now(lease)
        return self._with_lease(part, lease, hashes)

    def _remote_prefill(self, request: TokenizedRequest, transfer: RemotePrefill) -> PreparedJob:
        try:
            lease = self._kvd.attach(transfer.transfer_id, transfer.attachments)
        except ConnectionLost as error:
            raise request_error("kvd_unavailable", str(error)) from error
        except TransferFailed as error:
            raise request_error("transfer_lost", str(error)) from error
        hashes = self._hashes(request, lease.tokens)
        named = (tuple(hashes), self._tail(request, lease.tokens, hashes))
        held = (lease.ticket.hashes, lease.ticket.tail)
        if lease.tokens >= len(request.prompt) or named != held:
            lease.release()
            raise InputError(
                f"the transfer holds the first {lease.tokens} tokens of another prompt, or all of "
                f"this one ({len(request.prompt)})",
                where="prompt",
                fix="send the whole prompt and its salt, and hand off before its last token",
            )
        job = replace(_job(request), resume=Resume(lease.tokens, lease))
        prepared = PreparedJob(job, lease, hashes, lease.tokens, external_tokens=lease.tokens)
        return self._keeping(prepared, len(hashes) * self._block_tokens)

    def _with_lease(
        self, request: TokenizedRequest, lease: WriteLease | ReadLease, hashes: Sequence[BlockHash]
    ) -> PreparedJob:
        found = lease.match_tokens if isinstance(lease, WriteLease) else lease.tokens
        if found == len(request.prompt):
            return PreparedJob(None, lease, hashes, found)
        export = None
        if isinstance(lease, WriteLease) and found < lease.tokens:
            export = Export(
                sink=lease,
                tokens=lease.tokens,
                checkpoint_tokens=tuple(n for n in lease.checkpoint_tokens if n < lease.tokens),
                skip_tokens=lease.skip_tokens,
            )
        # Log-probabilities of the prompt need every token computed, as in vLLM.
        resumed = found if request.prompt_logprobs is None else 0
        resume = Resume(resumed, lease) if resumed else None
        job = replace(_job(request), resume=resume, export=export)
        return PreparedJob(job, lease, hashes, resumed)

    def _hashes(self, request: TokenizedRequest, tokens: int) -> list[BlockHash]:
        return block_hashes(request.prompt[:tokens], self._block_tokens, salt=request.salt)

    def _tail(self, request: TokenizedRequest, tokens: int, hashes: Sequence[BlockHash]) -> bytes:
        return tail_hash(request.prompt[:tokens], hashes, self._block_tokens, salt=request.salt)
