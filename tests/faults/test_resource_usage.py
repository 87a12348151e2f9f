from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing

from prfaas_lab.faults.resource_usage import has_work, measure_process, measure_usage


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


def test_a_booking_that_is_left_is_work() -> None:
    def state(in_flight: int = 0, **node: int) -> dict[str, object]:
        nodes = [{"node": "east-0", "queued": 0, "active": 0, **node}, {"node": None}]
        return {"requests": {"in_flight": in_flight}, "clusters": [{"nodes": nodes}]}

    assert not has_work(state())
    assert has_work(state(in_flight=1)) and has_work(state(queued=1)) and has_work(state(active=1))
