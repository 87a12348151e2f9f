"""A kvd with an SSD tier whose writes and reads wait until the test lets them go on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prfaas.cache.storage.ssd import SpillFile
from prfaas.contracts.kvd_api import PullPrefix, shapes_of
from prfaas.kvd.engine_socket.messages import (
    Begin,
    Done,
    Flush,
    FrameReader,
    LeaseTicket,
    NumberedAnswer,
    NumberedCall,
    Ready,
    Register,
    decode_answer,
    frame,
)
from prfaas.kvd.store import StoreOptions
from prfaas.types import Grant
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, SPEC, Host, assert_holds, begun, fill, kvd, names, prompt_of
from tests.waiting import PATIENCE_S, wait_until

TOKENS = 40
FIRST, SECOND = prompt_of(TOKENS), prompt_of(TOKENS, seed=1)
MEMORY_BYTES = 3_000  # one prompt of 40 tokens fits, and two do not


class Gate:
    """Every write and read of the SSD passes it. Closed, it holds them until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.expired = False  # the test did not open the gate: it could not go on itself
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        if not self._open.wait(PATIENCE_S):
            self.expired = True
            self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()

    class GatedFile(SpillFile):
        def write(self, *arguments: Any) -> Any:
            made.pass_through()
            return super().write(*arguments)

        def read(self, *arguments: Any) -> Any:
            made.pass_through()
            return super().read(*arguments)

    monkeypatch.setattr("prfaas.kvd.store.SpillFile", GatedFile)
    # The kvd's patience must not end before the test has opened the gate.
    monkeypatch.setattr("prfaas.kvd.store.SSD_WAIT_S", 2 * PATIENCE_S, raising=False)
    yield made
    made.open()


@pytest.fixture
def host(tmp_path: Path, gate: Gate) -> Iterator[Host]:
    """Its memory is full: it keeps `FIRST`."""
    store = StoreOptions(memory_bytes=MEMORY_BYTES, ssd=tmp_path, ssd_bytes=1 << 20)
    with kvd(tmp_path, store=store) as made:
        keep(made, FIRST)
        yield made


def keep(host: Host, prompt: list[int]) -> None:
    with host.engine() as engine:
        lease = begun(engine.begin(names(prompt), len(prompt)))
        fill(lease, prompt)
        lease.commit()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def assert_others_are_answered(host: Host) -> None:
    assert host.get("/health") == (200, b"ok")
    assert host.stats()["pool"] is not None
    with host.engine("another") as engine:
        engine.flush()


def test_a_grant_that_evicts_does_not_stop_the_event_loop(
    host: Host, gate: Gate, thread: ThreadPoolExecutor
) -> None:
    gate.close()
    opening = thread.submit(host.open, SECOND)
    assert gate.reached.wait(PATIENCE_S)
    assert_others_are_answered(host)
    assert not gate.expired, "the answers came after the write to the SSD"
    gate.open()
    assert isinstance(opening.result(PATIENCE_S), Grant)
    counters = host.stats()["pool"]["counters"]
    assert counters["spilled_blocks"] > 0 and counters["evicted_blocks"] == 0


def test_a_prefix_that_is_read_back_does_not_stop_the_event_loop(
    host: Host, gate: Gate, thread: ThreadPoolExecutor
) -> None:
    keep(host, SECOND)
    with host.engine() as engine:
        gate.close()
        pinning = thread.submit(engine.pin, names(FIRST))
        assert gate.reached.wait(PATIENCE_S)
        assert_others_are_answered(host)
        assert not gate.expired, "the answers came after the read from the SSD"
        gate.open()
        with begun(pinning.result(PATIENCE_S)) as found:
            assert found.tokens == TOKENS
            assert_holds(found, FIRST, TOKENS)
    wait_until(lambda: host.in_use() == (0, 0))


class RawEngine:
    """An engine's connection, frame by frame."""

    def __init__(self, host: Host) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(host.socket))
        self._frames = FrameReader()
        self._answers: list[NumberedAnswer] = []
        register = Register("raw", shapes_of(SPEC), BLOCK, COMPAT)
        self.socket.sendall(frame(NumberedCall(1, register)))
        assert self.answer().number == 1

    def answer(self) -> NumberedAnswer:
        while not self._answers:
            data = self.socket.recv(1 << 16)
            assert data, "the kvd has closed the connection"
            self._answers += [decode_answer(body) for body in self._frames.feed(data)]
        return self._answers.pop(0)


def test_later_calls_of_a_connection_wait_for_the_call_that_uses_the_ssd(
    host: Host, gate: Gate
) -> None:
    engine = RawEngine(host)
    with engine.socket:
        gate.close()
        begin = frame(NumberedCall(2, Begin(tuple(names(SECOND)), TOKENS)))
        engine.socket.sendall(begin + frame(NumberedCall(3, Flush())))
        assert gate.reached.wait(PATIENCE_S)
        assert_others_are_answered(host)
        assert not gate.expired, "the answers came after the write to the SSD"
        engine.socket.sendall(frame(NumberedCall(4, Flush())))
        gate.open()
        answers = [engine.answer() for _ in range(3)]
        assert [one.number for one in answers] == [2, 3, 4]
        assert isinstance(answers[0].answer, LeaseTicket)
        assert answers[1].answer == answers[2].answer == Done()
    wait_until(lambda: host.in_use() == (0, 0))


def test_the_calls_that_wait_are_bounded_and_all_answered(host: Host, gate: Gate) -> None:
    engine = RawEngine(host)
    calls = 300_000  # more than the server keeps, and more than a socket's buffers hold
    with engine.socket, ThreadPoolExecutor(1) as sender:
        gate.close()
        engine.socket.sendall(frame(NumberedCall(2, Begin(tuple(names(SECOND)), TOKENS))))
        assert gate.reached.wait(PATIENCE_S)
        # Ready gets no answer. The flush at the end is answered after all of them.
        ready = frame(NumberedCall(0, Ready(0, ()))) * calls
        sending = sender.submit(engine.socket.sendall, ready + frame(NumberedCall(3, Flush())))
        assert_others_are_answered(host)
        assert not sending.done(), "the kvd has read everything"
        gate.open()
        assert [engine.answer().number for _ in range(2)] == [2, 3]
        sending.result(PATIENCE_S)
    wait_until(lambda: host.in_use() == (0, 0))


def test_a_connection_that_closes_while_its_call_waits_leaves_nothing(
    host: Host, gate: Gate
) -> None:
    engine = RawEngine(host)
    with engine.socket:
        gate.close()
        engine.socket.sendall(frame(NumberedCall(2, Begin(tuple(names(SECOND)), TOKENS))))
        assert gate.reached.wait(PATIENCE_S)
    wait_until(lambda: not host.stats()["engines"])
    assert not gate.expired, "the kvd learnt of the exit after the write to the SSD"
    gate.open()
    wait_until(lambda: host.in_use() == (0, 0))
    assert host.stats()["held_leases"] == 0


def test_a_grant_does_not_wait_for_an_ssd_that_hangs(
    host: Host, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.kvd.store.SSD_WAIT_S", 0.05)
    gate.close()
    grant = host.grant(SECOND)
    counters = host.stats()["pool"]["counters"]
    assert counters["dropped_blocks"] > 0 and counters["spilled_blocks"] == 0
    gate.open()
    assert host.post(f"/v1/transfers/{grant.transfer_id}/abort", {})[0] == 200
    wait_until(lambda: host.in_use() == (0, 0))
    keep(host, SECOND)
    with host.engine() as engine, begun(engine.pin(names(SECOND))) as found:
        assert_holds(found, SECOND, TOKENS)


def test_a_kvd_ends_while_a_request_waits_for_its_ssd(tmp_path: Path, gate: Gate) -> None:
    store = StoreOptions(memory_bytes=MEMORY_BYTES, ssd=tmp_path, ssd_bytes=1 << 20)
    with kvd(tmp_path, store=store) as host:
        keep(host, FIRST)
        engine = RawEngine(host)
        gate.close()
        with engine.socket:
            engine.socket.sendall(frame(NumberedCall(2, Begin(tuple(names(SECOND)), TOKENS))))
            assert gate.reached.wait(PATIENCE_S)
        # From here on the kvd ends, and its SSD's thread after the present write.
        threading.Thread(target=gate.open).start()


def test_a_full_disk_costs_blocks_and_nothing_else(tmp_path: Path) -> None:
    store = StoreOptions(memory_bytes=MEMORY_BYTES, ssd=Path("/dev/full"), ssd_bytes=1 << 20)
    with kvd(tmp_path, store=store) as host:
        for seed in range(3):
            keep(host, prompt_of(TOKENS, seed=seed))
        counters = host.stats()["pool"]["counters"]
        assert counters["dropped_blocks"] > 0 and counters["spilled_blocks"] == 0
        assert host.in_use() == (0, 0)


def test_a_prefix_on_ssd_can_be_pulled(tmp_path: Path) -> None:
    store = StoreOptions(memory_bytes=MEMORY_BYTES, ssd=tmp_path, ssd_bytes=1 << 20)
    with (
        kvd(tmp_path, name="s", store=store) as here,
        kvd(tmp_path, name="t", store=store) as there,
    ):
        keep(here, FIRST)
        keep(here, SECOND)
        keep(there, SECOND)
        assert here.stats()["pool"]["occupancy"]["spilled_units"] > 0
        status, body = there.post("/v1/pull", PullPrefix(here.url, tuple(names(FIRST))))
        assert status == 200, body
        with there.engine() as engine, begun(engine.pin(names(FIRST))) as found:
            assert found.tokens == TOKENS
            assert_holds(found, FIRST, TOKENS)
        assert there.stats()["pool"]["counters"]["dropped_blocks"] == 0
        wait_until(lambda: here.in_use() == there.in_use() == (0, 0))
