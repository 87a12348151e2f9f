"""The scheduler's side of keeping answers: requests, slots and leases.

    step       a request reaches a boundary: the workers copy its states to a slot
    finish     the request has ended: vLLM holds its blocks, a thread asks the kvd for a lease
    add_orders the lease is there: the workers write attention from the blocks, states from the slot
    confirm    all workers have confirmed: vLLM frees the blocks, the thread commits

The scheduler never waits for the kvd here. A lease that does not come in time, and whatever else
fails, costs the answer and nothing else: no request ends with an error because of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from prfaas.cache.hashing import block_hashes
from prfaas.clock import Clock, MonotonicClock
from prfaas.errors import PrfaasError
from prfaas.integrations.vllm.answers.boundaries import Boundaries, count_slots, needs_slots
from prfaas.integrations.vllm.answers.lookups import salt_and_adapter
from prfaas.integrations.vllm.caches.groups import BlockTables, Move
from prfaas.integrations.vllm.form_access import FormAccess, FormAccesses
from prfaas.integrations.vllm.steps import BoundaryOrder, KeepOrder, StepOrders
from prfaas.kvd.engine_socket.leases import WriteLease
from prfaas.types import Form, NotNow

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LOG = logging.getLogger(__name__)
MAX_ENDING = 16  # answers that wait to be written. Further ones are not kept
LEASE_S = 10.0  # for which vLLM holds the blocks of an ended request until the kvd has answered
_ENDED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,
)


@dataclass(slots=True)
class _Running:
    access: FormAccess
    boundaries: Boundaries
    slot: int | None = None


@dataclass(slots=True)
class _Ending:
    running: _Running
    length: int
    copied: tuple[Move, ...]
    tables: BlockTables
    lease: Future[WriteLease | None]
    until_s: float
    ordered: bool = False  # the workers have an order that confirms the end
    abandoned: bool = False


class AnswerKeeper:
    def __init__(self, forms: FormAccesses, max_requests: int, clock: Clock | None = None) -> None:
        """`max_requests`: that vLLM runs at once."""
        self._clock = clock or MonotonicClock()
        self._free: dict[Form, list[int]] = {}
        for access in forms:
            slots = count_slots(access.layout, max_requests)
            self._free[access.form] = list(range(slots))
            if needs_slots(access.layout) and slots < max_requests:
                _LOG.warning(
                    "answers in the %s form are kept for %d of %d requests at a time: their "
                    "states need much memory",
                    *(access.form, slots, max_requests),
                )
        self._running: dict[str, _Running] = {}
        self._ending: dict[str, _Ending] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-answers")
        self._lock = threading.Lock()  # guards the counts
        self._counts = {"kept_answers": 0, "unkept_answers": 0}

    # Hooks, in the order of a request. None of them raises. ---------------------------------------

    def accept(self, request: Request, access: FormAccess) -> None:
        """From now on the request's answer is kept, in this form."""
        boundaries = Boundaries(access.layout, request.num_prompt_tokens)
        self._running[request.request_id] = _Running(access, boundaries)

    def step(
        self, request_id: str, start: int, stop: int, tables: Callable[[], BlockTables]
    ) -> BoundaryOrder | None:
        """The step that computes these tokens of the request is scheduled."""
        running = self._running.get(request_id)
        if running is None:
            return None
        try:
            return self._copy(running, tables) if running.boundaries.step(start, stop) else None
        except Exception as error:
            _LOG.warning("request %s: its answer is not kept: %r", request_id, error)
            running.boundaries.lost = True
            return None

    def finish(self, request: Request, tables: BlockTables) -> bool:
        """Whether vLLM must hold the request's blocks until the workers have confirmed its end."""
        running = self._running.pop(request.request_id, None)
        if running is None:
            return False
        try:
            if self._begin(request, running, tables):
                return True
        except Exception as error:
            _LOG.warning("request %s: its answer is not kept: %r", request.request_id, error)
        self._give_back(running)
        return False

    def add_orders(self, orders: StepOrders) -> None:
        for request_id, ending in self._ending.items():
            if ending.ordered:
                continue
            if ending.lease.done():
                ending.ordered = True
                try:
                    orders.keeps.append(_order(request_id, ending))
                except Exception as error:
                    _LOG.info("request %s: its answer is not kept: %s", request_id, error)
                    orders.ended.append(request_id)
            elif self._clock.now() > ending.until_s:
                _LOG.warning("request %s: its answer is not kept: no answer of the kvd", request_id)
                ending.ordered = ending.abandoned = True
                orders.ended.append(request_id)

    def confirm(self, request_id: str) -> None:
        """No worker uses the request's blocks, its slot and its lease any more."""
        ending = self._ending.pop(request_id, None)
        if ending is None:
            return
        self._give_back(ending.running)
        try:
            self._thread.submit(self._end, request_id, ending)
        except RuntimeError:
            pass  # the engine is shutting down: the kvd ends the lease with this process

    def close(self) -> None:
        """After the kvd's clients: pending calls have failed by then."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take_counts(self) -> dict[str, float]:
        with self._lock:
            counts = {name: float(n) for name, n in self._counts.items() if n}
            self._counts = dict.fromkeys(self._counts, 0)
        return counts

    # Inside ---------------------------------------------------------------------------------------

    def _copy(self, running: _Running, tables: Callable[[], BlockTables]) -> BoundaryOrder | None:
        access = running.access
        if not needs_slots(access.layout):
            return None
        if running.slot is None:
            free = self._free[access.form]
            if not free:
                return None  # there may be one at the next boundary
            running.slot = free.pop()
        return BoundaryOrder(running.slot, running.boundaries.copy(tables()), access.form)

    def _begin(self, request: Request, running: _Running, tables: BlockTables) -> bool:
        length, copied = running.boundaries.last(request.num_tokens)
        if not length or request.status not in _ENDED:
            return False
        if len(self._ending) >= MAX_ENDING:
            self._count("unkept_answers")
            return False
        tokens = request._all_token_ids[:length]
        names = salt_and_adapter(request)
        lease = self._thread.submit(self._lease, running.access, tokens, *names)
        until_s = self._clock.now() + LEASE_S
        self._ending[request.request_id] = _Ending(running, length, copied, tables, lease, until_s)
        return True

    def _lease(
        self, access: FormAccess, tokens: list[int], salt: str, adapter: str
    ) -> WriteLease | None:
        """In the thread. None when the pool does not take the answer, or has it already."""
        try:
            hashes = block_hashes(tokens, access.kvd.block_tokens, salt=salt, adapter=adapter)
            lease = access.kvd.begin_answer(hashes, len(tokens), first_token=0)
            if isinstance(lease, NotNow):
                _LOG.info("an answer was not kept: %s", lease.reason)
                self._count("unkept_answers")
                return None
            if lease.match_tokens < len(tokens):
                return lease
            lease.abort("the pool has the answer")
        except Exception as error:
            _log_unkept(error)
            self._count("unkept_answers")
        return None

    def _end(self, request_id: str, ending: _Ending) -> None:
        """In the thread."""
        lease = ending.lease.result()  # done: the thread has run it before
        if lease is None:
            return
        try:
            if ending.abandoned:
                lease.abort("the kvd has answered too late")
            else:
                lease.commit()
        except Exception as error:
            _log_unkept(error)
            self._count("unkept_answers")
        else:
            self._count("unkept_answers" if ending.abandoned else "kept_answers")

    def _give_back(self, running: _Running) -> None:
        if running.slot is not None:
            self._free[running.access.form].append(running.slot)
            running.slot = None

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _order(request_id: str, ending: _Ending) -> KeepOrder:
    """EngineError when vLLM has freed a block that is to be written."""
    lease, running = ending.lease.result(), ending.running
    if lease is None:
        raise PrfaasError("the kvd has no pages for it")
    moves = running.boundaries.attention(ending.length, dict(lease.skip_tokens), ending.tables)
    form = running.access.form
    return KeepOrder(request_id, lease.ticket, moves, running.slot, ending.copied, form)


def _log_unkept(error: Exception) -> None:
    if isinstance(error, PrfaasError):
        _LOG.info("an answer was not kept: %s", error)
    else:
        _LOG.error("an answer was not kept: %r", error, exc_info=error)
