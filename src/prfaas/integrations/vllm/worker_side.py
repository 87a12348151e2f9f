"""A worker's side: copies finished tokens into kvd pages, and committed pages into blocks.

Blocks are copied out before the step ends, because vLLM may reuse a window's block in the next
step. Where vLLM calls the hook of a layer, its blocks are copied when the layer is done. The blocks
of all other layers (linear layers have no hook) are copied at the end of the step, states last.
On a GPU, copying out means that the gather is queued on the compute stream: threads do the rest,
and the step waits for them only where a request's last token is in it, because the scheduler then
commits. Loads run in a thread, in parallel to the engine's steps. Each worker copies the layers and
heads that it has. Of a request, the worker has only the id.

Whatever fails for one request is logged and stays its own: a segment that was not copied is not
ready, so the kvd refuses the commit; a load that failed is reported as failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prfaas.errors import PrfaasError
from prfaas.integrations.vllm.answers.slots import AnswerSlots, AnswerWriter
from prfaas.integrations.vllm.caches.groups import CacheLayout, Move
from prfaas.integrations.vllm.caches.joint_copies import JointCopies
from prfaas.integrations.vllm.caches.layer_copies import LayerCopies, LayerCopy
from prfaas.integrations.vllm.staged_saves import LayerSave, StagedSaves
from prfaas.integrations.vllm.steps import (
    BoundaryOrder,
    KeepOrder,
    LoadOrder,
    SaveOrder,
    StepOrders,
)
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease

_LOG = logging.getLogger(__name__)


class WorkerResults(NamedTuple):
    ended: set[str]  # requests whose pages this worker no longer uses
    loaded: set[str]  # failed ones included
    failed: set[str]


class WorkerSide:
    def __init__(
        self,
        kvd: KvdClient,
        layout: CacheLayout,
        *,
        keeps_answers: bool = False,
        slots: int = 0,
        on_result: Callable[[], None] = lambda: None,
    ) -> None:
        """`slots`: requests whose states and windows are copied at boundaries, for their
        answers. `on_result` is called, in any thread, when `take_results` has something new."""
        self._kvd = kvd
        self._layout = layout
        self._keeps_answers = keeps_answers
        self._slots = slots
        self._on_result = on_result
        self._answers: AnswerWriter | None = None
        self._boundaries: list[BoundaryOrder] = []  # of this step
        self._keeps: list[tuple[KeepOrder, WriteLease | None]] = []  # of this step
        self._copies: Mapping[str, LayerCopy] = {}
        self._before_loads: Callable[[], None] = lambda: None
        self._joint: JointCopies | None = None
        self._saves: StagedSaves | None = None  # on a GPU
        self._writing: dict[str, WriteLease] = {}
        self._due: dict[str, list[LayerSave]] = {}  # of this step, by layer
        self._flush = False
        self._ended: set[str] = set()  # requests whose end the scheduler's side wants confirmed
        self._counts: dict[str, float] = {}
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prfaas-load")
        self._loading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prfaas-loaded")
        self._lock = threading.Lock()  # guards the results of the loading thread
        self._loaded: set[str] = set()
        self._failed: set[str] = set()

    def set_copies(self, copies: LayerCopies) -> None:
        self._copies, self._before_loads, self._joint = copies
        if self._joint is not None:
            self._joint.warm_up()
            self._saves = StagedSaves(self._joint, lambda n: self._count("saved_bytes", n))
        if self._keeps_answers:
            slots = AnswerSlots(self._layout, self._copies, self._slots) if self._slots else None
            self._answers = AnswerWriter(self._kvd, slots, self._on_result)

    # One step of the engine -----------------------------------------------------------------------

    def begin_step(self, orders: StepOrders) -> None:
        self._due = {}
        if self._saves is not None:
            self._saves.begin_step()
        self._flush = False
        self._ended.update(orders.ended)
        for order in orders.saves:
            try:
                self._plan(order)
            except Exception:  # the commit will report the segments as missing
                _LOG.exception("request %s: cannot save its state", order.request_id)
        self._boundaries = orders.boundaries
        self._keeps = [(order, self._plan_keep(order)) for order in orders.keeps]

    def save_layer(self, layer: str) -> None:
        """The layer is computed, or queued on the current stream."""
        self._save_layer(layer)
        if self._saves is not None:
            self._saves.stage_full()

    def _save_layer(self, layer: str) -> None:
        for save in self._due.pop(layer, ()):
            try:
                copy = self._copies[layer]
                if self._saves is not None:
                    self._saves.add(layer, save, copy.heads)
                    continue
                nbytes = copy.save(save.move, save.lease.buffers(save.segment))
                save.lease.ready(save.segment, copy.heads)
                self._count("saved_bytes", nbytes)
            except Exception:  # the commit will report the segment as missing
                _LOG.exception("cannot save segment %s", save.segment.name)

    def end_step(self) -> None:
        """Copies everything due in this step before it returns, or queues it on the device. What a
        commit needs is in the pages when it returns."""
        for group in sorted(self._layout.groups, key=lambda group: group.kind == "state"):
            for layer, _ in group.layers:
                self._save_layer(layer)
        if self._saves is not None:
            self._saves.stage()
        if self._answers is not None:
            for boundary in self._boundaries:
                self._answers.copy(boundary)
            for keep, lease in self._keeps:
                saves = self._saves.unfinished if self._saves is not None else ()
                self._answers.submit(keep, lease, saves)
        if self._flush:
            try:
                if self._saves is not None:
                    self._saves.wait()
                self._kvd.flush()  # the scheduler commits on another connection
            except Exception as error:
                _LOG.warning("lost saved blocks: %r", error)

    def start_loads(self, orders: StepOrders) -> None:
        with self._lock:
            self._loaded.update(orders.failed)
            self._failed.update(orders.failed)
        if orders.loads:
            self._before_loads()
        for order in orders.loads:
            try:
                self._threads.submit(self._load, order)
            except Exception as error:  # the thread has been shut down
                self._end_load(order, error)

    def settle(self) -> None:
        """Waits for copies into the pages of requests whose end is to be confirmed. EngineError
        when they take too long: the end is then confirmed later."""
        if self._ended and self._saves is not None:
            self._saves.wait()

    def take_results(self, finished: set[str]) -> WorkerResults:
        """`finished` requests have no unfinished step, because steps run in order."""
        for request_id in finished:
            self._writing.pop(request_id, None)
        self.settle()
        ended, self._ended = self._ended, set()
        if self._answers is not None:
            ended |= self._answers.take_ended()
        with self._lock:
            loaded, self._loaded = self._loaded, set()
            failed, self._failed = self._failed, set()
        return WorkerResults(ended, loaded, failed)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        self._loading.shutdown(wait=True)
        if self._answers is not None:
            self._answers.close()
        if self._saves is not None and self._joint is not None:
            self._saves.close()
            self._joint.close()
        self._kvd.close()

    def take_counts(self) -> dict[str, float]:
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    # Inside ---------------------------------------------------------------------------------------

    def _plan(self, order: SaveOrder) -> None:
        if order.ticket is not None:
            self._writing.pop(order.request_id, None)  # never the lease of an older ticket
            try:
                self._writing[order.request_id] = self._kvd.join_write(order.ticket)
            except PrfaasError as error:
                _LOG.warning("request %s: cannot save its state: %s", order.request_id, error)
        lease = self._writing.get(order.request_id)
        if lease is None:
            return  # the commit will report the segment as missing
        self._add(order.moves, lease)
        self._flush |= order.last

    def _plan_keep(self, order: KeepOrder) -> WriteLease | None:
        """None when the answer cannot be kept: the commit will report the segments as missing."""
        try:
            lease = self._kvd.join_write(order.ticket)
            self._add(order.moves, lease)
        except Exception as error:
            _LOG.warning("request %s: its answer is not kept: %s", order.request_id, error)
            return None
        return lease

    def _add(self, moves: Sequence[Move], lease: WriteLease) -> None:
        for move in moves:
            for layer, segment in self._layout.segments(move):
                if self._copies[layer].writes:
                    self._due.setdefault(layer, []).append(LayerSave(lease, segment, move))

    def _load(self, order: LoadOrder) -> None:
        try:
            lease = self._kvd.join_read(order.ticket)
            if self._joint is not None:
                self._load_joint(self._joint, order, lease)
                return
            for move in order.moves:
                for layer, segment in self._layout.segments(move):
                    nbytes = self._copies[layer].load(move, lease.views(segment))
                    self._count("loaded_bytes", nbytes)
        except Exception as error:
            self._end_load(order, error)
        else:
            self._end_load(order, None)

    def _load_joint(self, joint: JointCopies, order: LoadOrder, lease: ReadLease) -> None:
        """Queues the loads; another thread waits for the device, so that the next order's loads
        are queued by then."""
        problem: Exception | None = None
        try:
            for move in order.moves:
                layers = self._layout.segments(move)
                self._count("loaded_bytes", joint.load(move, layers, lease.joint_views))
        except Exception as error:  # the lease must not end before what is queued
            problem = error
        self._loading.submit(self._wait_for_load, joint.queued_loads(), order, problem)

    def _wait_for_load(
        self, wait: Callable[[], None], order: LoadOrder, problem: Exception | None
    ) -> None:
        try:
            wait()
        except Exception as error:
            problem = error
        self._end_load(order, problem)

    def _end_load(self, order: LoadOrder, problem: Exception | None) -> None:
        """vLLM waits for the result of every load, the failed ones included."""
        if problem is not None:
            _LOG.warning("request %s: cannot load its state: %r", order.request_id, problem)
        with self._lock:
            self._loaded.add(order.request_id)
            if problem is not None:
                self._failed.add(order.request_id)
        self._on_result()

    def _count(self, what: str, n: float) -> None:
        with self._lock:
            self._counts[what] = self._counts.get(what, 0) + n
