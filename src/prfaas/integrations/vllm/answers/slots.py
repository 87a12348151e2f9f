"""A worker's part in keeping answers: slots for running requests, and the writes of ended ones.

A slot holds the states and windows of a running request at its last boundary, on the host. A copy
is one of vLLM's blocks as it is, so that it costs the step no conversion. On a GPU it is queued on
the compute stream, into pinned memory: what the stream does next may change the blocks. When the
answer has ended, a thread converts the copies and writes them to the pages of its lease. Whatever
fails is logged: the segments are then not ready, the kvd refuses the commit, and nothing is kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from prfaas.errors import EngineError
from prfaas.integrations.vllm.answers.boundaries import slot_blocks
from prfaas.integrations.vllm.caches.groups import CacheLayout, Move
from prfaas.integrations.vllm.caches.layer_copies import LayerCopy
from prfaas.integrations.vllm.staged_saves import TIMEOUT_S
from prfaas.integrations.vllm.steps import BoundaryOrder, KeepOrder
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import WriteLease

_LOG = logging.getLogger(__name__)


class AnswerSlots:
    def __init__(self, layout: CacheLayout, copies: Mapping[str, LayerCopy], slots: int) -> None:
        self._layout = layout
        self._copies = copies
        self._kept: dict[str, tuple[torch.Tensor, ...]] = {}
        self._of_slots: dict[str, LayerCopy] = {}
        self._lengths: dict[int, int] = {}  # by slot: tokens of the request in the latest copy
        self._copied: dict[int, torch.cuda.Event] = {}  # by slot, on a GPU
        for group in layout.groups:
            if group.kind == "full":
                continue
            for name, _ in group.layers:
                if copies[name].writes:
                    blocks = slots * slot_blocks(layout, group)
                    self._kept[name] = tuple(
                        _host_blocks(one, blocks) for one in copies[name].blocks
                    )
                    self._of_slots[name] = copies[name].of_blocks(self._kept[name])

    def copy(self, order: BoundaryOrder) -> None:
        """Takes the blocks of the order. Only for the thread that launches the model."""
        self._lengths.pop(order.slot, None)  # it may fail half-way
        device: torch.device | None = None
        for move in order.moves:
            places = self._move(order.slot, move).block_ids
            for name, _ in self._layout.groups[move.group].layers:
                if name not in self._kept:
                    continue
                for kept, blocks in zip(self._kept[name], self._copies[name].blocks, strict=True):
                    for place, block in zip(places, move.block_ids, strict=True):
                        kept[place].copy_(blocks[block], non_blocking=True)
                    device = blocks.device
        if device is not None and device.type == "cuda":
            self._copied[order.slot] = torch.cuda.Event()
            self._copied[order.slot].record(torch.cuda.current_stream(device))
        self._lengths[order.slot] = order.moves[0].stop

    def write(self, slot: int, moves: Sequence[Move], lease: WriteLease) -> None:
        """Writes the latest copy to the pages, in any thread. EngineError when it is not the one
        that the moves describe."""
        event = self._copied.get(slot)
        if event is not None:
            event.synchronize()
        for move in moves:
            if self._lengths.get(slot) != move.stop:
                raise EngineError(f"the state after {move.stop} tokens was not copied")
            for name, segment in self._layout.segments(move):
                copy = self._of_slots.get(name)
                if copy is not None:
                    copy.save(self._move(slot, move), lease.buffers(segment))
                    lease.ready(segment, copy.heads)

    def _move(self, slot: int, move: Move) -> Move:
        """The same tokens in the slot's blocks."""
        count = slot_blocks(self._layout, self._layout.groups[move.group])
        places = range(slot * count, slot * count + len(move.block_ids))
        if len(places) > count:
            raise EngineError(f"{len(places)} blocks do not fit into a slot of {count}")
        return move._replace(block_ids=tuple(places))


class AnswerWriter:
    """Finishes the writes of answers in a thread, and says which requests have ended."""

    def __init__(
        self, kvd: KvdClient, slots: AnswerSlots | None, on_end: Callable[[], None]
    ) -> None:
        """`on_end` is called, in any thread, when a request has ended."""
        self._kvd = kvd
        self._slots = slots
        self._on_end = on_end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-answers")
        self._lock = threading.Lock()
        self._ended: set[str] = set()

    def copy(self, order: BoundaryOrder) -> None:
        """As `AnswerSlots.copy`, but never raises."""
        try:
            if self._slots is not None:
                self._slots.copy(order)
        except Exception:
            _LOG.exception("the states of a running request were not copied")

    def submit(
        self, order: KeepOrder, lease: WriteLease | None, saves: Sequence[Future[None]]
    ) -> None:
        """`saves`: copies of attention to the lease that have begun. None: it could not be
        joined."""
        try:
            self._thread.submit(self._finish, order, lease, saves)
        except Exception:  # the thread has been shut down
            _LOG.exception("request %s: its answer was not kept", order.request_id)
            self._end(order.request_id)

    def take_ended(self) -> set[str]:
        with self._lock:
            ended, self._ended = self._ended, set()
        return ended

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _finish(
        self, order: KeepOrder, lease: WriteLease | None, saves: Sequence[Future[None]]
    ) -> None:
        try:
            if lease is not None and self._slots is not None and order.slot is not None:
                self._slots.write(order.slot, order.copied, lease)
        except Exception:
            _LOG.exception("request %s: its answer was not kept", order.request_id)
        if wait(saves, TIMEOUT_S).not_done:
            # The device still writes to the lease's pages, so the lease must not end.
            _LOG.error("request %s: copies from the device do not end", order.request_id)
            return
        try:
            if lease is not None:
                self._kvd.flush()  # the scheduler commits on another connection
        except Exception as error:
            _LOG.warning("request %s: its answer was not kept: %r", order.request_id, error)
        self._end(order.request_id)

    def _end(self, request_id: str) -> None:
        with self._lock:
            self._ended.add(request_id)
        self._on_end()


def _host_blocks(blocks: torch.Tensor, count: int) -> torch.Tensor:
    shape = (count, *blocks.shape[1:])
    return torch.empty(shape, dtype=blocks.dtype, pin_memory=blocks.is_cuda)
