"""Exports state during the forward pass: a cache that writes each layer's segment to a sink as soon
as the layer has updated it (paper, section 3.3: layer-wise pipelining).

On a CPU the segment is copied straight into the sink's pages. On CUDA the compute stream packs it
into staging and goes on; a thread asks the sink for the pages, queues the copy into them on a side
stream, and reports the segment when the device is done. The thread that launches kernels waits only
where staging is full:

    launching thread   pack ──► pack ──► pack ──► ...
    the writer's              └► pages, begin copy ──► wait for the copy ──► ready

Segments that become ready while earlier ones are copied are copied together: a copy of a few
megabytes takes less time than the steps around it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from transformers import DynamicCache

from prfaas.device import StagingRing
from prfaas.device.page_pins import Pages, join_pages
from prfaas.device.row_pages import page_range, whole_rows
from prfaas.device.staging import Chunk
from prfaas.engine.api import Export
from prfaas.engine.chunks import ExportPlan
from prfaas.engine.hf import rows
from prfaas.engine.hf.load import LoadedModel
from prfaas.errors import EngineError
from prfaas.kvspec import LinearState, Segment, SegmentSink, SlidingWindow, segment_bytes
from prfaas.kvspec.mapped import MappedRanges, MappedSink

_LOG = logging.getLogger(__name__)
MAX_WAITING = 256  # pieces in staging whose pages are not known yet
MAX_FLYING = 4  # copies that are queued on the device; they keep the bus busy
BATCH_BYTES = 64 << 20  # of segments that are copied together
# A segment waits for the next ones while there are few bytes and little time has passed: a copy
# costs the launching thread and the writer's thread as much as several megabytes.
HOLD_BYTES, HOLD_S = 16 << 20, 1e-3
IDLE_S = 60.0


class SegmentWriter(Protocol):
    def write(self, segment: Segment, parts: rows.Rows) -> None:
        """Copies the bytes now or in a later call; the tensors may change after `flush`."""

    def flush(self) -> None:
        """What was written so far is copied, and on its way to the sink."""

    def finish(self) -> None:
        """Returns when everything is ready at the sink; raises what the sink raised."""

    def abort(self) -> None:
        """Returns when the sink's memory will not be touched again."""


class HostWriter:
    def __init__(self, sink: SegmentSink) -> None:
        self._sink = sink

    def write(self, segment: Segment, parts: rows.Rows) -> None:
        rows.write(parts, self._sink.buffers(segment))
        self._sink.ready(segment)

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


class _Held(NamedTuple):
    """A segment that is not copied yet."""

    segment: Segment
    parts: rows.Rows
    row_count: int
    width: int  # bytes of a row


class _Part(NamedTuple):
    """Some rows of a segment."""

    segment: Segment
    place: range  # its bytes of the segment
    is_last: bool


class _Piece(NamedTuple):
    """What is copied together, in staging."""

    parts: Sequence[_Part]
    chunk: Chunk


class StagedWriter:
    """Writes one job's segments through the engine's staging.

    A sink may be slow: its calls make the launching thread wait for at most the ring's timeout in
    all, after which the job fails. A sink that does not return from a call does not keep staging.
    """

    def __init__(self, sink: SegmentSink, ring: StagingRing) -> None:
        self._sink = sink
        self._mapped = sink if isinstance(sink, MappedSink) else None
        self._ring = ring
        self._patience_s = ring.timeout_s
        self._changed = threading.Condition()  # protects the fields below
        self._waiting: deque[_Piece] = deque()
        self._flying: deque[_Piece] = deque()
        self._owed = 0  # pieces that are not ready at the sink
        self._spent_s = 0.0  # in calls of the sink that have returned
        self._called_s: float | None = None  # since when the sink has been in a call
        self._error: BaseException | None = None
        self._closed = False  # no piece will be added
        # Held by the thread while it touches pages. It asks for the flag after it has the lock.
        self._touching = threading.Lock()
        self._aborted = False
        self._asked: tuple[Segment, Pages] | None = None  # the latest answer of the sink
        # Of the launching thread: segments that are not on their way yet.
        self._batch_bytes = min(BATCH_BYTES, ring.chunk_bytes)
        self._held: list[_Held] = []
        self._held_bytes = 0
        self._held_since_s = 0.0
        self._thread = threading.Thread(target=self._carry, name="prfaas-export", daemon=True)
        self._thread.start()

    # The launching thread -------------------------------------------------------------------------

    def write(self, segment: Segment, parts: rows.Rows) -> None:
        count, width = len(parts[0]), rows.row_bytes(parts)
        if count * width <= self._batch_bytes:
            self._hold(_Held(segment, parts, count, width))
            return
        self.flush()  # a large row may need all of staging
        step = max(1, self._ring.chunk_bytes // width)
        for first in range(0, count, step):
            last = min(first + step, count)
            some = tuple(part[first:last] for part in parts)
            chunk = self._staged(some, last - first, width)
            place = range(first * width, last * width)
            self._send(_Piece((_Part(segment, place, last == count),), chunk))

    def flush(self) -> None:
        held, nbytes = self._held, self._held_bytes
        self._held, self._held_bytes = [], 0
        if not held:
            return
        self._wait(lambda: len(self._waiting) < MAX_WAITING, "take state")

        def fill(flat: torch.Tensor) -> None:
            rows.fill_all(flat, [(one.parts, one.row_count * one.width) for one in held])

        with self._waiting_counted():
            chunk = self._ring.copy_out(whole_rows(nbytes), 1, fill, self._patience_s)
        parts = [_Part(one.segment, range(one.row_count * one.width), is_last=True) for one in held]
        self._send(_Piece(parts, chunk))

    def finish(self) -> None:
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wait(lambda: not self._owed, "take the last state")
        self._thread.join(self._patience_s)

    def abort(self) -> None:
        self._aborted = True  # no further copy begins
        with self._touching:  # the one under way ends
            pass
        self._held, self._held_bytes = [], 0
        self._drop_all()
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            _LOG.warning("a sink has not returned from a call; its job has ended")

    def _drop_all(self) -> None:
        with self._changed:
            self._closed = True
            left = [*self._flying, *self._waiting]
            self._flying.clear()
            self._waiting.clear()
            self._changed.notify_all()
        for piece in left:
            self._ring.drop(piece.chunk)  # waits for the device

    def _hold(self, held: _Held) -> None:
        """With segments that are copied together. They are on their way soon while nothing else
        is."""
        nbytes = held.row_count * held.width
        # Bytes that begin at any place would be packed one by one.
        if self._held_bytes + nbytes > self._batch_bytes or self._held_bytes % rows.WIDEST:
            self.flush()
        if not self._held:
            self._held_since_s = time.monotonic()
        self._held.append(held)
        self._held_bytes += nbytes
        if self._held_bytes < HOLD_BYTES and time.monotonic() - self._held_since_s < HOLD_S:
            return
        with self._changed:
            is_idle = not self._waiting and not self._flying
        if is_idle:
            self.flush()

    def _send(self, piece: _Piece) -> None:
        with self._changed:
            if self._error is None:
                self._waiting.append(piece)
                self._owed += 1
                self._changed.notify_all()
                return
        self._ring.drop(piece.chunk)  # the writer's thread has ended
        self._wait(lambda: True, "take state")

    def _staged(self, parts: rows.Rows, count: int, width: int) -> Chunk:
        self._wait(lambda: len(self._waiting) < MAX_WAITING, "take state")

        def fill(flat: torch.Tensor) -> None:
            rows.fill(flat.view(count, width), parts)

        with self._waiting_counted():
            return self._ring.copy_out(whole_rows(width), count, fill, self._patience_s)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        with self._waiting_counted(), self._changed:
            in_time = self._changed.wait_for(
                lambda: self._error is not None or done(), self._patience_s
            )
            error = self._error
        if error is not None:
            raise EngineError(f"the sink failed: {error}") from error
        if not in_time:
            raise EngineError(f"the sink did not {what} within {self._ring.timeout_s:g} s")

    @contextmanager
    def _waiting_counted(self) -> Iterator[None]:
        """Only the sink's share counts: staging is also full while the device computes."""
        before_s, begin_s = self._sink_s(), time.monotonic()
        try:
            yield
        finally:
            waited_s = min(time.monotonic() - begin_s, self._sink_s() - before_s)
            self._patience_s = max(0.0, self._patience_s - waited_s)

    def _sink_s(self) -> float:
        with self._changed:
            now_s = time.monotonic()
            return self._spent_s + (now_s - self._called_s if self._called_s is not None else 0.0)

    # The writer's thread --------------------------------------------------------------------------

    def _carry(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
        except BaseException as error:  # of the caller's sink; it fails this job only
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._drop_all()  # the launching thread may wait for staging

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._aborted:
                if self._waiting and len(self._flying) < MAX_FLYING:
                    return self._begin
                if self._flying:
                    return self._end
                if self._closed:
                    return None
                self._changed.wait(IDLE_S)
        return None

    def _begin(self) -> None:
        """The piece stays in its queue until its copy has begun, so that `abort` finds it."""
        with self._changed:
            if not self._waiting:
                return
            piece = self._waiting[0]
        with self._calling():
            pages = join_pages([self._pages(part) for part in piece.parts])
        with self._touching:
            if self._aborted:
                return
            with self._changed:
                self._waiting.popleft()
            flying = piece._replace(chunk=self._ring.begin_write(piece.chunk, pages))
            with self._changed:
                self._flying.append(flying)
                self._changed.notify_all()

    def _end(self) -> None:
        with self._touching:
            if self._aborted:
                return
            with self._changed:
                piece = self._flying[0]
            try:
                self._ring.end_write(piece.chunk)  # releases the chunk in any case
            finally:
                with self._changed:
                    self._flying.popleft()
        with self._calling():
            for part in piece.parts:
                if part.is_last:
                    self._sink.ready(part.segment)
        with self._changed:
            self._owed -= 1
            self._changed.notify_all()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self._changed:
            begin_s = self._called_s = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._called_s = None
                self._spent_s += time.monotonic() - begin_s

    def _pages(self, part: _Part) -> Pages:
        """A segment's pages are asked for once, as numbers where the sink has them."""
        if self._asked is None or self._asked[0] != part.segment:
            if self._mapped is not None:
                self._asked = part.segment, self._mapped.mapped_buffers(part.segment)
            else:
                self._asked = part.segment, self._sink.buffers(part.segment)
        pages, place = self._asked[1], part.place
        if place.start == 0 and part.is_last:
            return pages
        if isinstance(pages, MappedRanges):
            return pages.part(place.start, place.stop)
        return page_range(pages, place.start, place.stop)


class ExportingCache(DynamicCache):
    """A sequence's cache during prefill. Call `begin` before each chunk and `end` after it."""

    layers: list[Any]

    def __init__(
        self, loaded: LoadedModel, export: Export | None, ring: StagingRing | None
    ) -> None:
        """Without staging, the model is on a CPU."""
        super().__init__(config=loaded.model.config)
        self.exported_bytes = 0
        self._spec, self._shapes = loaded.spec, loaded.shapes
        self._plan = ExportPlan(loaded.spec, export) if export is not None else None
        self._writer: SegmentWriter | None = None
        if export is not None:
            self._writer = (
                HostWriter(export.sink) if ring is None else StagedWriter(export.sink, ring)
            )
        self._start = self._stop = 0
        self._states_owed: set[int] = set()

    def begin(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._states_owed = {n for n, shape in self._shapes.items() if shape.state is not None}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kw: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        everything: tuple[torch.Tensor, torch.Tensor]
        everything = super().update(key_states, value_states, layer_idx, *args, **kw)
        if self._plan is not None:
            for segment in self._plan.growing(layer_idx, self._start, self._stop):
                at = slice(segment.start - self._start, segment.stop - self._start)
                self._write(segment, rows.token_rows(key_states[:, :, at], value_states[:, :, at]))
        self._write_window(layer_idx)
        return everything

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> torch.Tensor:
        state: torch.Tensor
        state = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kw)
        self._write_state(layer_idx)
        return state

    def end(self) -> None:
        """Writes the states that layers updated in place, without calling `update`."""
        for layer in tuple(self._states_owed):
            self._write_state(layer)
        if self._writer is not None:
            self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.finish()

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _write_window(self, layer_idx: int) -> None:
        layer = self.layers[layer_idx]
        for segment in self._closing(layer_idx, SlidingWindow):
            kept = segment.stop - segment.start
            keys, values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]
            self._write(segment, rows.token_rows(keys, values))

    def _write_state(self, layer_idx: int) -> None:
        shape = self._shapes[layer_idx].state
        assert shape is not None
        for segment in self._closing(layer_idx, LinearState):
            layer = self.layers[layer_idx]
            conv = layer.conv_states[0] if shape.conv_channels else None
            self._write(segment, rows.state_rows(layer.recurrent_states[0], conv, shape))
        self._states_owed.discard(layer_idx)

    def _closing(self, layer_idx: int, kind: type[LinearState | SlidingWindow]) -> list[Segment]:
        if self._plan is None:
            return []
        due = self._plan.closing(layer_idx, self._stop)
        return [segment for segment in due if isinstance(self._spec[segment.group], kind)]

    def _write(self, segment: Segment, parts: rows.Rows) -> None:
        assert self._writer is not None
        self._writer.write(segment, parts)
        self.exported_bytes += segment_bytes(self._spec, segment)
