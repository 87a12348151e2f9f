"""The scheduler's side: holds leases for requests and says which blocks move with each step.

A prefill asks its kvd for room when it arrives; refused, it is cut to one token and answered with
the reason, so that nothing is computed in vain. A decode takes over its committed transfer when it
arrives, and loads it asynchronously: the only kind of load whose failure vLLM can answer. Hooks do
not raise: an exception here would end the engine and with it everybody's requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from prfaas.errors import EngineError, InputError, PrfaasError
from prfaas.integrations.vllm.layout import NativeLayout
from prfaas.integrations.vllm.progress import Saving, loads
from prfaas.integrations.vllm.steps import Load, Save, Steps
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.types import BlockHash, NotNow

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_LOG = logging.getLogger(__name__)
_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True)
class Producing:
    asked: RemoteDecode
    lease: WriteLease
    saving: Saving
    told: bool = False  # the workers have its ticket
    loading: bool = False
    over: bool = False  # the request has ended, a worker may still touch the pages
    problem: str | None = None  # why the transfer cannot be completed


@dataclass(slots=True)
class Consuming:
    lease: ReadLease | None  # None: lost, or loaded and given back
    loading: bool = False
    over: bool = False
    done: bool = False


class SchedulerSide:
    def __init__(self, kvd: KvdClient, layout: NativeLayout) -> None:
        self._kvd = kvd
        self._layout = layout
        self._requests: dict[str, Producing | Consuming] = {}
        self._refusals: dict[str, dict[str, Any]] = {}
        self._steps = Steps()
        kinds = {group.kind for group in layout.groups}
        self._may_diverge = "state" in kinds and "window" not in kinds
        self._reconciling: set[str] = set()
        self._counts: dict[str, float] = {}

    @property
    def completes_divergent_hits(self) -> bool:
        """Whether vLLM may count on attention blocks of its own whose state it has lost, because
        the load brings the state. Not for a request that finds no more at the kvd than that hit:
        it would load nothing, have no state there, and compute again what the kvd has."""
        return self._may_diverge and not self._reconciling

    # A request's life -----------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        try:
            asked = decode(request.kv_transfer_params, request.num_prompt_tokens)
        except InputError as error:
            if (request.kv_transfer_params or {}).get("do_remote_prefill"):
                self._lost(request, str(error))
            else:
                self._refuse(request, _refused("invalid_request", str(error)))
            return
        match asked:
            case RemoteDecode():
                self._begin(request, asked)
            case RemotePrefill():
                self._attach(request, asked)

    def loadable(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond vLLM's own `computed_tokens` the kvd serves."""
        match self._requests.get(request.request_id):
            case Consuming(done=False, lease=None):
                return 1, True  # for an answer, vLLM must believe that there is a load
            case Consuming(done=False, lease=ReadLease() as lease):
                reach = lease.tokens
            case Producing() as job if job.lease.match_tokens < job.saving.tokens:
                reach = job.lease.match_tokens
            case _:  # a prefill that is there whole is computed again: a step must end it
                return 0, False
        if reach and reach <= computed_tokens and self.completes_divergent_hits:
            self._reconciling.add(request.request_id)
            return None, False
        self._reconciling.discard(request.request_id)
        more = max(0, reach - computed_tokens)
        return more, more > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        job = self._requests.get(request.request_id)
        if job is None:
            return
        if external_tokens == 0:
            if isinstance(job, Consuming) and not job.done and not job.loading:
                self._give_back(job)  # vLLM's own cache reaches as far
            return
        job.loading = True
        if job.lease is None:
            self._steps.failed.append(request.request_id)
            return
        tokens = job.lease.match_tokens if isinstance(job, Producing) else job.lease.tokens
        try:
            moves = loads(self._layout, tokens, tokens - external_tokens, blocks.get_block_ids())
        except EngineError as error:
            _LOG.error("%s: cannot be loaded: %s", request.request_id, error)
            self._steps.failed.append(request.request_id)
            return
        self._steps.loads.append(Load(request.request_id, job.lease.ticket, moves))
        self._count("loaded_tokens", external_tokens)

    def steps(self, output: SchedulerOutput) -> Steps:
        """What the workers do with this step of the engine."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            job = self._requests.get(request_id)
            if isinstance(job, Producing) and job.problem is None:
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                self._save(request_id, job, computed[request_id], scheduled, tables)
        steps, self._steps = self._steps, Steps()
        return steps

    def told(self, output: KVConnectorOutput) -> None:
        """What the workers have finished."""
        for request_id in output.finished_sending or ():
            self._end(request_id)
        for request_id in output.finished_recving or ():
            job = self._requests.get(request_id)
            if job is None:
                continue
            job.loading = False
            if isinstance(job, Consuming):
                self._give_back(job)
            if job.over:
                self._end(request_id)

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(whether workers may still touch the lease, parameters for the answer)."""
        request_id = request.request_id
        self._reconciling.discard(request_id)
        refusal = self._refusals.pop(request_id, None)
        job = self._requests.get(request_id)
        if job is None:
            return False, refusal
        if isinstance(job, Producing) and request.status in _COMPLETE:
            del self._requests[request_id]
            return False, self._commit(job)
        job.over = True
        if job.loading:
            return False, None  # vLLM keeps the blocks until the load has reported
        if isinstance(job, Producing) and job.told:
            # An unfinished step may still be writing: the workers say when it is over.
            self._steps.ended.append(request_id)
            return True, None
        self._end(request_id)
        return False, None

    def close(self) -> None:
        self._kvd.close()

    def take_counts(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return counts

    # Inside ---------------------------------------------------------------------------------------

    def _begin(self, request: Request, asked: RemoteDecode) -> None:
        if request.prompt_token_ids is None or request.mm_features:
            self._refuse(request, _refused("invalid_request", "only text is handed off"))
            return
        tokens = asked.handoff_tokens
        _cut(request, tokens)
        try:
            hashes, tail = self._names(request, tokens)
            lease = self._kvd.begin(
                hashes, tokens, checkpoint_tokens=(), grant=asked.grant, tail=tail
            )
        except PrfaasError as error:
            self._refuse(request, _refused("kvd_unavailable", str(error)))
            return
        if isinstance(lease, NotNow):
            answer = _refused("overloaded", lease.reason, lease.retry_after_s)
            self._refuse(request, answer)
            return
        saving = Saving(
            self._layout,
            tokens,
            match_tokens=lease.match_tokens,
            skip_tokens=lease.skip_tokens,
            checkpoint_tokens=lease.checkpoint_tokens,
        )
        self._requests[request.request_id] = Producing(asked, lease, saving)

    def _attach(self, request: Request, asked: RemotePrefill) -> None:
        try:
            lease = self._kvd.attach(asked.transfer_id)
        except PrfaasError as error:
            self._lost(request, str(error))
            return
        held = (lease.ticket.hashes, lease.ticket.tail)
        if lease.tokens >= request.num_prompt_tokens or self._names(request, lease.tokens) != held:
            lease.release()
            what = f"the first {lease.tokens} tokens of another prompt, or all of this one"
            self._lost(request, f"the transfer holds {what}")
            return
        self._requests[request.request_id] = Consuming(lease)

    def _names(self, request: Request, tokens: int) -> tuple[tuple[BlockHash, ...], bytes]:
        """Of the whole blocks of the first `tokens` tokens, and of what lies behind them."""
        ids, block_tokens = (request.prompt_token_ids or [])[:tokens], self._layout.block_tokens
        salt = request.cache_salt or ""
        adapter = request.lora_request.lora_name if request.lora_request else ""
        hashes = block_hashes(ids, block_tokens, salt=salt, adapter=adapter)
        return tuple(hashes), tail_hash(ids, hashes, block_tokens, salt=salt, adapter=adapter)

    def _refuse(self, request: Request, answer: dict[str, Any]) -> None:
        _LOG.warning("%s: not handed off: %s", request.request_id, answer["error"]["message"])
        self._count("refusals", 1)
        self._refusals[request.request_id] = answer
        _cut(request, 1)

    def _lost(self, request: Request, reason: str) -> None:
        _LOG.warning("%s: nothing to continue from: %s", request.request_id, reason)
        self._count("lost", 1)
        self._requests[request.request_id] = Consuming(None)

    def _save(
        self, request_id: str, job: Producing, start: int, scheduled: int, tables: Any
    ) -> None:
        if start >= job.saving.tokens:
            return  # a step scheduled ahead of the answer that ends the request
        stop = start + scheduled
        try:
            moves = job.saving.step(start, stop, tables)
        except PrfaasError as error:
            job.problem = str(error)
            return
        last = stop >= job.saving.tokens
        if moves or last:
            ticket = None if job.told else job.lease.ticket
            job.told = True
            self._steps.saves.append(Save(request_id, ticket, moves, last))

    def _commit(self, job: Producing) -> dict[str, Any]:
        try:
            if job.problem is not None:
                job.lease.abort(job.problem)
                return _refused("engine_failed", job.problem)
            job.lease.commit()
        except PrfaasError as error:
            return _refused("transfer_lost", str(error))
        self._count("handoffs", 1)
        return encode(
            ResponseParams(
                do_remote_prefill=True,
                transfer_id=job.asked.grant.transfer_id,
                handoff_tokens=job.asked.handoff_tokens,
            )
        )

    def _end(self, request_id: str) -> None:
        """Nobody touches the request's pages any more."""
        match self._requests.pop(request_id, None):
            case Producing() as job:
                job.lease.abort("the request was aborted")
            case Consuming() as job:
                self._give_back(job)

    def _give_back(self, job: Consuming) -> None:
        job.done = True
        if job.lease is not None:
            job.lease.release()
            job.lease = None

    def _count(self, what: str, n: int) -> None:
        self._counts[what] = self._counts.get(what, 0) + n


def _cut(request: Request, tokens: int) -> None:
    """The prompt's first `tokens` tokens, and one token of answer, which nobody reads: a linear
    state is usable at exactly its own length, so nothing may be computed beyond the hand-off."""
    assert request.prompt_token_ids is not None
    del request.prompt_token_ids[tokens:]
    del request._all_token_ids[tokens:]
    request.num_prompt_tokens = tokens
    request.max_tokens = 1


def _refused(code: str, message: str, retry_after_s: float | None = None) -> dict[str, Any]:
    """vLLM answers with HTTP 200: the error travels in the response's parameters."""
    return encode(prefill_error(code, message, retry_after_s))
