"""A kvd whose answers are wrong: no byte outside of its memory is used, and nothing stays held."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from prfaas.errors import InputError, PeerError, WireError
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.messages import (
    Abort,
    Answer,
    Attach,
    Begin,
    Call,
    Done,
    FrameReader,
    LeaseTicket,
    NumberedAnswer,
    Pin,
    Register,
    Registered,
    Release,
    UnitPages,
    decode_call,
    frame,
)
from prfaas.kvspec import Segment
from prfaas.types import TransferId
from tests.cache.builders import BLOCK, SPECS, layout_of
from tests.kvd.fuzz.oracle import open_descriptors
from tests.kvd.hosts import COMPAT, begun
from tests.waiting import PATIENCE_S, wait_until

SPEC = SPECS["full"]
PAGE_BYTES, PAGES = layout_of(SPEC).page_bytes, 16
UNIT_PAGES = layout_of(SPEC).pages(0)
GOOD = Registered("kvd", "http://kvd", "kvd:1", PAGE_BYTES, PAGES, instance="one")


class WrongKvd:
    """Answers each call as it is told to."""

    def __init__(self, path: Path) -> None:
        self.registered: list[tuple[Registered, int]] = []  # next first; then `GOOD`
        self.registrations = 0
        self.ticket: LeaseTicket | None = None
        self.calls: list[Call] = []
        self.path = path
        self._memory = os.memfd_create("wrong")
        os.ftruncate(self._memory, PAGE_BYTES * PAGES)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """The kvd exits, and another one starts at once."""
        assert self._connection is not None
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._listener.close()
        os.close(self._memory)

    def _serve(self) -> None:
        while True:
            try:
                self._connection, _ = self._listener.accept()
            except OSError:
                return
            with self._connection, suppress(OSError):
                frames = FrameReader()
                while data := self._connection.recv(1 << 16):
                    for body in frames.feed(data):
                        numbered = decode_call(body)
                        self._answer(self._connection, numbered.number, numbered.call)

    def _answer(self, sock: socket.socket, number: int, call: Call) -> None:
        if isinstance(call, Register):
            self.registrations += 1
            answer, descriptors = self.registered.pop(0) if self.registered else (GOOD, 1)
            data = frame(NumberedAnswer(number, answer))
            socket.send_fds(sock, [data], [self._memory] * descriptors)
            return
        self.calls.append(call)
        given: Answer = Done()
        if isinstance(call, Begin | Pin | Attach) and self.ticket is not None:
            given = self.ticket
        sock.sendall(frame(NumberedAnswer(number, given)))


@pytest.fixture
def wrong(tmp_path: Path) -> Iterator[WrongKvd]:
    kvd = WrongKvd(tmp_path / "kvd.sock")
    yield kvd
    kvd.close()


@contextmanager
def registered(kvd: WrongKvd) -> Iterator[KvdClient]:
    with KvdClient(kvd.path, engine_id="e", spec=SPEC, block_tokens=BLOCK, compat=COMPAT) as client:
        yield client


def described(page_bytes: int, pages: int, descriptors: int = 1) -> tuple[Registered, int]:
    return Registered("kvd", "http://kvd", "kvd:1", page_bytes, pages, instance="one"), descriptors


WRONG_MEMORY = [
    described(PAGE_BYTES, PAGES + 1),
    described(0, PAGES),
    described(PAGE_BYTES, 0),
    described(-PAGE_BYTES, PAGES),
    described(-PAGE_BYTES, -PAGES),
    described(PAGE_BYTES, 1 << 62),
    described(PAGE_BYTES, PAGES, 0),
]


@pytest.mark.parametrize("answer", WRONG_MEMORY)
def test_memory_that_is_not_as_described_is_not_mapped(
    wrong: WrongKvd, answer: tuple[Registered, int]
) -> None:
    before = open_descriptors("self")
    wrong.registered.append(answer)
    with pytest.raises(PeerError), registered(wrong):
        pass
    wait_until(lambda: open_descriptors("self") == before)


@pytest.mark.parametrize("answer", WRONG_MEMORY)
def test_an_engine_registers_again_after_a_wrong_answer(
    wrong: WrongKvd, answer: tuple[Registered, int]
) -> None:
    """The thread that connects again outlives it."""
    with registered(wrong) as client:
        wrong.registered.append(answer)
        wrong.drop()
        wait_until(lambda: wrong.registrations == 3 and client.connected)


def ticket(*pages: int, group: int = 0, where: int = 0, writable: bool = True) -> LeaseTicket:
    units = (UnitPages(group, where, pages),)
    return LeaseTicket(
        lease_id=7,
        tokens=BLOCK,
        match_tokens=0 if writable else BLOCK,
        skip_tokens={"full0": 0},
        checkpoint_tokens=(),
        readable=() if writable else units,
        writable=units if writable else (),
        instance="one",
    )


OWN = tuple(range(UNIT_PAGES))


def ends_of(kvd: WrongKvd) -> list[Abort | Release]:
    return [call for call in kvd.calls if isinstance(call, Abort | Release)]


@pytest.mark.parametrize("pages", [(*OWN[1:], PAGES), (*OWN, UNIT_PAGES)])
def test_a_ticket_that_does_not_suit_the_arena_is_returned(
    wrong: WrongKvd, pages: tuple[int, ...]
) -> None:
    with registered(wrong) as client:
        wrong.ticket = ticket(*pages)
        with pytest.raises(WireError, match="ticket"):
            client.begin([bytes(32)], BLOCK)
        wrong.ticket = ticket(*pages, writable=False)
        with pytest.raises(WireError, match="ticket"):
            client.pin([bytes(32)])
        with pytest.raises(WireError, match="ticket"):
            client.attach(TransferId("00000000-0000-0000-0000-000000000000"))
        kinds = [(type(call), call.lease_id) for call in ends_of(wrong)]
        assert kinds == [(Abort, 7), (Release, 7), (Release, 7)]
        assert client.connected, "other leases go on"
        wrong.ticket = ticket(*OWN)
        lease = begun(client.begin([bytes(32)], BLOCK))
        views = lease.buffers(Segment("full0", 0, 0, BLOCK))
        assert sum(view.nbytes for view in views) == BLOCK * 8


@pytest.mark.parametrize(
    "wrong_ticket",
    [
        ticket(*OWN[1:], -1),
        ticket(*OWN[1:], 1 << 62),
        ticket(*OWN, group=1),
        ticket(*OWN, group=-1),
        ticket(*OWN, where=1 << 70),
        ticket(),
    ],
)
def test_a_ticket_that_another_process_passes_on_is_checked(
    wrong: WrongKvd, wrong_ticket: LeaseTicket
) -> None:
    with registered(wrong) as client:
        with pytest.raises(InputError, match="ticket"):
            client.join_write(wrong_ticket)
        assert not ends_of(wrong), "its owner ends the lease"
