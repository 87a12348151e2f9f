"""Processes that a benchmark starts, and ports for them."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prfaas.launch.attached_process import PROGRAM, attached_prefix

_END_S = 10.0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        # All are held at once, so that no two are the same.
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in held]


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process also ends when the benchmark is killed."""
    attached = [*attached_prefix(), PROGRAM, *command]
    with log.open("wb") as stream:
        started = subprocess.Popen(attached, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(_END_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
