"""Settings of the C library's allocator for processes that serve for long.

By default glibc gives each thread its own heap, and it keeps large freed blocks. A serving process
has many threads and frees prompts all day: its fragmented heaps grow for an hour before they
stabilise. With these settings, freed memory returns to the kernel: large blocks at once, and the
holes between small blocks that stay every minute.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

# Constants of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

LARGE_BYTES = 128 << 10  # larger blocks get their own pages; this is glibc's initial value
# A prompt of 100,000 tokens is a megabyte of JSON and is copied a few times. With new pages for
# each copy, it would cost a gateway half as much again.
BODY_BYTES = 2 << 20
ARENAS = 2  # threads seldom allocate at once: most hold the interpreter lock when they do


# Of 40 MiB of heap, 3 to 6 are holes after half an hour of traffic. To return them takes a few
# milliseconds, in which other threads may wait for memory.
TRIM_S = 60.0


def limit_heap_growth(large_bytes: int = LARGE_BYTES, trim_s: float = TRIM_S) -> None:
    """Returns freed blocks of `large_bytes` to the kernel at once, and free pages between smaller
    ones every `trim_s`. Call it before other threads start. It does nothing with another C library
    than glibc."""
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is not None:
        # glibc no longer adjusts a threshold that was set.
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
        mallopt(_M_TRIM_THRESHOLD, large_bytes)
        mallopt(_M_ARENA_MAX, ARENAS)
        trim = (library.malloc_trim, trim_s)
        threading.Thread(target=_trim_for_ever, args=trim, name="prfaas-heap", daemon=True).start()


def _trim_for_ever(malloc_trim: Callable[[int], int], trim_s: float) -> None:
    never = threading.Event()
    while not never.wait(trim_s):
        malloc_trim(0)  # without the interpreter's lock
