from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing

from prfaas.faults.resource_usage import held, held_by


def test_sockets_and_memory_of_a_process() -> None:
    before = held_by(os.getpid())
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(closing(socket.socket()))
        block = bytearray(os.urandom(1)) * (64 << 20)
        now = held_by(os.getpid())
    assert now.sockets == before.sockets + 5
    assert now.own_bytes >= before.own_bytes + len(block) // 2


def test_who_has_ended_holds_nothing() -> None:
    assert held({"gone": 2**22 + 1, "here": os.getpid()}).keys() == {"here"}
