"""Reads a checkpoint's weights into the system's page cache, while the process still imports its
libraries. Torch-free.

Loaders map the weights into memory, and then wait for the disk page by page. Read in large pieces
by several threads, a fast disk delivers several times as much.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PIECE_BYTES = 16 << 20
THREADS = 4
LEAST_BYTES = 1 << 30  # smaller checkpoints are read in a second
JOIN_S = 5.0


@contextmanager
def read_ahead(directory: Path) -> Iterator[None]:
    """Reads while the body runs, and stops at its end. Does nothing for a small checkpoint, or for
    one that would displace the memory of other processes. Errors are left to the loader."""
    files = _weights(directory)
    total = sum(size for _, size in files)
    if total < LEAST_BYTES or total > _available_bytes() // 2:
        yield
        return
    pieces: queue.SimpleQueue[tuple[Path, int]] = queue.SimpleQueue()
    for path, size in files:
        for start in range(0, size, PIECE_BYTES):
            pieces.put((path, start))
    stopped = threading.Event()
    threads = [
        threading.Thread(target=_read, args=(pieces, stopped), name="prfaas-read", daemon=True)
        for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join(JOIN_S)


def _read(pieces: queue.SimpleQueue[tuple[Path, int]], stopped: threading.Event) -> None:
    buffer = bytearray(PIECE_BYTES)
    while not stopped.is_set():
        try:
            path, start = pieces.get_nowait()
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.preadv(descriptor, [buffer], start)
            finally:
                os.close(descriptor)
        except (queue.Empty, OSError):
            return


def _weights(directory: Path) -> list[tuple[Path, int]]:
    try:
        return [(path, path.stat().st_size) for path in sorted(directory.glob("*.safetensors"))]
    except OSError:
        return []


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
