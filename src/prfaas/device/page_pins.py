"""Pages registered with CUDA, so that a device copies them at the rate of the bus.

An arena is registered part by part, when its pages are first used: registering takes memory that a
kvd has not touched yet, about 0.6 s per GiB, and 0.05 s per GiB for memory that it has. The device
starts no kernel while CUDA registers, so memory is taken before, without CUDA. A part stays
registered until the arena is left for another one (a kvd was restarted), or until `release`.
`PinsAhead` registers parts before they are used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from prfaas.errors import EngineError
from prfaas.kvspec.mapped import MappedRanges

_LOG = logging.getLogger(__name__)
PART_BYTES = 64 << 20  # a multiple of every memory page
REGISTER_S = 60.0  # for a part that another thread registers
AHEAD_BYTES = 1 << 30
_IDLE_S = 60.0
# Once enough is registered, the next parts wait for each other, and longer while the device is in
# use: a part takes 50 ms of a core and of the bus, which a first token would wait for.
_PACE_S, _BUSY_PACE_S = 0.05, 0.5
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
Pages: TypeAlias = Sequence[memoryview] | MappedRanges


def nbytes_of(pages: Pages) -> int:
    if isinstance(pages, MappedRanges):
        return pages.nbytes
    return sum(page.nbytes for page in pages)


def join_pages(parts: Sequence[Pages]) -> Pages:
    """The pages of several segments, one after the other."""
    if len(parts) == 1:
        return parts[0]
    mapped = [part for part in parts if isinstance(part, MappedRanges)]
    if len(mapped) == len(parts) and all(one.memory is mapped[0].memory for one in mapped):
        starts, stops = ([getattr(one, name) for one in mapped] for name in ("starts", "stops"))
        return MappedRanges(mapped[0].memory, np.concatenate(starts), np.concatenate(stops))
    return [
        view
        for part in parts
        for view in (part.views() if isinstance(part, MappedRanges) else part)
    ]


class Places(NamedTuple):
    """Pages of this process, in order."""

    addresses: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]  # bytes

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.addresses.tolist(), self.sizes.tolist(), strict=True))


class PinnedMapping:
    """One mapping of this process. `users` are copies that are under way."""

    def __init__(self, memory: mmap.mmap, part_bytes: int) -> None:
        self.memory = memory  # stays mapped
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.nbytes = len(memory)
        self.part_bytes = part_bytes
        self.users = 0
        self.parts: set[int] = set()  # registered
        self.registering: set[int] = set()
        self.used: set[int] = set()

    def next_seam(self, address: int) -> int:
        """The first end of a part behind an address. A copy must not cross it."""
        return self.base + ((address - self.base) // self.part_bytes + 1) * self.part_bytes

    def parts_of(self, places: Places) -> set[int]:
        offsets = places.addresses - self.base
        first = offsets // self.part_bytes
        last = (offsets + places.sizes - 1) // self.part_bytes
        # Marking is several times as fast as sorting, and copies wait for this.
        marked = np.zeros(self.count, dtype=np.bool_)
        marked[first] = marked[last] = True
        for n in np.flatnonzero(last - first > 1).tolist():
            marked[int(first[n]) : int(last[n])] = True
        return set(np.flatnonzero(marked).tolist())

    @property
    def count(self) -> int:
        """Parts of the mapping."""
        return -(-self.nbytes // self.part_bytes)

    def place(self, part: int) -> tuple[int, int]:
        """(address, bytes)."""
        at = part * self.part_bytes
        return self.base + at, min(self.part_bytes, self.nbytes - at)


class PagePins:
    """The registered memory of one device's worker. Thread-safe."""

    def __init__(self, device: torch.device | str, *, part_bytes: int = PART_BYTES) -> None:
        self._device = torch.device(device)
        self._part_bytes = part_bytes
        self._changed = threading.Condition()
        self._mappings: dict[int, PinnedMapping] = {}  # by the identity of the mapping
        self._newest: int | None = None  # of the mappings
        self._refused = False
        self.used_more = threading.Event()  # set when parts are used for the first time

    def take(self, pages: Pages) -> tuple[PinnedMapping, Places] | None:
        """The mapping of the pages, and their places in order. They are registered until the caller
        has passed the mapping to `give`. None for memory that cannot be registered: other memory
        than one mapping's, or when CUDA refuses."""
        if isinstance(pages, MappedRanges):
            memory = pages.memory
        else:
            found = _memory_of(pages)
            if found is None:
                return None
            memory = found
        with self._changed:
            if self._refused:
                return None
            mapping = self._mapping_of(memory)
            mapping.users += 1
        try:
            places = _places(pages, mapping)
            if self._register_parts(mapping, mapping.parts_of(places)):
                return mapping, places
        except BaseException:
            self.give(mapping)
            raise
        self.give(mapping)
        return None

    def give(self, mapping: PinnedMapping) -> None:
        """The caller's copies have ended."""
        with self._changed:
            mapping.users -= 1
            if mapping.users == 0 and id(mapping.memory) != self._newest:
                self._leave(mapping)

    def adopt(self, memory: mmap.mmap) -> None:
        """Leaves other mappings for this one."""
        with self._changed:
            self._mapping_of(memory)

    def register_next(self, memory: mmap.mmap, ahead_bytes: int) -> bool:
        """Registers one more part of an adopted mapping, unless `ahead_bytes` are registered and
        have not been used. Returns whether it did."""
        with self._changed:
            mapping = self._mappings.get(id(memory))
            if self._refused or mapping is None or id(memory) != self._newest:
                return False
            known = mapping.parts | mapping.registering
            part = next((n for n in range(mapping.count) if n not in known), None)
            if part is None or len(known - mapping.used) * self._part_bytes >= ahead_bytes:
                return False
            mapping.users += 1
        try:
            return self._register_parts(mapping, {part}, used=False)
        finally:
            self.give(mapping)

    def release(self) -> None:
        """Called when no copy is under way."""
        with self._changed:
            self._newest = None
            for mapping in list(self._mappings.values()):
                mapping.users = 0
                self._leave(mapping)

    def _mapping_of(self, memory: mmap.mmap) -> PinnedMapping:
        mapping = self._mappings.get(id(memory))
        if mapping is None:
            for other in list(self._mappings.values()):
                if other.users == 0:
                    self._leave(other)
            mapping = self._mappings[id(memory)] = PinnedMapping(memory, self._part_bytes)
            self._newest = id(memory)
        return mapping

    def _register_parts(
        self, mapping: PinnedMapping, wanted: set[int], *, used: bool = True
    ) -> bool:
        """Without the lock during CUDA's calls: copies that need other parts go on. False when CUDA
        refuses. A part that is not used yet may be refused without harm."""
        while True:
            with self._changed:
                missing = wanted - mapping.parts
                if self._refused:
                    return False
                if not missing:
                    if used and not wanted <= mapping.used:
                        mapping.used |= wanted
                        self.used_more.set()
                    return True
                free = missing - mapping.registering
                if not free:
                    if not self._changed.wait(REGISTER_S):
                        return False
                    continue
                part = min(free)
                mapping.registering.add(part)
            result = -1
            try:
                result = self._register(*mapping.place(part))
            finally:
                with self._changed:
                    mapping.registering.discard(part)
                    if result == 0:
                        mapping.parts.add(part)
                    elif used:  # a copy through staging is slower, but works
                        self._refused = True
                    self._changed.notify_all()
            if result != 0:
                _LOG.warning("pages cannot be registered: CUDA's error %d", result)
                if not used:
                    return False

    def _leave(self, mapping: PinnedMapping) -> None:
        for part in sorted(mapping.parts):
            self._unregister(mapping.place(part)[0])
        mapping.parts.clear()
        self._mappings.pop(id(mapping.memory), None)

    def _register(self, address: int, nbytes: int) -> int:
        take_memory(address, nbytes)
        self._enter()
        return int(_driver().cuMemHostRegister_v2(address, nbytes, 0))

    def _unregister(self, address: int) -> None:
        self._enter()
        _driver().cuMemHostUnregister(address)

    def _enter(self) -> None:
        """Makes the device's context the current one of this thread, which the driver needs."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaMemGetInfo(self._device.index or 0)


class PinsAhead:
    """Registers the parts of a mapping that will be used next, in a thread of its own."""

    def __init__(
        self,
        pins: PagePins,
        ahead_bytes: int = AHEAD_BYTES,
        *,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_busy` returns whether the device computes, for any thread."""
        self._pins = pins
        self._is_busy = is_busy
        self._ahead_bytes = ahead_bytes
        self._lock = threading.Lock()  # protects the next two
        self._memory: mmap.mmap | None = None
        self._settled = threading.Event()  # set when enough of it is registered
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prfaas-pins", daemon=True)
        self._thread.start()

    def use(self, memory: mmap.mmap) -> None:
        """From now on, this mapping."""
        with self._lock:
            if memory is not self._memory:
                self._memory = memory
                self._settled.clear()
        self._pins.used_more.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether enough of the mapping is registered, or cannot be, within that time."""
        return self._settled.wait(timeout_s)

    def stop(self, timeout_s: float = REGISTER_S) -> None:
        """Returns when nothing more is registered. Idempotent."""
        self._stopped.set()
        self._pins.used_more.set()
        self._thread.join(timeout_s)
        with self._lock:
            self._memory = None
            self._settled.set()

    def _work(self) -> None:
        adopted: mmap.mmap | None = None
        while not self._stopped.is_set():
            self._pins.used_more.clear()
            memory = self._memory
            if memory is not None and memory is not adopted:
                self._pins.adopt(memory)
                adopted = memory
            if self._settled.is_set():
                self._rest()
            if memory is not None and self._pins.register_next(memory, self._ahead_bytes):
                continue
            with self._lock:
                if memory is not None and memory is self._memory:
                    self._settled.set()
            self._pins.used_more.wait(_IDLE_S)

    def _rest(self) -> None:
        until_s = time.monotonic() + _BUSY_PACE_S
        self._stopped.wait(_PACE_S)
        while self._is_busy() and time.monotonic() < until_s and not self._stopped.is_set():
            self._stopped.wait(_PACE_S)


def _memory_of(pages: Sequence[memoryview]) -> mmap.mmap | None:
    memory = pages[0].obj if pages else None
    if not isinstance(memory, mmap.mmap):
        return None
    if any(page.obj is not memory or page.readonly for page in pages):
        return None
    return memory


def _places(pages: Pages, mapping: PinnedMapping) -> Places:
    if isinstance(pages, MappedRanges):
        starts, stops = pages.starts, pages.stops
        if len(starts) and not (
            starts.min() >= 0 and (stops > starts).all() and stops.max() <= mapping.nbytes
        ):
            raise EngineError(f"pages are not in their mapping of {mapping.nbytes} bytes")
        return Places(starts + mapping.base, stops - starts)
    address_of, first_byte = ctypes.addressof, ctypes.c_char.from_buffer
    return Places(
        np.array([address_of(first_byte(page)) for page in pages], dtype=np.int64),
        np.array([page.nbytes for page in pages], dtype=np.int64),
    )


def take_memory(address: int, nbytes: int) -> bool:
    """Makes the kernel take the memory of a mapping, without changing its bytes. False where the
    kernel is too old, or memory is short: then registering takes it, or fails."""
    return bool(_libc().madvise(address, nbytes, _POPULATE_WRITE) == 0)


@functools.cache
def _libc() -> Any:
    """Not `mmap.madvise`, which keeps the interpreter's lock."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


@functools.cache
def _driver() -> Any:
    """Not the runtime: its calls leave an error behind, which torch would report later."""
    driver: Any = ctypes.CDLL("libcuda.so.1")
    driver.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    driver.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    return driver
