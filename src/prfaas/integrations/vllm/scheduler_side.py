"""The scheduler's side: holds requests' leases and decides which blocks to copy in each step.

A prefill reserves room at its kvd when it arrives. When the kvd refuses, the prompt is cut to one
token and the response has the reason, so that nothing is computed in vain. A decode attaches to its
committed transfer when it arrives, and loads it asynchronously: vLLM can report the failure of such
loads only. With `keep_answers` the kvd keeps the state of every other text request when its answer
has ended (`answers/`), and a request that is not handed off resumes from what the kvd has. An
exception in a hook would end the engine and all its requests: what can fail for one request is
contained here, and `connector.py` passes anything else to `fail`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.request import RequestStatus

from prfaas.cache.hashing import block_hashes, tail_hash
from prfaas.contracts.kv_transfer_params import (
    RemoteDecode,
    RemotePrefill,
    ResponseParams,
    decode,
    encode,
    prefill_error,
)
from prfaas.contracts.kvd_api import OTHER_PROMPT
from prfaas.errors import EngineError, InputError, PrfaasError
from prfaas.integrations.vllm.answers.keeper import AnswerKeeper
from prfaas.integrations.vllm.answers.lookups import PrefixLookup, PrefixLookups, salt_and_adapter
from prfaas.integrations.vllm.caches.groups import BlockTables, CacheLayout, Move
from prfaas.integrations.vllm.compat import keep_out_of_prefix_cache
from prfaas.integrations.vllm.form_access import FormAccess, FormAccesses
from prfaas.integrations.vllm.progress import PrefillProgress, moves_to_load
from prfaas.integrations.vllm.steps import LoadOrder, SaveOrder, StepOrders
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.types import BlockHash, NotNow

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_LOG = logging.getLogger(__name__)
_MAX_MESSAGE = 1_000  # characters of an error message: parts of it may be the client's
_KVD_GONE = "the kvd has exited, and the pages of this request with it"
_NOT_TEXT = "only text prompts can be handed off"
_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Problem(NamedTuple):
    """Why a prefill's transfer cannot be completed: see `contracts.kv_transfer_params`."""

    code: str
    message: str


@dataclass(slots=True)
class PrefillState:
    access: FormAccess
    asked: RemoteDecode
    lease: WriteLease
    progress: PrefillProgress
    ticket_sent: bool = False  # the workers have the lease's ticket
    loading: bool = False
    ended: bool = False  # the request has ended; a worker may still use the pages
    problem: Problem | None = None  # why the transfer cannot be completed


@dataclass(slots=True)
class DecodeState:
    access: FormAccess | None  # None: lost before the form was known
    lease: ReadLease | None  # None: lost, or loaded and released
    loading: bool = False
    ended: bool = False
    done: bool = False


class SchedulerSide:
    def __init__(
        self,
        forms: FormAccesses,
        *,
        can_resume: bool = True,
        answers: AnswerKeeper | None = None,
        lookup_timeout_s: float,
    ) -> None:
        """`can_resume`: vLLM can compute the rest of a prompt whose beginning is cached. Without
        `answers` none is kept, and no request looks for kept ones."""
        self._forms = forms
        self._can_resume = can_resume
        self._answers = answers
        looks = answers is not None and can_resume
        self._lookups = PrefixLookups(lookup_timeout_s) if looks else None
        self._requests: dict[str, PrefillState | DecodeState | PrefixLookup] = {}
        self._refusals: dict[str, dict[str, Any]] = {}
        self._orders = StepOrders()
        self._may_diverge = all(
            access.layout.of_kind("state") and not access.layout.of_kind("window")
            for access in forms
        )
        self._reconciling: set[str] = set()
        self._counts: dict[str, float] = {}
        self.manager: KVCacheManager | None = None  # vLLM's, which exists only after the connector

    @property
    def completes_divergent_hits(self) -> bool:
        """Whether vLLM may use cached attention blocks whose state it has lost, because the load
        brings the state. False for a request for which the kvd has no more than that hit: the
        request would load nothing, have no state, and compute again what the kvd has."""
        return self._may_diverge and not self._reconciling

    # Hooks, in the order of a request -------------------------------------------------------------

    def accept(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is not None and not isinstance(params, dict):
            request.kv_transfer_params = None  # vLLM reads it as an object, too
            problem = "kv_transfer_params is not an object"
            self._refuse(request, _refused("invalid_request", problem))
            return
        try:
            asked = decode(params, request.num_prompt_tokens)
        except InputError as error:
            if (params or {}).get("do_remote_prefill"):
                self._lost(request, str(error))
            else:
                self._refuse(request, _refused("invalid_request", str(error)))
            return
        match asked:
            case RemoteDecode():
                self._begin(request, asked)
            case RemotePrefill():
                self._attach(request, asked)
            case None if self._answers is not None and _has_answer(request):
                first = self._forms.first
                self._answers.accept(request, first)
                lookup = self._lookups.start(request, first) if self._lookups else None
                if lookup is not None:
                    self._requests[request.request_id] = lookup

    def count_loadable_tokens(
        self, request: Request, computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond vLLM's `computed_tokens` the kvd serves."""
        lookup = self._requests.get(request.request_id)
        if isinstance(lookup, PrefixLookup) and self._lookups is not None:
            if not lookup.is_done(self._lookups.clock.now()):
                return None, False
            del self._requests[request.request_id]
            late = lookup.late  # before `take`: the answer may come at any time
            if (found := lookup.take()) is not None:
                self._requests[request.request_id] = DecodeState(lookup.access, found)
            elif late:
                self._count("late_lookups", 1)
        match self._requests.get(request.request_id):
            case PrefillState(ticket_sent=False) as state if state.lease.lost:
                # No worker has the ticket yet, so the prompt need not be computed. vLLM asks again,
                # with the hits of the prompt as it has been cut.
                del self._requests[request.request_id]
                self._refuse(request, _refused("transfer_lost", _KVD_GONE))
                return None, False
            case DecodeState(done=False, lease=None):
                return 1, True  # vLLM fails a request only through a load
            case DecodeState(done=False, lease=lease) if lease is not None:
                reach = lease.tokens
            case PrefillState() as state if (
                state.lease.match_tokens < request.num_prompt_tokens
                and self._can_resume
                and state.access.layout.can_resume_at(state.lease.match_tokens)
            ):
                reach = state.lease.match_tokens
            case _:
                return 0, False
        if reach and reach <= computed_tokens and self.completes_divergent_hits:
            self._reconciling.add(request.request_id)
            return None, False
        self._reconciling.discard(request.request_id)
        more = max(0, reach - computed_tokens)
        return more, more > 0

    def plan_load(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        state = self._requests.get(request.request_id)
        if state is None or isinstance(state, PrefixLookup):
            return
        if external_tokens == 0:
            if isinstance(state, DecodeState) and not state.done and not state.loading:
                _give_back(state)  # vLLM's cache has as many tokens
            return
        state.loading = True
        access = state.access
        if access is None or state.lease is None or state.lease.lost:
            self._orders.failed.append(request.request_id)
            return
        tokens = state.lease.match_tokens if isinstance(state, PrefillState) else state.lease.tokens
        try:
            moves = moves_to_load(
                access.layout, tokens, tokens - external_tokens, blocks.get_block_ids()
            )
            _keep_out(self.manager, access.layout, request.request_id, moves)
        except Exception as error:
            _log_failure(f"request {request.request_id}: cannot load its state", error)
            self._orders.failed.append(request.request_id)
            return
        self._orders.loads.append(
            LoadOrder(request.request_id, state.lease.ticket, moves, access.form)
        )
        self._count("loaded_tokens", external_tokens)

    def take_orders(self, output: SchedulerOutput) -> StepOrders:
        """The workers' orders for this step of the engine."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if isinstance(state, PrefillState) and state.lease.lost and state.problem is None:
                state.problem = Problem("transfer_lost", _KVD_GONE)
            if isinstance(state, PrefillState) and state.problem is None:
                try:
                    tables = output.kv_connector_block_state.get_block_ids(request_id)
                    self._save(request_id, state, computed[request_id], scheduled, tables)
                except Exception as error:
                    _log_failure(f"request {request_id}: cannot save its state", error)
                    state.problem = Problem("engine_failed", str(error))
            elif self._answers is not None:
                start, blocks = computed[request_id], output.kv_connector_block_state
                tables = functools.partial(blocks.get_block_ids, request_id)
                order = self._answers.step(request_id, start, start + scheduled, tables)
                if order is not None:
                    self._orders.boundaries.append(order)
        if self._answers is not None:
            self._answers.add_orders(self._orders)
        orders, self._orders = self._orders, StepOrders()
        orders.computes = bool(output.num_scheduled_tokens)
        return orders

    def take_results(self, output: KVConnectorOutput) -> None:
        """Handles the results of the workers."""
        for request_id in output.finished_sending or ():
            if self._answers is not None:
                self._answers.confirm(request_id)
            self._end(request_id)
        for request_id in output.finished_recving or ():
            state = self._requests.get(request_id)
            if state is None or isinstance(state, PrefixLookup):
                continue
            state.loading = False
            if isinstance(state, DecodeState):
                _give_back(state)
            if state.ended:
                self._end(request_id)

    def finish(
        self, request: Request, tables: BlockTables = ()
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether workers may still use the lease or the blocks, `kv_transfer_params` of the
        response). `tables`: the request's blocks."""
        in_use, params = self._finish(request)
        if self._answers is not None and self._answers.finish(request, tables):
            in_use = True
        return in_use, params

    def _finish(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._reconciling.discard(request_id)
        refusal = self._refusals.pop(request_id, None)
        state = self._requests.get(request_id)
        if state is None:
            return False, refusal
        if isinstance(state, PrefillState) and request.status in _COMPLETE:
            del self._requests[request_id]
            return False, self._commit(state)
        if isinstance(state, PrefixLookup):
            self._end(request_id)
            return False, None
        state.ended = True
        if state.loading:
            return False, None  # vLLM keeps the blocks until the load has ended
        if isinstance(state, PrefillState) and state.ticket_sent:
            # An unfinished step may still be writing: the workers report its end.
            self._orders.ended.append(request_id)
            return True, None
        self._end(request_id)
        return False, None

    def fail(self, request: Request, error: Exception) -> tuple[int | None, bool]:
        """A hook has raised for this request: ends it with an error, and nothing else. Returns what
        `count_loadable_tokens` returns for it from now on."""
        _log_failure(f"request {request.request_id}", error)
        self._reconciling.discard(request.request_id)
        state = self._requests.get(request.request_id)
        if state is not None and (
            getattr(state, "loading", False) or getattr(state, "ticket_sent", False)
        ):
            if isinstance(state, PrefillState):  # a worker uses its pages: its end follows
                state.problem = state.problem or Problem("engine_failed", str(error))
            return 0, False
        self._end(request.request_id)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and not params.get("do_remote_prefill"):
            self._refuse(request, _refused("engine_failed", str(error)))
            return None, False
        self._lost(request, str(error))
        return 1, True

    def close(self) -> None:
        self._forms.close()
        for part in (self._answers, self._lookups):
            if part is not None:
                part.close()

    def take_counts(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return counts if self._answers is None else {**counts, **self._answers.take_counts()}

    # Inside ---------------------------------------------------------------------------------------

    def _begin(self, request: Request, asked: RemoteDecode) -> None:
        if not _is_text(request):
            self._refuse(request, _refused("invalid_request", _NOT_TEXT))
            return
        tokens = asked.handoff_tokens
        try:
            access = self._forms.find(asked.grant.form)
            hashes, tail = names_of(request, tokens, access.layout.block_tokens)
            lease = access.kvd.begin(
                hashes, tokens, checkpoint_tokens=(), grant=asked.grant, tail=tail
            )
        except PrfaasError as error:
            self._refuse(request, _refused("kvd_unavailable", str(error)))
            return
        if isinstance(lease, NotNow):
            answer = _refused("overloaded", lease.reason, lease.retry_after_s)
            self._refuse(request, answer)
            return
        _cut(request, tokens)
        if lease.match_tokens == tokens and _fits(self.manager, tokens + 2):
            _extend(request)
        try:
            progress = PrefillProgress(
                access.layout,
                tokens,
                match_tokens=lease.match_tokens,
                skip_tokens=lease.skip_tokens,
                checkpoint_tokens=lease.checkpoint_tokens,
            )
        except BaseException:
            lease.abort("the prefill could not be planned")
            raise
        self._requests[request.request_id] = PrefillState(access, asked, lease, progress)

    def _attach(self, request: Request, asked: RemotePrefill) -> None:
        if not _is_text(request):
            self._lost(request, _NOT_TEXT)
            return
        try:
            access = self._forms.find(asked.form)
            # vLLM makes `n` requests of one, with the same parameters: each is a lease of its own.
            lease = access.kvd.attach(asked.transfer_id, asked.attachments)
        except PrfaasError as error:
            self._lost(request, str(error))
            return
        try:
            named = names_of(request, lease.tokens, access.layout.block_tokens)
        except BaseException:
            lease.release()
            raise
        held = (lease.ticket.hashes, lease.ticket.tail)
        if lease.tokens >= request.num_prompt_tokens or named != held:
            lease.release(OTHER_PROMPT)  # vLLM's response cannot say it
            what = f"the first {lease.tokens} tokens of another prompt, or all of this one"
            self._lost(request, f"the transfer holds {what}")
            return
        self._requests[request.request_id] = DecodeState(access, lease)
        if self._answers is not None and _has_answer(request):
            self._answers.accept(request, access)

    def _refuse(self, request: Request, answer: dict[str, Any]) -> None:
        message = answer["error"]["message"]
        _LOG.warning("request %s: not handed off: %s", request.request_id, message)
        self._count("refused_handoffs", 1)
        self._refusals[request.request_id] = answer
        _cut(request, 1)

    def _lost(self, request: Request, reason: str) -> None:
        _LOG.warning(
            "request %s: no state to continue from: %s", request.request_id, _plain(reason)
        )
        self._count("lost_transfers", 1)
        self._requests[request.request_id] = DecodeState(None, None)

    def _save(
        self, request_id: str, state: PrefillState, start: int, scheduled: int, tables: Any
    ) -> None:
        if start >= state.progress.tokens:
            return  # a step scheduled before the request's end was known
        stop = start + scheduled
        try:
            moves = state.progress.step(start, stop, tables)
        except PrfaasError as error:
            state.problem = Problem("engine_failed", str(error))
            return
        last = stop >= state.progress.tokens
        if moves or last:
            ticket = None if state.ticket_sent else state.lease.ticket
            form = state.access.form
            state.ticket_sent = True
            self._orders.saves.append(SaveOrder(request_id, ticket, moves, last, form))

    def _commit(self, state: PrefillState) -> dict[str, Any]:
        try:
            if state.problem is not None:
                state.lease.abort(state.problem.message)
                return _refused(*state.problem)
            state.lease.commit()
            if (failure := _failure(state.lease.sent)) is not None:
                # The pool keeps the prefix. The receiver would wait until the grant expires.
                return _refused("transfer_lost", failure)
        except PrfaasError as error:
            return _refused("transfer_lost", str(error))
        except Exception as error:
            _log_failure("a lease could not be committed", error)
            return _refused("engine_failed", str(error))
        self._count("handoffs", 1)
        self._count(f"{state.access.form}_handoffs", 1)
        return encode(
            ResponseParams(
                do_remote_prefill=True,
                transfer_id=state.asked.grant.transfer_id,
                handoff_tokens=state.asked.handoff_tokens,
                form=state.access.form,
            )
        )

    def _end(self, request_id: str) -> None:
        """Ends the lease: no worker uses the request's pages any more."""
        match self._requests.pop(request_id, None):
            case PrefillState() as state:
                try:
                    state.lease.abort("the request was aborted")
                except Exception as error:  # the kvd ends the lease with this process
                    _log_failure(f"request {request_id}: its lease could not be ended", error)
            case DecodeState() as state:
                _give_back(state)
            case PrefixLookup() as lookup:
                lookup.drop()

    def _count(self, what: str, n: int) -> None:
        self._counts[what] = self._counts.get(what, 0) + n


def _give_back(state: DecodeState) -> None:
    state.done = True
    lease, state.lease = state.lease, None
    if lease is not None:
        try:
            lease.release()
        except Exception as error:  # the kvd ends the lease with this process
            _log_failure("a lease could not be released", error)


def _cut(request: Request, tokens: int) -> None:
    """Cuts the prompt to its first `tokens` tokens and the answer to one token, which is not used.
    A linear state is usable at exactly its length, so vLLM must compute nothing beyond a hand-off
    that it saves."""
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[tokens:]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:tokens]
    if request.prompt_is_token_ids is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:tokens]
    del request._all_token_ids[tokens:]
    request.num_prompt_tokens = tokens
    request.max_tokens = 1


def _fits(manager: KVCacheManager | None, tokens: int) -> bool:
    """Whether vLLM runs a request of so many tokens, its answer included."""
    return manager is not None and tokens <= manager.max_model_len


def _extend(request: Request) -> None:
    """Adds a token to the prompt. vLLM must compute one, and the kvd has everything before it: vLLM
    then loads the state and computes nothing else. What comes of the token is not used or saved."""
    for tokens in (request.prompt_token_ids, request._all_token_ids):
        tokens.append(tokens[-1])
    request.num_prompt_tokens += 1


def _keep_out(
    manager: KVCacheManager | None, layout: CacheLayout, request_id: str, moves: Sequence[Move]
) -> None:
    """Window blocks whose first tokens are not loaded must not serve other requests."""
    for move in moves:
        group = layout.groups[move.group]
        if group.kind == "window" and move.start % group.block_tokens:
            if manager is None:
                raise EngineError("vLLM has not passed its cache manager to the connector")
            partial = move.start // group.block_tokens
            keep_out_of_prefix_cache(manager, group.index, request_id, partial + 1)


def _refused(code: str, message: str, retry_after_s: float | None = None) -> dict[str, Any]:
    """vLLM answers with HTTP 200: the error travels in the response's parameters."""
    return encode(prefill_error(code, _plain(message), retry_after_s))


def _is_text(request: Request) -> bool:
    """Whether token ids are the whole prompt. Only then do their hashes name its state."""
    ids, embeds = request.prompt_token_ids, request.prompt_embeds
    return ids is not None and embeds is None and not request.mm_features


def _has_answer(request: Request) -> bool:
    """Whether hashes of token ids name the state of prompt and answer. Not for requests without an
    answer (embeddings), and not for those whose prompt grows while they run."""
    return _is_text(request) and request.sampling_params is not None and not request.resumable


def names_of(
    request: Request, tokens: int, block_tokens: int
) -> tuple[tuple[BlockHash, ...], bytes]:
    """The hashes of the whole blocks of the first `tokens` tokens, and of the tokens after them."""
    ids = (request.prompt_token_ids or [])[:tokens]
    salt, adapter = salt_and_adapter(request)
    hashes = block_hashes(ids, block_tokens, salt=salt, adapter=adapter)
    return tuple(hashes), tail_hash(ids, hashes, block_tokens, salt=salt, adapter=adapter)


def _failure(sent: Future[None]) -> str | None:
    """Why the transfer has failed; None while it may still be committed."""
    error = sent.exception() if sent.done() else None
    return None if error is None else str(error)


def _plain(text: str) -> str:
    """A text that a log line and a response can carry, whatever a client has put into it."""
    return text[:_MAX_MESSAGE].encode("utf-8", "replace").decode()


def _log_failure(what: str, error: Exception) -> None:
    _LOG.error("%s: %s", what, _plain(repr(error)), exc_info=error)
