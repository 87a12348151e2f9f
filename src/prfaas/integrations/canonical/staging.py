"""Memory between a device and the pages of a segment.

A ring of slots, each with the same number of bytes on the device and in pinned host memory. Tokens
are gathered into a slot on the compute stream; a side stream copies the slot to the host, in
parallel to later layers; any thread then copies it into pages. Loads go the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

SLOT_BYTES = 32 << 20
SLOTS = 16
TIMEOUT_S = 60.0


class Staged(Protocol):
    """Bytes on their way from a device into the pages of one segment. The blocks that they came
    from may be overwritten by work that is queued after `stage` on the same stream."""

    def finish(self, buffers: Sequence[memoryview]) -> int:
        """Waits for the device, writes this rank's bytes into the segment's buffers and returns
        their number. Called once, in any thread."""

    def discard(self) -> None:
        """Gives the memory back without writing. Without effect after `finish`."""


class StagingRing:
    """The slots of one device, shared by all layers of a worker. Thread-safe."""

    def __init__(
        self,
        device: torch.device,
        *,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        pages_pinned: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`pages_pinned`: the caller has registered the pages with CUDA, so that the device copies
        whole rows straight into them."""
        raise NotImplementedError

    def fence(self) -> None:
        """Loads that begin later wait for all work queued so far on the caller's current stream. A
        worker calls it in the thread that launches the model, before it starts loads."""
        raise NotImplementedError
