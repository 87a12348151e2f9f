"""Processes that a benchmark starts, and ports for them."""

from __future__ import annotations

import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prfaas.launch.attached_process import PROGRAM, attached_prefix

_END_S = 10.0
_PORTS = range(10_000, 32_768)  # Linux chooses from 32,768 on


def free_ports(count: int) -> list[int]:
    """Ports that the system does not choose for connections: one that is free now is still free
    when its process has started."""
    with ExitStack() as stack:
        # All are held at once, so that no two are the same.
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                break
            try:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            found.append(port)
        return found


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
