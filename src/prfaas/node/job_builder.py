"""From a request to an engine's job: what the pool has of its prompt, and what it is to keep.

    plain            resume at the longest cached prefix; keep the prompt up to its last boundary
    remote decode    the same up to the hand-off length, pushed to the grant's kvd as it is computed
    remote prefill   continue from a committed transfer, or fail: never compute a long prompt anew

Synchronous; called from threads that may wait for the kvd. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.cache.hashing import block_hashes, tail_hash
from prfaas.engine.api import Export, Job, Resume, Sampling
from prfaas.errors import ConnectionLost, InputError, PeerError, TransferFailed
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.node.errors import not_now, request_error
from prfaas.node.request_schema import RemoteDecode, RemotePrefill, Transfer
from prfaas.types import BlockHash, Grant, NotNow, TransferId

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """One request, understood and tokenised."""

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    salt: str = ""
    transfer: Transfer = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job and the pages it reads or writes. `end` gives them back, whatever happened."""

    job: Job | None  # None: the pool has everything that is to be handed off
    lease: WriteLease | ReadLease | None = None
    hashes: Sequence[BlockHash] = ()  # of the whole blocks of the prompt, as far as they matter
    resumed_tokens: int = 0
    external_tokens: int = 0  # of those: what a transfer brought

    def on_transfer_lost(self, call: Callable[[BaseException], None]) -> None:
        """Calls, on any thread, when it is known that the receiver will not have the state."""

        def settled(sent: Future[None]) -> None:
            error = sent.exception()
            if error is not None:
                call(error)

        if isinstance(self.lease, WriteLease):
            self.lease.sent.add_done_callback(settled)

    def computed(self) -> None:
        """The prompt is computed: others may read what was written, and what was read is the
        engine's own copy by now."""
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
                self.lease.abort("the prefill did not complete")  # nothing after a commit


def unpooled(work: Work) -> Prepared:
    return Prepared(Job(work.id, work.prompt, work.sampling))


class Kvd(Protocol):
    """What is asked of a kvd (`kvd.client.KvdClient`)."""

    def begin(
        self,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        grant: Grant | None = None,
        tail: bytes = b"",
    ) -> WriteLease | NotNow: ...

    def attach(self, transfer_id: TransferId) -> ReadLease: ...

    def pin(self, hashes: Sequence[bytes]) -> ReadLease | NotNow: ...


class JobBuilder:
    """A kvd that is not there costs plain requests their cache, and makes hand-offs fail."""

    def __init__(self, kvd: Kvd, block_tokens: int) -> None:
        self._kvd = kvd
        self._block_tokens = block_tokens

    def prepare(self, work: Work) -> Prepared:
        match work.transfer:
            case None:
                return self._plain(work)
            case RemoteDecode():
                return self._remote_decode(work, work.transfer)
            case RemotePrefill():
                return self._remote_prefill(work, work.transfer)

    def _plain(self, work: Work) -> Prepared:
        # The last token is always computed, so a boundary at the very end could not be resumed at.
        hashes = self._hashes(work, len(work.prompt) - 1)
        if not hashes:
            return unpooled(work)
        tokens = len(hashes) * self._block_tokens
        try:
            lease: WriteLease | ReadLease | NotNow = self._kvd.begin(hashes, tokens)
            if isinstance(lease, NotNow):
                lease = self._kvd.pin(hashes)  # no room to keep it, but perhaps a hit
        except PeerError as error:
            _LOG.warning("computed without the pool: %s", error)
            return replace(unpooled(work), hashes=hashes)
        if isinstance(lease, NotNow):
            return replace(unpooled(work), hashes=hashes)
        return self._with_lease(work, lease, hashes)

    def _remote_decode(self, work: Work, transfer: RemoteDecode) -> Prepared:
        part = replace(
            work,
            prompt=work.prompt[: transfer.handoff_tokens],
            sampling=replace(work.sampling, max_tokens=0),
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

    def _remote_prefill(self, work: Work, transfer: RemotePrefill) -> Prepared:
        try:
            lease = self._kvd.attach(transfer.transfer_id)
        except ConnectionLost as error:
            raise request_error("kvd_unavailable", str(error)) from error
        except TransferFailed as error:
            raise request_error("transfer_lost", str(error)) from error
        hashes = self._hashes(work, lease.tokens)
        named = (tuple(hashes), self._tail(work, lease.tokens, hashes))
        held = (lease.ticket.hashes, lease.ticket.tail)
        if lease.tokens >= len(work.prompt) or named != held:
            lease.release()
            raise InputError(
                f"the transfer holds the first {lease.tokens} tokens of another prompt, or all of "
                f"this one ({len(work.prompt)})",
                where="prompt",
                fix="send the whole prompt and its salt, and hand off before its last token",
            )
        job = Job(work.id, work.prompt, work.sampling, resume=Resume(lease.tokens, lease))
        return Prepared(job, lease, hashes, lease.tokens, external_tokens=lease.tokens)

    def _with_lease(
        self, work: Work, lease: WriteLease | ReadLease, hashes: Sequence[BlockHash]
    ) -> Prepared:
        found = lease.match_tokens if isinstance(lease, WriteLease) else lease.tokens
        if found == len(work.prompt):
            return Prepared(None, lease, hashes, found)
        export = None
        if isinstance(lease, WriteLease) and found < lease.tokens:
            export = Export(
                sink=lease,
                tokens=lease.tokens,
                checkpoint_tokens=tuple(n for n in lease.checkpoint_tokens if n < lease.tokens),
                skip_tokens=lease.skip_tokens,
            )
        resume = Resume(found, lease) if found else None
        return Prepared(
            Job(work.id, work.prompt, work.sampling, resume, export), lease, hashes, found
        )

    def _hashes(self, work: Work, tokens: int) -> list[BlockHash]:
        return block_hashes(work.prompt[:tokens], self._block_tokens, salt=work.salt)

    def _tail(self, work: Work, tokens: int, hashes: Sequence[BlockHash]) -> bytes:
        return tail_hash(work.prompt[:tokens], hashes, self._block_tokens, salt=work.salt)
