from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing

from prfaas.faults.resource_usage import measure_process, measure_usage


def test_sockets_and_memory_of_a_process() -> None:
    before = measure_process(os.getpid())
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(closing(socket.socket()))
        block = bytearray(os.urandom(1)) * (64 << 20)
        now = measure_process(os.getpid())
    assert now.sockets == before.sockets + 5
    assert now.own_bytes >= before.own_bytes + len(block) // 2


def test_who_has_ended_holds_nothing() -> None:
    assert measure_usage({"gone": 2**22 + 1, "here": os.getpid()}).keys() == {"here"}
