"""Settings of the C library's allocator for processes that serve for long.

By default glibc gives each thread its own heap, and it keeps large freed blocks. A serving process
has many threads and frees prompts all day: its fragmented heaps grow for an hour before they
stabilise. With these settings, freed memory returns to the kernel.
"""

from __future__ import annotations

import ctypes

# Constants of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

LARGE_BYTES = 128 << 10  # larger blocks get their own pages; this is glibc's initial value
# A prompt of 100,000 tokens is a megabyte of JSON and is copied a few times. With new pages for
# each copy, it would cost a gateway half as much again.
BODY_BYTES = 2 << 20
ARENAS = 2  # threads seldom allocate at once: most hold the interpreter lock when they do


def limit_heap_growth(large_bytes: int = LARGE_BYTES) -> None:
    """Returns freed blocks of `large_bytes` to the kernel at once. Call it before threads start. It
    does nothing with another C library than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # glibc no longer adjusts a threshold that was set.
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
        mallopt(_M_TRIM_THRESHOLD, large_bytes)
        mallopt(_M_ARENA_MAX, ARENAS)
