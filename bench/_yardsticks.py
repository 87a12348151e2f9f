"""What `bench/quick.py` compares this project's speeds with: work of the same nature that none of
its code takes part in. A slow or busy machine slows both. More yardsticks are elsewhere: the null
node (`_null_node.py`) answers HTTP, and `_transport_ssl_pair.py` has pairs of sockets."""

from __future__ import annotations

import hashlib
import heapq
import subprocess
import sys
import time
from collections.abc import Sequence

TIMEOUT_S = 60.0
_EVENTS = 20_000
_QUEUED = 1_000


def chain_ms(data: bytes, block_bytes: int) -> float:
    """A chain of SHA-256 over the blocks of `data`."""
    began_s = time.perf_counter()
    digest = b""
    for at in range(0, len(data), block_bytes):
        digest = hashlib.sha256(digest + data[at : at + block_bytes]).digest()
    return (time.perf_counter() - began_s) * 1e3


def loop_events_per_s() -> float:
    """Pure Python: events with a time each, in a queue from which the next one is taken."""
    queue = [(float(number), number) for number in range(_QUEUED)]
    counts = dict.fromkeys(range(_QUEUED), 0)
    began_s = time.perf_counter()
    for _ in range(_EVENTS):
        at_s, number = heapq.heappop(queue)
        counts[number] += 1
        heapq.heappush(queue, (at_s + 1.0 + number % 7, number))
    return _EVENTS / (time.perf_counter() - began_s)


def process_ms(arguments: Sequence[str]) -> float:
    """Python from its start to its end."""
    began_s = time.perf_counter()
    command = [sys.executable, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    return (time.perf_counter() - began_s) * 1e3
