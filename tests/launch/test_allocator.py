from __future__ import annotations

import subprocess
import sys

from tests.waiting import PATIENCE_S

# Large blocks with small ones in between that stay, after a larger one was freed: glibc would keep
# all of it, and give none of it back.
HOLES = """
import os
from prfaas.launch.allocator import limit_heap_growth
from prfaas.faults.resource_usage import measure_process

limit_heap_growth()
bytearray(4 << 20)
before = measure_process(os.getpid()).own_bytes
large, small = [], []
for _ in range(200):
    large.append(bytearray(400_000))
    small.append(bytearray(2_000))
most = measure_process(os.getpid()).own_bytes
large.clear()
print(most - before, measure_process(os.getpid()).own_bytes - before)
"""


def test_what_is_freed_goes_back_whatever_lies_between() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", HOLES],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stdout
    most, left = map(int, printed.split())
    assert most > 70 << 20 and left < 10 << 20
