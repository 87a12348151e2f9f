"""The memory of staging: on the device, and on the host for pages that need a detour.

Rings for several arenas may share one (`StagingRing`): a ring has the pins of one arena, and the
memory and the streams are those of the device.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from prfaas.errors import EngineError, InputError

ALIGNMENT = 256
CHUNKS = 8  # of a ring: some are in flight while others are filled
_KEPT_INDICES = 64
_STREAMS = 2  # each way: the next copy begins while one ends, or while its rows are scattered


class Extent(NamedTuple):
    """A part of the memory."""

    start: int
    stop: int


class StagingMemory:
    """Thread-safe, except where a method says that its caller holds `freed`."""

    def __init__(self, device: torch.device | str, nbytes: int) -> None:
        """Takes `nbytes` on the device, and as many of the host's when `host` is first called."""
        if nbytes < CHUNKS * ALIGNMENT:
            raise InputError(
                f"staging of {nbytes} bytes is too small",
                where="ring_bytes",
                fix=f"use at least {CHUNKS * ALIGNMENT} bytes",
            )
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.nbytes = nbytes
        self.on_device = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.outs = _streams(self.device)
        self.ins = _streams(self.device)
        self.turns = itertools.count()  # of the streams
        self.freed = threading.Condition()  # notified when an extent is released
        self._on_host: torch.Tensor | None = None
        self._used: list[Extent] = []  # sorted
        self._indices: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    @property
    def has_host(self) -> bool:
        """Whether the host's part was needed so far."""
        return self._on_host is not None

    def host(self) -> torch.Tensor:
        """As large as the device's part, and pinned for CUDA."""
        with self.freed:
            if self._on_host is None:
                # Every thread may write it, whatever the mode of the first one.
                with torch.inference_mode(False):
                    self._on_host = torch.empty(
                        self.nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
                    )
            return self._on_host

    def take(self, nbytes: int) -> Extent | None:
        """The first gap that is large enough. The caller holds `freed`. EngineError when nothing
        that is released could make room."""
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes > self.nbytes:
            raise EngineError(f"{nbytes} bytes do not fit into staging of {self.nbytes}")
        at = 0
        for extent in self._used:
            if extent.start - at >= nbytes:
                break
            at = extent.stop
        if at + nbytes > self.nbytes:
            return None
        taken = Extent(at, at + nbytes)
        bisect.insort(self._used, taken)
        return taken

    def release(self, extent: Extent) -> None:
        with self.freed:
            self._used.remove(extent)
            self.freed.notify_all()

    def indices(self, numbers: Sequence[int], *, keep: bool = True) -> torch.Tensor:
        """The numbers as a tensor on the device. `keep`: all layers of a step ask for the same
        ones on the compute stream, so that they cross the bus once."""
        if self.device.type != "cuda":
            return torch.tensor(numbers, dtype=torch.int64)
        key = tuple(numbers)
        with self.freed:
            found = self._indices.get(key) if keep else None
        if found is None:
            # From pinned memory, because a copy from other memory may wait for the stream.
            found = torch.tensor(numbers, dtype=torch.int64).pin_memory()
            found = found.to(self.device, non_blocking=True)
            if keep:
                with self.freed:
                    self._indices[key] = found
                    if len(self._indices) > _KEPT_INDICES:
                        self._indices.popitem(last=False)
        return found


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Of one way; none on a CPU."""
    return [torch.cuda.Stream(device) for _ in range(_STREAMS if device.type == "cuda" else 0)]
