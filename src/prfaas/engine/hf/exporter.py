"""Exports state during the forward pass: a cache that writes each layer's segment to a sink as soon
as the layer has updated it (paper, section 3.3: layer-wise pipelining).

On a CPU the segment is copied straight into the sink's pages. On CUDA it is packed on the device
and copied over a side stream into pinned memory; a thread copies it into the pages, so neither the
host nor the compute stream waits.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from prfaas.engine.api import Export
from prfaas.engine.chunks import ExportPlan
from prfaas.engine.hf import rows
from prfaas.engine.hf.load import LoadedModel
from prfaas.errors import EngineError
from prfaas.kvspec import LinearState, Segment, SegmentSink, SlidingWindow, segment_bytes

MAX_IN_FLIGHT = 64  # segments between device and pages; bounds the pinned memory
JOIN_S = 60.0


class SegmentWriter(Protocol):
    def write(self, segment: Segment, parts: rows.Rows) -> None:
        """Copies the bytes now; the tensors may change afterwards."""

    def finish(self) -> None:
        """Returns when everything is ready at the sink; raises what the sink raised."""

    def abort(self) -> None:
        """Returns when the sink will not be touched again."""


class HostWriter:
    def __init__(self, sink: SegmentSink) -> None:
        self._sink = sink

    def write(self, segment: Segment, parts: rows.Rows) -> None:
        rows.write(parts, self._sink.buffers(segment))
        self._sink.ready(segment)

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


class CudaWriter:
    def __init__(self, sink: SegmentSink, side: torch.cuda.Stream) -> None:
        self._sink = sink
        self._side = side
        self._queue: queue.Queue[tuple[Segment, torch.Tensor, torch.cuda.Event] | None]
        self._queue = queue.Queue(MAX_IN_FLIGHT)
        self._error: BaseException | None = None
        self._aborted = False
        self._thread = threading.Thread(target=self._carry, name="prfaas-export", daemon=True)
        self._thread.start()

    def write(self, segment: Segment, parts: rows.Rows) -> None:
        self._raise()
        packed = rows.pack(parts)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            staged = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            staged.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._side)
        packed.record_stream(self._side)
        self._queue.put((segment, staged, arrived), timeout=JOIN_S)

    def finish(self) -> None:
        self._end()
        self._raise()

    def abort(self) -> None:
        self._aborted = True
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None, timeout=JOIN_S)
            self._thread.join(JOIN_S)

    def _raise(self) -> None:
        if self._error is not None:
            raise EngineError(f"the sink failed: {self._error}") from self._error

    def _carry(self) -> None:
        while (item := self._queue.get()) is not None:
            segment, staged, arrived = item
            arrived.synchronize()
            if self._aborted or self._error is not None:
                continue  # drain the queue, so that the producer never blocks
            try:
                rows.scatter(staged, self._sink.buffers(segment))
                self._sink.ready(segment)
            except Exception as error:  # of the caller's sink; it fails this job only
                self._error = error


class ExportingCache(DynamicCache):
    """A sequence's cache during prefill. Call `begin` before each chunk and `end` after it."""

    layers: list[Any]

    def __init__(
        self, loaded: LoadedModel, export: Export | None, side: torch.cuda.Stream | None
    ) -> None:
        super().__init__(config=loaded.model.config)
        self.exported_bytes = 0
        self._spec, self._shapes = loaded.spec, loaded.shapes
        self._plan = ExportPlan(loaded.spec, export) if export is not None else None
        self._writer: SegmentWriter | None = None
        if export is not None:
            self._writer = (
                HostWriter(export.sink) if side is None else CudaWriter(export.sink, side)
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
            self._write(segment, rows.state_rows(self.layers[layer_idx], shape))
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
