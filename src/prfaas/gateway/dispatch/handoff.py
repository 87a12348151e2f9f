"""One hand-off: a grant at the decode side's kvd, copies of prefixes, the prefill, and the commit,
which is learnt at the receiver and not from the prefill's answer a round trip later.

Fails with `Failed` (whom to avoid next), `Later` (nothing was reserved) or `RequestError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import Clock
from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill, encode
from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.errors import ConnectionLost, PeerError, PeerHttpError, RequestError
from prfaas.gateway.client.kvd_client import ASK_S, KvdClient
from prfaas.gateway.client.node_client import PREFILL_S, NodeClient
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.dispatch.booking import Booking
from prfaas.gateway.fleet.membership import Member
from prfaas.gateway.planning.prefix_copies import PrefixCopies, PrefixCopy
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.gateway.router import Router
from prfaas.http_client.client import HttpClient
from prfaas.scheduler.handoff import choose_handoff
from prfaas.scheduler.request import Route
from prfaas.types import Grant, NodeId, NotNow

CUT_S = 3.0  # a transfer over a link that is cut is given up after this; shorter cuts heal
OPEN_S = 2 * ASK_S  # connecting included
ABORT_S = ASK_S
COPY_S = 1.0  # a prefill waits so long for a copy, and some times what it was expected to take
_PATIENT = 4.0
_CHECK_S = 1.0
_THE_CLIENTS = (400, 404, 413, 422)  # statuses that another node would answer as well


class Failed(Exception):
    """An attempt failed before the first token. `avoid`: who had better not get it again."""

    def __init__(
        self, reason: str, *avoid: NodeId, prefill: bool = False, unhandable: bool = False
    ) -> None:
        super().__init__(reason)
        self.avoid = avoid
        self.prefill = prefill  # it was the prefill or its hand-off that failed
        self.unhandable = unhandable  # the decode engine had better do all of it


class Later(Exception):
    """The decode node has no room now."""

    def __init__(self, node: NodeId, answer: NotNow) -> None:
        super().__init__(f"{node}: {answer.reason}")
        self.node = node
        self.retry_after_s = answer.retry_after_s


def refused_by(error: PeerError) -> None:
    """Raises a refusal when the client's request is what is wrong."""
    if isinstance(error, PeerHttpError) and error.status in _THE_CLIENTS:
        raise RequestError(error.status, error.code, str(error), param=error.param)


class HandOff:
    """Used as a context: leaving it gives up whatever the decode engine has not taken."""

    def __init__(
        self,
        router: Router,
        calls: HttpClient,
        errands: BackgroundCalls,
        moves: PrefixCopies,
        clock: Clock,
        booking: Booking,
        prefill: Member,
        decode: Member,
    ) -> None:
        self._router = router
        self._calls = calls
        self._errands = errands
        self._moves = moves
        self._clock = clock
        self._booking = booking
        self._route: Route = booking.route
        self._prefill = prefill
        self._decode = decode
        self._kvd = KvdClient(calls, decode.kvd_url)
        self._grant: Grant | None = None
        self._prefilling: asyncio.Future[int | None | PeerError] | None = None
        self._committed = False
        self.taken = False  # by the decode engine

    async def __aenter__(self) -> HandOff:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._prefilling is not None and not self._committed:
            self._prefilling.cancel()
        if self._grant is not None and not self.taken:
            self._abort(self._grant, "given up by the gateway")

    async def make(
        self, ask: GatewayRequest, prompt: PromptHashes, story: RequestTrace
    ) -> dict[str, Any]:
        """Returns when the state is at the decode node: what its engine has to be told. Nothing,
        when there is nothing to hand off."""
        compat, card = self._decode.compat, self._prefill.card
        if compat is None or card is None:
            raise Failed("a node has just left", self._route.prefill, self._route.decode)
        # vLLM has states at the ends of its steps only, wherever those are.
        resumable = card.ours and (ask.conversation or self._route.cached_tokens > 0)
        length = choose_handoff(prompt.tokens, compat.block_tokens, resumable=resumable)
        hashes = prompt.prefix(length.handoff_tokens).at(compat.block_tokens)
        grant = await self._open(
            OpenTransfer(
                tuple(hashes),
                length.handoff_tokens,
                self._prefill.compat or compat,
                length.checkpoint_tokens,
            )
        )
        story.granted_s = self._clock.now()
        await self._copies(prompt)
        body = {
            "model": card.model,
            "prompt": ask.token_ids.json(length.handoff_tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            **({"cache_salt": ask.salt} if ask.salt else {}),
            "kv_transfer_params": encode(RemoteDecode(grant, length.handoff_tokens)),
        }
        headers = {"X-Request-Id": ask.id}
        await self._carry_out(grant, body, headers, length.handoff_tokens, story)
        story.committed_s = self._clock.now()
        self._booking.landed(story.committed_s)
        return encode(RemotePrefill(grant.transfer_id))

    async def _open(self, asked: OpenTransfer) -> Grant:
        # The call must finish even when this request is cancelled: only its answer says what was
        # reserved.
        opening = self._errands.run(self._kvd.open(asked), OPEN_S, must_finish=True)
        try:
            answer = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._give_back)
            raise
        if isinstance(answer, ConnectionLost):
            self._router.kvd_failed(self._route.decode)
            raise Failed(str(answer), self._route.decode)
        if isinstance(answer, PeerError):
            raise Failed(str(answer), self._route.prefill)
        if isinstance(answer, NotNow):
            raise Later(self._route.decode, answer)
        self._grant = answer
        via = self._router.way(self._prefill, self._decode)
        return answer if via is None else msgspec.structs.replace(answer, data_address=via)

    def _give_back(self, opening: asyncio.Future[Grant | NotNow | PeerError]) -> None:
        if not opening.cancelled() and isinstance(grant := opening.result(), Grant):
            self._abort(grant, "the request has ended")

    def _abort(self, grant: Grant, reason: str) -> None:
        call = self._kvd.abort(grant.transfer_id, reason)
        self._errands.run(call, ABORT_S, must_finish=True)

    async def _copies(self, prompt: PromptHashes) -> None:
        """Prefixes that the prefill is to resume from. Without them it only takes longer."""
        compat = self._prefill.compat
        if not self._route.copies or compat is None:
            return
        bound_s = COPY_S + _PATIENT * max(copy.seconds for copy in self._route.copies)
        under_way = []
        for copy in self._route.copies:
            hashes = prompt.at(compat.block_tokens)[: copy.tokens // compat.block_tokens]
            move = PrefixCopy("route", copy.source, copy.target, tuple(hashes), copy.tokens)
            making = self._moves.start(move, bound_s)
            if making is not None:
                under_way.append(making)
        if under_way:
            await asyncio.wait(under_way, timeout=bound_s)

    async def _carry_out(
        self,
        grant: Grant,
        body: dict[str, Any],
        headers: Mapping[str, str],
        handoff_tokens: int,
        story: RequestTrace,
    ) -> None:
        url = self._prefill.engine_url
        if url is None:
            raise Failed("its engine has just left", self._route.prefill, prefill=True)
        node = NodeClient(self._calls, url)
        prefilling = self._prefilling = self._errands.run(
            node.prefill(msgspec.json.encode(body), headers), PREFILL_S
        )
        answered = partial(self._answered, story, handoff_tokens, self._clock.now())
        prefilling.add_done_callback(answered)
        committing = self._errands.run(self._kvd.wait_committed(grant.transfer_id), PREFILL_S)
        waiting: set[asyncio.Future[Any]] = {prefilling, committing}
        try:
            while not committing.done():
                done, _ = await asyncio.wait(
                    waiting, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if committing not in done:
                    self._check_prefill(prefilling)
                    self._check_link()
                    self._check_nodes()
                    waiting -= done
        finally:
            committing.cancel()
        problem = committing.result()
        if isinstance(problem, ConnectionLost):
            self._router.kvd_failed(self._route.decode)
            raise Failed(str(problem), self._route.decode)
        if isinstance(problem, PeerError):
            raise Failed(str(problem), self._route.prefill, prefill=True)
        self._committed = True

    def _check_prefill(self, prefilling: asyncio.Future[int | None | PeerError]) -> None:
        if not prefilling.done():
            return
        problem = prefilling.result()
        if not isinstance(problem, PeerError):
            self._booking.prefilled(self._clock.now())
            return
        refused_by(problem)
        if isinstance(problem, ConnectionLost):
            self._router.engine_failed(self._route.prefill)
        raise Failed(str(problem), self._route.prefill, prefill=True)

    def _check_nodes(self) -> None:
        """Their connections stand, but a process that is stopped says nothing more."""
        for node, prefill in ((self._route.prefill, True), (self._route.decode, False)):
            if self._router.hung(node):
                raise Failed(f"{node} has fallen silent", node, prefill=prefill)

    def _check_link(self) -> None:
        link_id = (self._prefill.cluster, self._decode.cluster)
        if self._router.cut_for_s(link_id) > CUT_S:
            raise Failed(f"the link from {link_id[0]} is cut", self._route.prefill, prefill=True)

    def _answered(
        self,
        story: RequestTrace,
        tokens: int,
        sent_s: float,
        prefilling: asyncio.Future[int | None | PeerError],
    ) -> None:
        """The node's word on what it had cached: a copy may have failed, or found more."""
        if prefilling.cancelled() or isinstance(found := prefilling.result(), PeerError):
            return
        if found is not None:
            story.cached_tokens = found
        cached = min(story.cached_tokens, tokens)
        began_s = self._router.prefill_answered(self._route, tokens, cached, sent_s)
        story.waited_s = began_s - story.arrived_s
