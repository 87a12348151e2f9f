"""Memory between a device and the pages of a segment.

Rows are gathered into staging on the device, in the wire's order, by the compute stream; the blocks
may be overwritten by whatever that stream does next. A side stream copies staging to the host,
in parallel to later layers, and any thread puts it into pages. Loads go the other way on another
side stream, so that both directions of the bus are used at once:

    save   cache ─gather, compute stream─► device staging ─side stream─► host staging ─► pages
    load   pages ─► host staging ─side stream─► device staging ─scatter, side stream─► cache

Where the pages themselves are pinned, whole rows skip host staging. A ring for the CPU does the
same copies without streams; it exists for tests.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical.page_copies import copy_pages
from prfaas.integrations.canonical.row_pages import page_range, readable_rows, writable_rows

RING_BYTES = 512 << 20  # 16 layers of 8,192 tokens with 4 KiB each
TIMEOUT_S = 60.0
_ALIGNMENT = 256
_KEPT_INDICES = 64
_PIN_BYTES = 64 << 30  # vLLM registers no more at once
_CHUNKS = 4  # of a ring: two are in flight while one is filled


class Staged(Protocol):
    """Bytes on their way from a device into the pages of one segment. The blocks that they came
    from may be overwritten by work that is queued after `stage` on the same stream."""

    def finish(self, buffers: Sequence[memoryview]) -> int:
        """Waits for the device, writes this rank's bytes into the segment's buffers and returns
        their number. Called once, in any thread."""

    def discard(self) -> None:
        """Gives the memory back without writing. Without effect after `finish`."""


class Column(NamedTuple):
    """Consecutive bytes of a row that a rank holds."""

    place: range  # in the row of the whole model
    at: int  # in the rank's own row, which is what staging holds


@dataclass(frozen=True, slots=True)
class RowShape:
    """Rows of the whole model, and the rank's own columns of them."""

    row_bytes: int
    own_bytes: int  # of a row in staging; alignment may make it larger than the columns' sum
    columns: tuple[Column, ...]

    @property
    def places(self) -> tuple[range, ...]:
        return tuple(column.place for column in self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of a row that this rank copies."""
        return sum(len(column.place) for column in self.columns)

    @property
    def is_whole(self) -> bool:
        """A row in staging is a row of the whole model."""
        whole = (Column(range(self.row_bytes), 0),)
        return self.own_bytes == self.row_bytes and self.columns == whole


def joined(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Neighbours as one column: with all heads, keys and values are one run of bytes."""
    found: list[Column] = []
    for column in columns:
        if found:
            last = found[-1]
            ends = last.place.stop, last.at + len(last.place)
            if ends == (column.place.start, column.at):
                found[-1] = Column(range(last.place.start, column.place.stop), last.at)
                continue
        found.append(column)
    return tuple(found)


class Extent(NamedTuple):
    """A part of the ring."""

    start: int
    stop: int


class Chunk(NamedTuple):
    """Staged rows. The first `skip` rows of the extent are not part of the segment."""

    extent: Extent
    skip: int
    rows: int
    event: torch.cuda.Event | None


class StagingRing:
    """Staging of one device, shared by all layers of a worker. Thread-safe."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        ring_bytes: int = RING_BYTES,
        pages_pinned: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Takes `ring_bytes` on the device and as many in pinned host memory. `pages_pinned`: the
        caller has registered the pages with CUDA."""
        if ring_bytes < _CHUNKS * _ALIGNMENT:
            raise InputError(
                f"staging of {ring_bytes} bytes is too small",
                where="ring_bytes",
                fix=f"use at least {_CHUNKS * _ALIGNMENT} bytes",
            )
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.chunk_bytes = ring_bytes // _CHUNKS // _ALIGNMENT * _ALIGNMENT
        self.pages_pinned = pages_pinned
        cuda = self.device.type == "cuda"
        self._timeout_s = timeout_s
        self._device = torch.empty(ring_bytes, dtype=torch.uint8, device=self.device)
        self._host = torch.empty(ring_bytes, dtype=torch.uint8, pin_memory=cuda)
        self._out = torch.cuda.Stream(self.device) if cuda else None
        self._in = torch.cuda.Stream(self.device) if cuda else None
        self._fence: torch.cuda.Event | None = None
        self._used: list[Extent] = []  # sorted
        self._flying: deque[Chunk] = deque()  # loads that the device has yet to do
        self._indices: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._freed = threading.Condition()

    def fence(self) -> None:
        """Loads that begin later wait for the work queued so far on the caller's current stream,
        and for no more. A worker calls it in the thread that launches the model each time before it
        starts loads, because blocks may have had other owners. Without any fence, a load waits for
        the current stream of its own thread."""
        if self._in is not None:
            self._fence = _recorded(torch.cuda.current_stream(self.device))

    # Memory ---------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Extent:
        """The first gap that is large enough. Waits for loads of the device, and for other threads
        to release memory, for at most the ring's timeout: EngineError after that."""
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if nbytes > len(self._device):
            raise EngineError(f"{nbytes} bytes do not fit into staging of {len(self._device)}")
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._freed:
                if (extent := self._gap(nbytes)) is not None:
                    bisect.insort(self._used, extent)
                    return extent
                load = self._flying.popleft() if self._flying else None
                if load is None and not self._freed.wait(max(0.0, deadline - time.monotonic())):
                    raise EngineError(
                        f"no {nbytes} bytes of staging were free within {self._timeout_s:g} s"
                    )
            if load is not None:
                self.drop(load)

    def release(self, extent: Extent) -> None:
        with self._freed:
            self._used.remove(extent)
            self._freed.notify_all()

    def rows(self, extent: Extent, own_bytes: int, *, host: bool = False) -> torch.Tensor:
        """uint8 [rows, own_bytes] over the extent, on the device or on the host."""
        memory = self._host if host else self._device
        count = (extent.stop - extent.start) // own_bytes
        return memory[extent.start : extent.start + count * own_bytes].view(count, own_bytes)

    def indices(self, blocks: Sequence[int], *, keep: bool = True) -> torch.Tensor:
        """The numbers as a tensor on the device. `keep`: all layers of a step ask for the same
        ones on the compute stream, so that they cross the bus once."""
        if self._out is None:
            return torch.tensor(blocks, dtype=torch.int64)
        key = tuple(blocks)
        with self._freed:
            found = self._indices.get(key) if keep else None
        if found is None:
            # From pinned memory, because a copy from other memory may wait for the stream.
            found = torch.tensor(blocks, dtype=torch.int64).pin_memory()
            found = found.to(self.device, non_blocking=True)
            if keep:
                with self._freed:
                    self._indices[key] = found
                    if len(self._indices) > _KEPT_INDICES:
                        self._indices.popitem(last=False)
        return found

    # Saving ---------------------------------------------------------------------------------------

    def copy_out(
        self,
        shape: RowShape,
        count: int,
        skip: int,
        rows: int,
        fill: Callable[[torch.Tensor], None],
    ) -> Chunk:
        """Lets `fill` write `count` rows on the caller's stream, and queues the copy of `rows` of
        them, from `skip` on, to the host."""
        extent = self.allocate(count * shape.own_bytes)
        try:
            staged = self.rows(extent, shape.own_bytes)[:count]
            fill(staged)
            if self._out is None:
                event = None
            else:
                event = _recorded(torch.cuda.current_stream(self.device))
            if not self._is_direct(shape):
                event = self._copy_to_host(extent, shape, skip, rows, event)
        except BaseException:
            self._wait()
            self.release(extent)
            raise
        return Chunk(extent, skip, rows, event)

    def write(self, chunks: Iterable[Chunk], shape: RowShape, buffers: Sequence[memoryview]) -> int:
        """Puts chunk after chunk into the pages, and releases each. `chunks` may stage the next one
        while the last one is on its way."""
        done = 0
        waiting: Chunk | None = None
        try:
            for chunk in chunks:
                if waiting is not None:
                    last, waiting = waiting, chunk
                    done = self._put(last, shape, buffers, done)
                waiting = chunk
            if waiting is not None:
                last, waiting = waiting, None
                done = self._put(last, shape, buffers, done)
        finally:
            if waiting is not None:
                self.drop(waiting)
        return done * shape.nbytes

    def drop(self, chunk: Chunk) -> None:
        """Releases a chunk that is not written."""
        if chunk.event is not None:
            chunk.event.synchronize()
        self.release(chunk.extent)

    # Loading --------------------------------------------------------------------------------------

    def copy_in(
        self,
        shape: RowShape,
        chunks: Iterable[tuple[int, int, int]],
        views: Sequence[memoryview],
        empty: Callable[[int, torch.Tensor], None],
    ) -> int:
        """For each chunk (rows in staging, rows to skip, rows to read): queues the copy of the rows
        from the pages to the device, zeroes the others, and lets `empty` take them from there, with
        the chunk's number. `finish_loads` waits for the device."""
        done = 0
        with self._loading():
            for number, (count, skip, rows) in enumerate(chunks):
                extent = self.allocate(count * shape.own_bytes)
                try:
                    first, last = done * shape.row_bytes, (done + rows) * shape.row_bytes
                    staged = self.rows(extent, shape.own_bytes)[:count]
                    if skip:
                        staged[:skip].zero_()
                    if skip + rows < count:
                        staged[skip + rows :].zero_()
                    self._fetch(extent, shape, skip, rows, page_range(views, first, last))
                    empty(number, staged)
                    event = None if self._in is None else _recorded(self._in)
                except BaseException:
                    self._wait()
                    self.release(extent)
                    raise
                with self._freed:
                    self._flying.append(Chunk(extent, skip, rows, event))
                done += rows
        return done * shape.nbytes

    def finish_loads(self) -> None:
        """Returns after the device has done all loads, of all layers and threads."""
        while True:
            with self._freed:
                load = self._flying.popleft() if self._flying else None
            if load is None:
                return
            self.drop(load)

    # Inside ---------------------------------------------------------------------------------------

    def _is_direct(self, shape: RowShape) -> bool:
        return self.pages_pinned and shape.is_whole

    def _gap(self, nbytes: int) -> Extent | None:
        at = 0
        for extent in self._used:
            if extent.start - at >= nbytes:
                break
            at = extent.stop
        return Extent(at, at + nbytes) if at + nbytes <= len(self._device) else None

    def _copy_to_host(
        self, extent: Extent, shape: RowShape, skip: int, rows: int, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        source = self.rows(extent, shape.own_bytes)[skip : skip + rows]
        target = self.rows(extent, shape.own_bytes, host=True)[skip : skip + rows]
        if self._out is None or after is None:
            target.copy_(source)
            return None
        self._out.wait_event(after)
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
        return _recorded(self._out)

    def _put(self, chunk: Chunk, shape: RowShape, buffers: Sequence[memoryview], first: int) -> int:
        """Writes the rows of a chunk, of which the first is row `first` of the segment. Returns the
        number of the row after them."""
        last = first + chunk.rows
        pages = page_range(buffers, first * shape.row_bytes, last * shape.row_bytes)
        try:
            if self._is_direct(shape):
                self._put_direct(chunk, shape, pages)
            else:
                if chunk.event is not None:
                    chunk.event.synchronize()
                staged = self.rows(chunk.extent, shape.own_bytes, host=True)[chunk.skip :]
                for at, run in writable_rows(pages, chunk.rows, shape.row_bytes, shape.places, 1):
                    own = staged[at : at + len(run)]
                    for place, begin in shape.columns:
                        run[:, place.start : place.stop].copy_(own[:, begin : begin + len(place)])
        finally:
            self.drop(chunk)
        return last

    def _put_direct(self, chunk: Chunk, shape: RowShape, pages: Sequence[memoryview]) -> None:
        staged = self.rows(chunk.extent, shape.own_bytes)[chunk.skip : chunk.skip + chunk.rows]
        with self._stream(self._out):
            if self._out is not None and chunk.event is not None:
                self._out.wait_event(chunk.event)
            copy_pages(staged.view(-1), pages, self._out, into_pages=True)
            if self._out is not None:
                _recorded(self._out).synchronize()

    def _fetch(
        self,
        extent: Extent,
        shape: RowShape,
        skip: int,
        rows: int,
        pages: Sequence[memoryview],
    ) -> None:
        target = self.rows(extent, shape.own_bytes)[skip : skip + rows]
        if self._is_direct(shape):
            copy_pages(target.view(-1), pages, self._in, into_pages=False)
            return
        staged = self.rows(extent, shape.own_bytes, host=True)[skip : skip + rows]
        for at, run in readable_rows(pages, rows, shape.row_bytes, 1):
            own = staged[at : at + len(run)]
            for place, begin in shape.columns:
                own[:, begin : begin + len(place)].copy_(run[:, place.start : place.stop])
        target.copy_(staged, non_blocking=True)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        if self._in is not None:
            fence = self._fence  # another thread may set the next one
            if fence is None:
                fence = _recorded(torch.cuda.current_stream(self.device))
            self._in.wait_event(fence)
        with self._stream(self._in):
            yield

    @contextmanager
    def _stream(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
        else:
            with torch.cuda.stream(stream):
                yield

    def _wait(self) -> None:
        """After a failure: the device must not use an extent that is released."""
        if self._out is not None:
            torch.cuda.synchronize(self.device)


class StagedRows:
    """Staged chunks of one segment."""

    def __init__(self, ring: StagingRing, shape: RowShape, chunks: Sequence[Chunk]) -> None:
        self._ring = ring
        self._shape = shape
        self._chunks = list(chunks)

    def finish(self, buffers: Sequence[memoryview]) -> int:
        chunks, self._chunks = self._chunks, []
        rest = iter(chunks)
        try:
            found = sum(view.nbytes for view in buffers)
            expected = sum(chunk.rows for chunk in chunks) * self._shape.row_bytes
            if found != expected:
                raise EngineError(f"a segment of {expected} bytes has pages of {found} bytes")
            return self._ring.write(rest, self._shape, buffers)
        finally:
            for chunk in rest:
                self._ring.drop(chunk)

    def discard(self) -> None:
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            self._ring.drop(chunk)


def require_ring(cache: torch.Tensor, ring: StagingRing | None) -> None:
    """InputError unless a cache on a device has staging there."""
    if cache.device.type != "cpu" and ring is None:
        raise InputError(
            f"a cache on {cache.device} needs staging",
            where="ring",
            fix="pass a StagingRing of the same device",
        )
    if ring is not None and ring.device != cache.device:
        raise InputError(
            f"staging on {ring.device} does not suit a cache on {cache.device}",
            where="ring",
            fix="pass a StagingRing of the same device",
        )


def register_pages(memory: memoryview) -> None:
    """Pins memory that this process has mapped, for `StagingRing(pages_pinned=True)`. It stays
    pinned until the process ends. EngineError when CUDA refuses."""
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for at in range(0, memory.nbytes, _PIN_BYTES):
        nbytes = min(_PIN_BYTES, memory.nbytes - at)
        result = int(torch.cuda.cudart().cudaHostRegister(base + at, nbytes, 0))
        if result != 0:
            raise EngineError(f"CUDA cannot register {nbytes} bytes of pages: error {result}")


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core to others
    event.record(stream)
    return event
