"""Memory between a device and the pages of a segment.

Rows are gathered into staging on the device, in the wire's order, by the compute stream; the blocks
may be overwritten by whatever that stream does next. A side stream copies staging into the pages,
in parallel to later layers. Loads go the other way on other side streams, so that both directions
of the bus are used at once:

    save   cache ─gather, compute stream─► staging ─side stream─► pages
    load   pages ─side stream─► staging ─scatter, side stream─► cache
           pages ─side stream─► a tensor that holds the rows as they are

Pages that cannot be registered with CUDA, and rows that pages cut where a rank has some columns
only, take a detour over pinned staging of the host, from where a thread copies them. A ring for the
CPU does the same copies without streams; it exists for tests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from prfaas.device.page_copies import (
    copy_matrices,
    copy_whole,
    cut_at_seams,
    matrices,
    pieces_of,
)
from prfaas.device.page_pins import PagePins, Pages, PinnedMapping, join_pages, nbytes_of
from prfaas.device.row_pages import (
    RowShape,
    gather_bytes,
    page_range,
    readable_rows,
    scatter_bytes,
    whole_rows,
    writable_rows,
)
from prfaas.device.staging_memory import ALIGNMENT, CHUNKS, Extent, StagingMemory
from prfaas.errors import EngineError, InputError
from prfaas.kvspec.mapped import MappedRanges

RING_BYTES = 1 << 30  # 32 layers of 8,192 tokens with 4 KiB each, or the states of 10 requests
TIMEOUT_S = 60.0
_TOGETHER_BYTES = 16 << 20  # of loads that are queued with one call


class Staged(Protocol):
    """Bytes on their way from a device into the pages of one segment. The blocks that they came
    from may be overwritten by work that is queued after `stage` on the same stream."""

    def finish(self, buffers: Sequence[memoryview]) -> int:
        """Waits for the device, writes this rank's bytes into the segment's buffers and returns
        their number. Called once, in any thread."""

    def discard(self) -> None:
        """Gives the memory back without writing. Without effect after `finish`."""


class Chunk(NamedTuple):
    """Rows on their way."""

    extent: Extent | None  # of staging; None for rows that need none
    shape: RowShape
    rows: int
    event: torch.cuda.Event | None  # when the device has done its part
    pinned: PinnedMapping | None = None  # of the pages that the device reads or writes
    pages: Sequence[memoryview] = ()  # to be written from the host's staging


class StagingRing:
    """Staging of one device, shared by all layers of a worker. Thread-safe."""

    def __init__(
        self,
        device: torch.device | str | StagingMemory,
        *,
        ring_bytes: int = RING_BYTES,
        pins: PagePins | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Takes `ring_bytes` on the device, or uses memory that rings for other arenas have, too:
        pins keep the pages of one arena. Without `pins`, no page is copied directly."""
        self.memory = (
            device if isinstance(device, StagingMemory) else StagingMemory(device, ring_bytes)
        )
        self.device = self.memory.device
        self.chunk_bytes = self.memory.nbytes // CHUNKS // ALIGNMENT * ALIGNMENT
        self.timeout_s = timeout_s
        self.indices = self.memory.indices
        self.release = self.memory.release
        self._pins = pins
        self._outs, self._ins = self.memory.outs, self.memory.ins
        self._fence: torch.cuda.Event | None = None
        self._flying: deque[Chunk] = deque()  # loads that the device has yet to do
        self._freed = self.memory.freed  # protects these, too

    def fence(self) -> None:
        """Loads that begin later wait for the work queued so far on the caller's current stream,
        and for no more. A worker calls it in the thread that launches the model each time before it
        starts loads, because blocks may have had other owners. Without any fence, a load waits for
        the current stream of its own thread."""
        if self._ins:
            self._fence = _recorded(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Waits for the device, and gives the registered pages back. Without effect on a closed
        ring; nothing may be staged or loaded afterwards."""
        self.finish_loads()
        for stream in self._outs:
            stream.synchronize()
        if self._pins is not None:
            self._pins.release()

    # Memory ---------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, timeout_s: float | None = None) -> Extent:
        """The first gap that is large enough. Waits for loads of the device, and for other threads
        to release memory, for at most `timeout_s` (the ring's own by default): EngineError after
        that."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            with self._freed:
                if (extent := self.memory.take(nbytes)) is not None:
                    return extent
                load = self._flying.popleft() if self._flying else None
                if load is None and not self._freed.wait(max(0.0, deadline - time.monotonic())):
                    raise EngineError(
                        f"no {nbytes} bytes of staging were free within {timeout_s:g} s"
                    )
            if load is not None:
                self.drop(load)

    # Saving ---------------------------------------------------------------------------------------

    def copy_out(
        self,
        shape: RowShape,
        rows: int,
        fill: Callable[[torch.Tensor], None],
        timeout_s: float | None = None,
    ) -> Chunk:
        """Lets `fill` write rows on the caller's stream. `begin_write` or `drop` takes the
        result."""
        extent = self.allocate(rows * shape.own_bytes, timeout_s)
        chunk = Chunk(extent, shape, rows, None)
        try:
            fill(self._staged(chunk))
            if self._outs:
                stream = torch.cuda.current_stream(self.device)
                chunk = chunk._replace(event=_recorded(stream))
            return chunk
        except BaseException:
            self.wait_for_device()
            self.release(extent)
            raise

    def begin_write(self, chunk: Chunk, pages: Pages) -> Chunk:
        """Queues the copy of a chunk into the pages of its rows, for any thread. `end_write` takes
        the result. After a failure, the chunk is released."""
        try:
            with _in_turn(self._outs, next(self.memory.turns), chunk.event) as stream:
                staged = self._staged(chunk)
                pinned = self._copy_pages(staged, chunk, pages, stream, into_pages=True)
                chunk = chunk._replace(pinned=pinned, pages=() if pinned else _views(pages))
                if pinned is None:
                    self._staged(chunk, host=True).copy_(staged, non_blocking=True)
                return chunk._replace(event=None if stream is None else _recorded(stream))
        except BaseException:
            self.wait_for_device()
            self.drop(chunk)
            raise

    def end_write(self, chunk: Chunk) -> int:
        """Waits for the device, and releases the chunk. Returns the bytes, which are in place."""
        try:
            if chunk.event is not None:
                chunk.event.synchronize()
            if chunk.pages:
                _write_rows(self._staged(chunk, host=True), chunk)
        finally:
            self.drop(chunk)
        return chunk.rows * chunk.shape.nbytes

    def drop(self, chunk: Chunk) -> None:
        """Releases a chunk, after the device."""
        if chunk.event is not None:
            chunk.event.synchronize()
        if chunk.pinned is not None and self._pins is not None:
            self._pins.give(chunk.pinned)
        if chunk.extent is not None:
            self.release(chunk.extent)

    # Loading --------------------------------------------------------------------------------------

    def copy_in(
        self,
        shape: RowShape,
        rows: int,
        pages: Pages,
        empty: Callable[[torch.Tensor], None],
    ) -> int:
        """Queues the copy of rows from the pages to the device, and lets `empty` take them from
        there. Returns the bytes; `finish_loads` waits for the device."""
        extent = self.allocate(rows * shape.own_bytes)
        chunk = Chunk(extent, shape, rows, None)
        try:
            fence = self._fence  # another thread may set the next one
            if fence is None and self._ins:
                fence = _recorded(torch.cuda.current_stream(self.device))
            with _in_turn(self._ins, next(self.memory.turns), fence) as stream:
                staged = self._staged(chunk)
                pinned = self._copy_pages(staged, chunk, pages, stream, into_pages=False)
                chunk = chunk._replace(pinned=pinned)
                if pinned is None and rows:
                    host = self._staged(chunk, host=True)
                    _read_rows(_views(pages), chunk, host)
                    staged.copy_(host, non_blocking=True)
                empty(staged)
                if stream is not None:
                    chunk = chunk._replace(event=_recorded(stream))
        except BaseException:
            self.wait_for_device()
            self.drop(chunk)
            raise
        self._fly(chunk)
        return rows * shape.nbytes

    def copy_to(self, loads: Iterable[tuple[torch.Tensor, Pages]]) -> None:
        """Queues copies of pages into tensors of the device: contiguous, of uint8, made on the
        caller's current stream before this call. That stream waits for all of them; the host does
        not, and the pages must stay as they are until `finish_loads`. After a failure, the device
        has done what was queued."""
        current = torch.cuda.current_stream(self.device) if self._ins else None
        # The memory of the tensors may have had other owners on that stream.
        fence = None if current is None else _recorded(current)
        try:
            for some in _together(loads):
                with _in_turn(self._ins, next(self.memory.turns), fence) as stream:
                    if not self._fill_all(some, stream):
                        for target, pages in some:
                            self._fill(target, pages, stream)
        except BaseException:
            self.wait_for_device()
            self._drop_loads()
            raise
        if current is not None:
            for stream in self._ins:
                current.wait_event(_recorded(stream))

    def queued_loads(self) -> Callable[[], None]:
        """A function that returns after the device has done all loads that are queued by now. For
        any thread, called once or never."""
        events = [_recorded(stream) for stream in self._ins]

        def wait() -> None:
            for event in events:
                event.synchronize()
            self._drop_loads()

        return wait

    def finish_loads(self) -> None:
        """Returns after the device has done all loads, of all layers and threads."""
        self.queued_loads()()

    # Inside ---------------------------------------------------------------------------------------

    def _staged(self, chunk: Chunk, *, host: bool = False) -> torch.Tensor:
        """uint8, flat."""
        assert chunk.extent is not None
        memory = self.memory.host() if host else self.memory.on_device
        start = chunk.extent.start
        return memory[start : start + chunk.rows * chunk.shape.own_bytes]

    def _drop_loads(self) -> None:
        """Releases loads that the device has done, in the order in which they were queued."""
        while True:
            with self._freed:
                load = self._flying[0] if self._flying else None
                if load is None or (load.event is not None and not load.event.query()):
                    return
                self._flying.popleft()
            self.drop(load)

    def _fill_all(
        self, loads: Sequence[tuple[torch.Tensor, Pages]], stream: torch.cuda.Stream | None
    ) -> bool:
        """Several tensors from their pages with few calls, on a stream that is the current one.
        False where that is not possible."""
        if self._pins is None or len(loads) == 1:
            return False
        for target, pages in loads:
            _check_bytes(pages, target.nbytes)
        taken = self._pins.take(join_pages([pages for _, pages in loads]))
        if taken is None:
            return False
        mapping, places = taken
        try:
            targets = [(target.data_ptr(), target.nbytes) for target, _ in loads]
            copy_whole(pieces_of(places, targets), mapping, stream, into_pages=False)
        except BaseException:
            self.wait_for_device()
            self._pins.give(mapping)
            raise
        event = None if stream is None else _recorded(stream)
        self._fly(Chunk(None, whole_rows(1), 0, event, pinned=mapping))
        return True

    def _fill(self, target: torch.Tensor, pages: Pages, stream: torch.cuda.Stream | None) -> None:
        """A tensor from its pages, on a stream that is the current one."""
        flat = target.view(-1)
        whole = Chunk(None, whole_rows(len(flat)), 1, None)
        pinned = self._copy_pages(flat, whole, pages, stream, into_pages=False)
        if pinned is not None:
            event = None if stream is None else _recorded(stream)
            self._fly(whole._replace(event=event, pinned=pinned))
            return
        views, size = _views(pages), self.chunk_bytes
        for first, part in enumerate(flat.split(size)):
            extent = self.allocate(len(part))
            chunk = Chunk(extent, whole_rows(len(part)), 1, None)
            try:
                staged = self._staged(chunk, host=True)
                gather_bytes(page_range(views, first * size, first * size + len(part)), staged)
                part.copy_(staged, non_blocking=True)
                if stream is not None:
                    chunk = chunk._replace(event=_recorded(stream))
            except BaseException:
                self.wait_for_device()
                self.release(extent)
                raise
            self._fly(chunk)

    def _fly(self, load: Chunk) -> None:
        with self._freed:
            self._flying.append(load)

    def _copy_pages(
        self,
        flat: torch.Tensor,
        chunk: Chunk,
        pages: Pages,
        stream: torch.cuda.Stream | None,
        *,
        into_pages: bool,
    ) -> PinnedMapping | None:
        """Queues the copies between pages and the chunk's rows, which lie in `flat`. None where
        that is not possible."""
        _check_bytes(pages, chunk.rows * chunk.shape.row_bytes)
        address, shape = flat.data_ptr(), chunk.shape
        taken = None if self._pins is None else self._pins.take(pages)
        if taken is None or self._pins is None:
            return None
        mapping, places = taken
        try:
            if shape.is_whole:
                pieces = pieces_of(places, [(address, flat.nbytes)])
                copy_whole(pieces, mapping, stream, into_pages=into_pages)
                return mapping
            found = matrices(places.pairs(), address, shape)
            if found is not None:
                cut = cut_at_seams(found, mapping.next_seam)
                copy_matrices(cut, stream, into_pages=into_pages)
                return mapping
        except BaseException:
            self.wait_for_device()
            self._pins.give(mapping)
            raise
        self._pins.give(mapping)
        return None

    def wait_for_device(self) -> None:
        """After a failure: the device must not use an extent that is released."""
        if self._outs:
            torch.cuda.synchronize(self.device)


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


def _write_rows(flat: torch.Tensor, chunk: Chunk) -> None:
    """From the host's staging into the chunk's pages."""
    shape = chunk.shape
    if shape.is_whole:
        scatter_bytes(flat, chunk.pages)
        return
    staged = flat.view(chunk.rows, shape.own_bytes)
    for at, run in writable_rows(chunk.pages, chunk.rows, shape.row_bytes, shape.places, 1):
        own = staged[at : at + len(run)]
        for place, begin in shape.columns:
            run[:, place.start : place.stop].copy_(own[:, begin : begin + len(place)])


def _read_rows(pages: Sequence[memoryview], chunk: Chunk, flat: torch.Tensor) -> None:
    """From pages into the host's staging."""
    shape = chunk.shape
    if shape.is_whole:
        gather_bytes(pages, flat)
        return
    staged = flat.view(chunk.rows, shape.own_bytes)
    for at, run in readable_rows(pages, chunk.rows, shape.row_bytes, 1):
        own = staged[at : at + len(run)]
        for place, begin in shape.columns:
            own[:, begin : begin + len(place)].copy_(run[:, place.start : place.stop])


def _together(
    loads: Iterable[tuple[torch.Tensor, Pages]],
) -> Iterator[list[tuple[torch.Tensor, Pages]]]:
    """Loads that are queued at once: the device begins with the first while later ones are
    prepared."""
    some: list[tuple[torch.Tensor, Pages]] = []
    nbytes = 0
    for target, pages in loads:
        some.append((target, pages))
        nbytes += target.nbytes
        if nbytes >= _TOGETHER_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _check_bytes(pages: Pages, nbytes: int) -> None:
    found = nbytes_of(pages)
    if found != nbytes:
        raise EngineError(f"{nbytes} bytes of rows do not fit into pages of {found} bytes in all")


def _views(pages: Pages) -> Sequence[memoryview]:
    return pages.views() if isinstance(pages, MappedRanges) else pages


@contextmanager
def _in_turn(
    streams: Sequence[torch.cuda.Stream], turn: int, after: torch.cuda.Event | None
) -> Iterator[torch.cuda.Stream | None]:
    """One of the streams, as the current one. Its work waits for an event."""
    if not streams:
        yield None
        return
    stream = streams[turn % len(streams)]
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield stream


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core to others
    event.record(stream)
    return event
