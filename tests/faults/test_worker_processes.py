from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

from prfaas_lab.faults.worker_processes import children_of, send_signal
from tests.waiting import PATIENCE_S, wait_until


def sleeping(stack: ExitStack) -> subprocess.Popen[bytes]:
    """A child whose name has spaces and parentheses in it, as a process may have."""
    code = "import sys; open('/proc/self/comm', 'w').write('a) b ('); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    stack.callback(process.communicate)
    return process


def named(process: subprocess.Popen[bytes]) -> bool:
    with open(f"/proc/{process.pid}/comm", encoding="ascii") as file:
        return file.read() == "a) b (\n"


def test_children_are_found_until_they_end() -> None:
    before = set(children_of(os.getpid()))
    with ExitStack() as stack:
        first, second = sleeping(stack), sleeping(stack)
        wait_until(lambda: named(first) and named(second))
        found = [pid for pid in children_of(os.getpid()) if pid not in before]
        assert found == [first.pid, second.pid], "the oldest first"
        send_signal([first.pid], signal.SIGKILL)
        # Nothing has waited for it yet, so the process is still listed in /proc.
        wait_until(lambda: first.pid not in children_of(os.getpid()))
        first.wait(PATIENCE_S)
        send_signal([first.pid], signal.SIGKILL)  # it is gone: no error
        assert second.pid in children_of(os.getpid())
