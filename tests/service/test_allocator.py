from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from prfaas.service.allocator import ARENAS
from prfaas.transport.workers.messages import PACKET_BYTES, Serve, Started, read_report
from prfaas.transport.workers.process import WorkerProcess
from tests.waiting import PATIENCE_S

HEAP_BYTES = 64 << 20

# Blocks with small ones in between that stay, after a larger one was freed: glibc would keep all of
# it, and give none of it back.
HOLES = """
import os, sys, time
from prfaas.service.allocator import limit_heap_growth
from prfaas_lab.faults.resource_usage import measure_process

def used():
    return measure_process(os.getpid()).own_bytes

nbytes, trim_s, patience_s = int(sys.argv[1]), *map(float, sys.argv[2:])
limit_heap_growth(trim_s=trim_s)
bytearray(4 << 20)
before = used()
freed, kept = [], []
for _ in range((80 << 20) // nbytes):
    freed.append(bytearray(nbytes))
    kept.append(bytearray(2_000))
most = used()
freed.clear()
until_s = time.monotonic() + patience_s
while used() - before > 10 << 20 and time.monotonic() < until_s:
    time.sleep(0.02)
print(most - before, used() - before)
"""


@pytest.mark.parametrize(
    ("nbytes", "trim_s", "patience_s"),
    [
        pytest.param(400_000, 3600.0, 0.0, id="large blocks at once"),
        pytest.param(60_000, 0.05, PATIENCE_S / 2, id="small ones by a trim"),
    ],
)
def test_what_is_freed_goes_back_whatever_lies_between(
    nbytes: int, trim_s: float, patience_s: float
) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", HOLES, str(nbytes), str(trim_s), str(patience_s)],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stdout
    most, left = map(int, printed.split())
    assert most > 70 << 20 and left < 10 << 20


def heaps_of_threads(pid: int) -> int:
    """The heaps beside the first one: glibc reserves 64 MiB of addresses for each, aligned, and
    makes the part accessible that it uses."""
    heaps, used = 0, (0, 0)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, access, *_ = line.split()
        start, end = (int(part, 16) for part in addresses.split("-"))
        if access == "rw-p":
            used = (start, end)
        elif access == "---p" and start == used[1] and used[0] % HEAP_BYTES == 0:
            heaps += end == used[0] + HEAP_BYTES
    return heaps


def test_threads_of_a_transport_worker_share_heaps() -> None:
    with ExitStack() as stack:
        worker = WorkerProcess()
        stack.callback(worker.close)
        for _ in range(6):
            sock, _ = map(stack.enter_context, socket.socketpair())
            serve = Serve("receiver", None, "", PATIENCE_S, PATIENCE_S, send_files=False)
            orders = stack.enter_context(worker.serve(serve, sock, None))
            orders.settimeout(PATIENCE_S)
            assert isinstance(read_report(memoryview(orders.recv(PACKET_BYTES))), Started)
        assert heaps_of_threads(worker.pid) <= ARENAS - 1
