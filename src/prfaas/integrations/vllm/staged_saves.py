"""Saves from a GPU: staged in the hooks of layers, finished in threads.

The thread that launches the model only queues gathers, for several layers with one launch. What it
queues next on the same stream may overwrite the blocks. One thread queues the copies into pages,
another one waits for the device and reports the segments as ready.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from prfaas.errors import EngineError
from prfaas.integrations.vllm.caches.groups import Move
from prfaas.integrations.vllm.caches.joint_copies import JointCopies, LayerSegment, StagedLayers
from prfaas.kvd.engine_socket.leases import WriteLease
from prfaas.kvspec import Segment

_LOG = logging.getLogger(__name__)
_FIRST_SHARE = 4
TIMEOUT_S = 120.0


class LayerSave(NamedTuple):
    """One layer's share of a save."""

    lease: WriteLease
    segment: Segment
    move: Move


class _Batch:
    """Layers of one move of one lease, until all of their pieces are in place."""

    def __init__(self, save: LayerSave, rows: int) -> None:
        self.lease = save.lease
        self.move = save.move
        self.rows = rows
        self.layers: list[LayerSegment] = []
        self.heads: list[range | None] = []  # by layer: those that this worker writes
        self._done: dict[int, int] = {}  # by layer: rows that are in place
        self._lock = threading.Lock()

    def finish(self, staged: StagedLayers) -> int:
        """Waits for a piece, and reports the segments that are complete with it."""
        written = staged.piece.end()
        rows = staged.piece.piece.rows // len(staged.segments)
        complete: set[int] = set()
        with self._lock:
            for segment in staged.segments:
                done = self._done[segment.layer] = self._done.get(segment.layer, 0) + rows
                if done == self.rows:
                    complete.add(segment.layer)
        for (_, segment), heads in zip(self.layers, self.heads, strict=True):
            if segment.layer in complete:
                self.lease.ready(segment, heads)
        return written


class StagedSaves:
    """Used by the thread that launches the model alone."""

    def __init__(
        self, copies: JointCopies, count: Callable[[int], None], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`count` receives the bytes of every finished copy, in any thread."""
        self._copies = copies
        self._count = count
        self._timeout_s = timeout_s
        self._pending: dict[int, _Batch] = {}  # by move
        self._pending_bytes = 0
        self._layer_bytes = 0  # of the last one
        self._staged_in_step = False
        self._queueing = ThreadPoolExecutor(1, thread_name_prefix="prfaas-save")
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="prfaas-saved")
        self._ends: list[Future[None]] = []  # of pieces

    def begin_step(self) -> None:
        """What an earlier step has added but not staged is left: its blocks have other owners."""
        self._pending, self._pending_bytes = {}, 0
        self._staged_in_step = False

    def add(self, layer: str, save: LayerSave, heads: range | None) -> None:
        """The layer is computed, or queued on the current stream."""
        key = id(save.move)  # the batch keeps the object
        batch = self._pending.get(key)
        if batch is None:
            batch = self._pending[key] = _Batch(save, self._copies.rows(layer, save.move))
        batch.layers.append((layer, save.segment))
        batch.heads.append(heads)
        self._layer_bytes = batch.rows * self._copies.row_bytes(layer)
        self._pending_bytes += self._layer_bytes

    def stage_full(self) -> None:
        """As `stage`, once another layer would be too much for one piece. Less is enough for the
        first time of a step, so that the bus is busy soon."""
        share = 1 if self._staged_in_step else _FIRST_SHARE
        if (self._pending_bytes + self._layer_bytes) * share > self._copies.batch_bytes:
            self._staged_in_step = True
            self.stage()

    def stage(self) -> None:
        """Queues the gathers of everything that was added. Waits only where staging is full."""
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        self._ends = [end for end in self._ends if not end.done()]
        for batch in pending.values():
            try:
                for staged in self._copies.stage(batch.move, batch.layers):
                    self._submit(batch, staged)
            except Exception:  # the commit will report the segments as missing
                first = batch.layers[0][1].name
                _LOG.exception("cannot save %d segments from %s on", len(batch.layers), first)
        if pending:
            # The thread that queues copies begins now, and not when the interpreter next switches
            # threads, which takes 5 ms: a tenth of what a step's copies take.
            time.sleep(0)

    @property
    def unfinished(self) -> Sequence[Future[None]]:
        """The copies that have begun and may not have ended."""
        return tuple(self._ends)

    def wait(self) -> None:
        """Returns when every copy has ended. EngineError after the timeout."""
        self._ends = list(wait(self._ends, self._timeout_s).not_done)
        if self._ends:
            raise EngineError(f"copies from the device have not ended within {self._timeout_s} s")

    def close(self) -> None:
        """Returns when every copy has ended, which the device bounds."""
        self._queueing.shutdown(wait=True)
        self._waiting.shutdown(wait=True)

    def _submit(self, batch: _Batch, staged: StagedLayers) -> None:
        end: Future[None] = Future()
        try:
            self._queueing.submit(self._begin, batch, staged, end)
        except BaseException:  # the thread has been shut down
            staged.piece.discard()
            raise
        self._ends.append(end)

    def _begin(self, batch: _Batch, staged: StagedLayers, end: Future[None]) -> None:
        try:
            staged.begin(batch.lease.joint_buffers)
            self._waiting.submit(self._finish, batch, staged, end)
        except Exception:
            self._fail(staged)
            end.set_result(None)

    def _finish(self, batch: _Batch, staged: StagedLayers, end: Future[None]) -> None:
        try:
            self._count(batch.finish(staged))
        except Exception:
            self._fail(staged)
        finally:
            end.set_result(None)

    def _fail(self, staged: StagedLayers) -> None:
        """The commit will report the segments as missing."""
        staged.piece.discard()
        first = staged.segments[0].name
        _LOG.exception("cannot save %d segments from %s on", len(staged.segments), first)
