"""One hand-off: a grant at the decode node's kvd, prefix copies, the prefill, and the commit. The
gateway learns of the commit from the receiver, not from the prefill's response a round trip later.

A hand-off fails with `AttemptFailed` (with the nodes to avoid next), `DecodeNodeFull` (nothing was
reserved) or `RequestError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import Clock
from prfaas.contracts.forms import choose_compat
from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill, encode
from prfaas.contracts.kvd_api import OpenTransfer, TransferStatus
from prfaas.errors import (
    ConnectionLost,
    PeerError,
    PeerHttpError,
    RequestError,
    TransferFailed,
    Unreachable,
)
from prfaas.gateway.attempt_trace import AttemptTrace, begin_call
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.client.node_client import DRAINING, NodeClient
from prfaas.gateway.client.request_body import encode_body
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.formats import describe_mismatch
from prfaas.gateway.fleet.liveness import FellSilent
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.planning.prefix_copies import PrefixCopies, PrefixCopy
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.http_client.client import HttpClient
from prfaas.scheduler.handoff import choose_handoff
from prfaas.scheduler.request import CacheCopy
from prfaas.tracing.spans import CUT, LOST, OTHER, SILENT
from prfaas.transport.grants import new_transfer_id
from prfaas.types import BlockHash, ClusterId, Grant, NodeId, NotNow, TransferId

# A prefill waits for its copies at most `prefix_copy_s` plus this multiple of their predicted time.
_COPY_TIMES = 4.0
_CHECK_S = 1.0
_LOSS_S = 0.1  # in which a connection to a process that has died breaks
_ABORT_ATTEMPTS = 3  # a transfer that is not aborted keeps its memory until its grant expires
_INCOMPATIBLE = "incompatible"  # the error code of a kvd whose engine has another KV format
LONG_TOKENS = 8_192  # hashing more would block the event loop: a thread does it
_CLIENT_ERRORS = (400, 404, 413, 422)  # statuses that another node would answer with as well


class NodeLoss(NamedTuple):
    """How a call to a node has failed."""

    unsent: bool  # the node has computed nothing for the call
    broke: bool  # the connection could not be made, or broke
    known: bool  # earlier calls have failed there since the node was last alive

    @property
    def if_broke(self) -> NodeLoss | None:
        return self if self.broke else None


class AttemptFailed(Exception):
    """An attempt failed before the first token. The next one had better avoid the nodes `avoid`."""

    def __init__(
        self,
        reason: str,
        *avoid: NodeId,
        prefill: bool = False,
        decode_only: bool = False,
        no_alone: bool = False,
        unsent: bool = False,
        lost: NodeLoss | None = None,
        engine: NodeId | None = None,
        late: bool = False,
        again: bool = False,
        kind: str | None = None,
    ) -> None:
        """`kind`: one of `spans.FAILURES`; None: `LOST` or `OTHER`, as `lost` says."""
        super().__init__(reason)
        self.kind = kind or (OTHER if lost is None else LOST)
        self.avoid = avoid
        self.unsent = unsent  # no node has received the request: nothing was computed
        self.silent = kind == SILENT  # a node has fallen silent
        self.lost = lost  # the connection to a node has broken
        self.engine = engine  # was lost while it had the request
        self.again = again  # nothing has failed: the request waits for its turn again
        self.late = late  # the engine has not checked the request's fields in time
        self.prefill = prefill  # the prefill or its hand-off failed
        self.decode_only = decode_only  # the decode engine has to prefill the request as well
        # The decode node has lost what it was to continue alone. It has computed nothing.
        self.no_alone = no_alone


class DecodeNodeFull(Exception):
    """The decode node's kvd has no room for a grant now."""

    def __init__(self, node: NodeId, cluster: ClusterId, answer: NotNow) -> None:
        super().__init__(f"{node}: {answer.reason}")
        self.node = node
        self.cluster = cluster
        self.retry_after_s = answer.retry_after_s


def raise_client_error(error: PeerError) -> None:
    """Raises `RequestError` when the cause of the error is the client's request."""
    if isinstance(error, PeerHttpError) and error.status in _CLIENT_ERRORS:
        raise RequestError(error.status, error.code, str(error), param=error.param)


def record_lost_engine(fleet: Fleet, node: NodeId, error: PeerError) -> NodeLoss:
    """Records that an engine drains or cannot be reached, where the error of a call says so."""
    drains = isinstance(error, PeerHttpError) and error.code == DRAINING
    broke = isinstance(error, ConnectionLost)
    first = (drains or broke) and fleet.record_engine_failure(node, leaving=drains)
    return NodeLoss(drains or isinstance(error, Unreachable), broke, known=not first)


def record_lost_kvd(fleet: Fleet, node: NodeId, error: ConnectionLost) -> NodeLoss:
    """Records that a kvd cannot be reached."""
    first = fleet.record_kvd_failure(node)
    return NodeLoss(isinstance(error, Unreachable), broke=True, known=not first)


@dataclass(frozen=True, slots=True)
class HandOffs:
    """Starts hand-offs; holds what each of them needs to reach nodes and kvds."""

    fleet: Fleet
    http: HttpClient
    background_calls: BackgroundCalls
    copies: PrefixCopies
    clock: Clock

    def start(self, booking: Booking, prefill: Member, decode: Member) -> HandOff:
        return HandOff(self, booking, prefill, decode)


class HandOff:
    """Used as a context: leaving it aborts what the decode engine has not taken."""

    def __init__(
        self, starter: HandOffs, booking: Booking, prefill: Member, decode: Member
    ) -> None:
        self._fleet = starter.fleet
        self._timeouts = starter.fleet.timeouts
        self._http = starter.http
        self._background_calls = starter.background_calls
        self._prefix_copies = starter.copies
        self._clock = starter.clock
        self._booking = booking
        self._route = booking.route
        self._prefill = prefill
        self._decode = decode
        self._kvd = KvdClient(self._http, decode.kvd_url, self._timeouts)
        # Set while the kvd may have memory reserved for this hand-off, granted or not.
        self._transfer_id: TransferId | None = None
        self._prefilling: asyncio.Future[int | None | PeerError] | None = None
        self._committed = False
        self._taken = False
        self._uncounted: RequestTrace | None = None  # that lacks the bytes of this hand-off

    async def __aenter__(self) -> HandOff:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._prefilling is not None and not self._committed:
            self._prefilling.cancel()
        if self._transfer_id is not None and not self._taken:
            self._abort(self._transfer_id)

    def mark_taken(self) -> None:
        """The decode engine has taken over the state."""
        self._taken = True

    async def carry_out(
        self, request: GatewayRequest, prompt: PromptHashes, trace: RequestTrace
    ) -> dict[str, Any]:
        """Returns when the state is at the decode node: the `kv_transfer_params` for its engine."""
        route = self._route
        self._uncounted = trace
        try:
            async with self._fleet.liveness.unless_silent(route.prefill, route.decode):
                return await self._carry_out(request, prompt, trace)
        except FellSilent as error:
            prefill = error.node == route.prefill
            # The decode engine does not have the request yet.
            engine = error.node if prefill and self._prefilling is not None else None
            raise AttemptFailed(
                str(error), error.node, prefill=prefill, engine=engine, kind=SILENT
            ) from None

    async def _carry_out(
        self, request: GatewayRequest, prompt: PromptHashes, trace: RequestTrace
    ) -> dict[str, Any]:
        card = self._prefill.card
        if self._decode.compat is None or card is None:
            raise AttemptFailed(
                "a node has just left",
                self._route.prefill,
                self._route.decode,
                unsent=True,
                kind=LOST,
            )
        compat = choose_compat(self._prefill.compats, self._decode.compats)
        if compat is None:
            # One of the nodes has restarted with another format since the request was routed.
            why = describe_mismatch(self._prefill, self._decode)
            raise AttemptFailed(
                f"the nodes' KV formats differ since a restart: {why}",
                self._route.prefill,
                unsent=True,
            )
        # vLLM has states at the ends of its steps only, wherever those are.
        resumable = card.ours and (request.conversation or self._route.cached_tokens > 0)
        length = choose_handoff(prompt.tokens, compat.block_tokens, resumable=resumable)
        hashes = await self._hash(prompt, length.handoff_tokens, compat.block_tokens)
        course = trace.course
        course.grant = begin_call(trace.context, self._clock.now())
        grant = await self._obtain_grant(
            OpenTransfer(
                tuple(hashes),
                length.handoff_tokens,
                compat,
                length.checkpoint_tokens,
                new_transfer_id(),
                request.tenant_tag,
            ),
            course.grant.traceparent,
        )
        trace.granted_s = course.grant.answered_s = self._clock.now()
        course.transfer_id = grant.transfer_id
        trace.form = compat.form
        if self._route.copies:
            await self._copy_prefixes(prompt, trace)
        body = {
            "model": card.model,
            "prompt": request.token_ids.json(length.handoff_tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            **({"cache_salt": request.salt} if request.salt else {}),
            "kv_transfer_params": encode(RemoteDecode(grant, length.handoff_tokens)),
        }
        course.prefill = begin_call(trace.context, self._clock.now())
        traced = trace.context.headers_of(course.prefill.traceparent)
        headers = {**request.headers, **traced}
        await self._prefill_and_commit(grant, body, headers, length.handoff_tokens, trace)
        trace.committed_s = course.committed_s = self._clock.now()
        self._booking.landed(trace.committed_s)
        return encode(RemotePrefill(grant.transfer_id, grant.form, attachments=request.n))

    async def _hash(
        self, prompt: PromptHashes, tokens: int, block_tokens: int
    ) -> Sequence[BlockHash]:
        """Prompts are hashed when they arrive, at the sizes that the index uses. The block size of
        this pair may be another one."""
        known = block_tokens in self._fleet.members.block_sizes()
        if known or prompt.tokens < LONG_TOKENS:
            return prompt.prefix(tokens).at(block_tokens)
        return await asyncio.to_thread(lambda: prompt.prefix(tokens).at(block_tokens))

    async def _obtain_grant(self, transfer: OpenTransfer, traceparent: str) -> Grant:
        # Leaving the hand-off aborts this id. That releases the memory also when the answer is
        # late, lost or damaged, because the kvd refuses an open that arrives after its abort.
        self._transfer_id = transfer.transfer_id
        try:
            # The client bounds the time. A timer of this process would also expire after a pause of
            # the gateway, although the answer has arrived.
            answer = await self._kvd.open(transfer, traceparent)
        except ConnectionLost as error:
            lost = record_lost_kvd(self._fleet, self._route.decode, error)
            raise AttemptFailed(
                str(error), self._route.decode, unsent=lost.unsent, lost=lost
            ) from None
        except PeerError as error:
            # The kvd's engine has just been replaced, and the gateway has not noticed yet.
            differs = isinstance(error, PeerHttpError) and error.code == _INCOMPATIBLE
            raise AttemptFailed(str(error), self._route.prefill, unsent=differs) from None
        if isinstance(answer, NotNow):
            self._transfer_id = None  # nothing is reserved
            raise DecodeNodeFull(self._route.decode, self._decode.cluster, answer)
        if answer.transfer_id != transfer.transfer_id:
            self._abort(answer.transfer_id)
            problem = "its kvd has granted another transfer than the one that was requested"
            raise AttemptFailed(f"{self._route.decode}: {problem}", self._route.decode)
        if answer.form != transfer.compat.form:
            problem = f"its kvd has granted the {answer.form} form"
            raise AttemptFailed(
                f"{self._route.decode}: {problem}, and not the {transfer.compat.form} one",
                self._route.decode,
            )
        relay = self._fleet.links.relay_between(self._prefill, self._decode)
        return answer if relay is None else msgspec.structs.replace(answer, data_address=relay)

    def _abort(self, transfer_id: TransferId) -> None:
        self._background_calls.run(
            self._abort_until_answered(transfer_id),
            _ABORT_ATTEMPTS * self._timeouts.kvd_call_s,
            must_finish=True,
        )

    async def _abort_until_answered(self, transfer_id: TransferId) -> None:
        for attempt in range(1, _ABORT_ATTEMPTS + 1):
            try:
                status = await self._kvd.abort(transfer_id, "given up by the gateway")
                self._count(status.arrived_bytes)
                return
            except ConnectionLost:
                if attempt == _ABORT_ATTEMPTS:
                    raise

    async def _copy_prefixes(self, prompt: PromptHashes, trace: RequestTrace) -> None:
        """Copies the prefixes that the prefill is to resume from. Without them the prefill takes
        longer, and nothing else changes."""
        bound_s = self._timeouts.prefix_copy_s + _COPY_TIMES * max(
            copy.seconds for copy in self._route.copies
        )
        call = begin_call(trace.context, self._clock.now())
        under_way = []
        for planned in self._route.copies:
            copy = self._copy_of(planned, prompt)
            if copy is not None:
                copying = self._prefix_copies.start(copy, bound_s, call.traceparent)
                if copying is not None:
                    under_way.append(copying)
        if under_way:
            trace.course.copies = call
            await asyncio.wait(under_way, timeout=bound_s)
            call.answered_s = self._clock.now()

    def _copy_of(self, planned: CacheCopy, prompt: PromptHashes) -> PrefixCopy | None:
        """A planned copy, in the format in which the two nodes can copy most of it."""
        members = self._fleet.members
        source, target = members.named(planned.source), members.named(planned.target)
        if source is None or target is None:
            return None
        match = self._fleet.manager.match(prompt)
        chosen = self._fleet.prefixes.choose_copy(source, target, match, planned.tokens)
        if chosen is None:
            return None
        compat, tokens = chosen
        hashes = prompt.at(compat.block_tokens)[: tokens // compat.block_tokens]
        return PrefixCopy("route", planned.source, planned.target, tuple(hashes), tokens, compat)

    async def _prefill_and_commit(
        self,
        grant: Grant,
        body: dict[str, Any],
        headers: Mapping[str, str],
        handoff_tokens: int,
        trace: RequestTrace,
    ) -> None:
        url = self._prefill.engine_url
        if url is None:
            raise AttemptFailed(
                "its engine has just left",
                self._route.prefill,
                prefill=True,
                unsent=True,
                kind=LOST,
            )
        node = NodeClient(self._http, url, self._timeouts)
        prefilling = self._prefilling = self._background_calls.run(
            node.prefill(encode_body(body), headers), self._timeouts.prefill_s
        )
        beside = self._fleet.work.has_other_prefills(self._route.prefill)
        record = partial(self._record_prefill, trace, trace.course, handoff_tokens, beside)
        prefilling.add_done_callback(record)
        committing = self._background_calls.run(
            self._kvd.wait_committed(grant.transfer_id), self._timeouts.prefill_s
        )
        waiting: set[asyncio.Future[Any]] = {prefilling, committing}
        instance = self._prefill.instance
        try:
            while not committing.done():
                done, _ = await asyncio.wait(
                    waiting, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if committing not in done:
                    self._check_prefill(prefilling)
                    self._check_sender(instance)
                    self._check_link()
                    waiting -= done
        finally:
            committing.cancel()
        problem = committing.result()
        if isinstance(problem, TransferStatus | TransferFailed):
            self._count(problem.arrived_bytes)
        if isinstance(problem, ConnectionLost):
            lost = record_lost_kvd(self._fleet, self._route.decode, problem)
            raise AttemptFailed(str(problem), self._route.decode, lost=lost)
        if isinstance(problem, PeerError):
            # The receiver may notice first that the prefill node has died.
            await asyncio.wait({prefilling}, timeout=_LOSS_S)
            self._check_prefill(prefilling)
            raise AttemptFailed(str(problem), self._route.prefill, prefill=True)
        self._committed = True

    def _count(self, arrived_bytes: int) -> None:
        """Once: an abort may report the bytes of a transfer that are counted already."""
        if self._uncounted is not None:
            self._uncounted.nbytes += arrived_bytes
            self._uncounted = None

    def _check_prefill(self, prefilling: asyncio.Future[int | None | PeerError]) -> None:
        if not prefilling.done():
            return
        problem = prefilling.result()
        if not isinstance(problem, PeerError):
            self._booking.prefilled(self._clock.now())
            return
        raise_client_error(problem)
        lost = record_lost_engine(self._fleet, self._route.prefill, problem)
        raise AttemptFailed(
            str(problem),
            self._route.prefill,
            prefill=True,
            unsent=lost.unsent,
            lost=lost.if_broke,
            engine=self._route.prefill if lost.broke and not lost.unsent else None,
        )

    def _check_sender(self, instance: str | None) -> None:
        """A kvd that restarts within the time of two polls is not seen dead, and what it was to
        send after the prefill's response has gone with it."""
        if self._prefill.instance != instance:
            raise AttemptFailed(
                "its kvd has restarted before all of the state was sent",
                self._route.prefill,
                prefill=True,
                lost=NodeLoss(unsent=False, broke=True, known=True),
            )

    def _check_link(self) -> None:
        link_id = (self._prefill.cluster, self._decode.cluster)
        if self._fleet.links.cut_for_s(link_id) > self._timeouts.link_down_s:
            raise AttemptFailed(
                f"the link from {link_id[0]} is cut", self._route.prefill, prefill=True, kind=CUT
            )

    def _record_prefill(
        self,
        trace: RequestTrace,
        course: AttemptTrace,
        tokens: int,
        beside: bool,
        prefilling: asyncio.Future[int | None | PeerError],
    ) -> None:
        """Records what the node reports as cached: a copy may have failed, or the node may have
        had more than the route expected. `beside`: other gateways had prefills there."""
        if prefilling.cancelled() or isinstance(found := prefilling.result(), PeerError):
            return
        cached = self._route.cached_tokens if found is None else found
        beside = beside or self._fleet.work.has_other_prefills(self._route.prefill)
        call = course.prefill
        assert call is not None
        began_s = self._fleet.pace.record_prefill(
            self._route, tokens, min(cached, tokens), call.sent_s, beside_others=beside
        )
        call.answered_s = self._clock.now()
        if trace.course is course:  # and not a retry, whose decode node was lost meanwhile
            trace.cached_tokens = cached
            trace.waited_s = began_s - trace.arrived_s
            trace.prefilled_s = call.answered_s
