"""The C library's heap of processes that serve for long: what is freed goes back to the system.

By default glibc gives every thread a heap of its own and, once a large block was freed, keeps those
of that size, too. A serving process has many threads and frees prompts all day: its heaps, full of
holes, grow for an hour before they stay as they are.
"""

from __future__ import annotations

import ctypes

# Of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

LARGE_BYTES = 128 << 10  # from here on a block has pages of its own; glibc begins with this, too
# Prompts of a hundred thousand tokens are a megabyte of JSON, copied a few times: with pages of
# their own, new each time, they would cost a gateway half as much again.
BODY_BYTES = 2 << 20
ARENAS = 2  # threads seldom ask at the same time: most hold the interpreter's lock when they do


def steady_heap(large_bytes: int = LARGE_BYTES) -> None:
    """Blocks of `large_bytes` go back at once. To be called before threads are started. Does
    nothing where the C library is another."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # A threshold that is set is not adjusted any more.
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
        mallopt(_M_TRIM_THRESHOLD, large_bytes)
        mallopt(_M_ARENA_MAX, ARENAS)
