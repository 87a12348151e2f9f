"""What `bench/quick.py` compares this project's speeds with: work of the same nature that none of
its code takes part in. A slow or busy machine slows both. What one process computes alone is
measured in CPU time where it takes longer than a process's turn on a core.

More yardsticks are elsewhere: the null node (`_null_node.py`) answers HTTP, and
`_transport_ssl_pair.py` has pairs of sockets.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

TIMEOUT_S = 60.0
_EVENTS = 60_000
_QUEUED = 1_000


def chain_ms(data: bytes, block_bytes: int) -> float:
    """A chain of SHA-256 over the blocks of `data`."""
    began_s = time.perf_counter()
    digest = b""
    for at in range(0, len(data), block_bytes):
        digest = hashlib.sha256(digest + data[at : at + block_bytes]).digest()
    return (time.perf_counter() - began_s) * 1e3


def loop_events_per_s() -> float:
    """Pure Python, per second of CPU time: events with a time each, in a queue from which the next
    one is taken."""
    queue = [(float(number), number) for number in range(_QUEUED)]
    counts = dict.fromkeys(range(_QUEUED), 0)
    began_s = time.process_time()
    for _ in range(_EVENTS):
        at_s, number = heapq.heappop(queue)
        counts[number] += 1
        heapq.heappush(queue, (at_s + 1.0 + number % 7, number))
    return _EVENTS / (time.process_time() - began_s)


def process_ms(arguments: Sequence[str]) -> float:
    """CPU time of Python from its start to its end. It may keep compiled code, as for a user."""
    command = [sys.executable, *arguments]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s * 1e3
