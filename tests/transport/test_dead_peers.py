"""Links to receivers that are gone: what a link without transfers still costs is nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from prfaas.errors import TransferFailed
from prfaas.transport.link import ConnectionBudget, LinkOptions, TransferLink
from prfaas.transport.listener import Listener
from prfaas.transport.messages import HELLO, encode
from prfaas.transport.wire import (
    MAX_MANIFEST_BYTES,
    Decoder,
    Kind,
    encode_message,
    encode_sequences,
)
from prfaas_lab.testing import FakeClock
from tests.transport.ends import (
    Owner,
    expect,
    grant_for,
    nothing_leaks,
    on_file,
    segments,
    send,
)
from tests.waiting import PATIENCE_S, wait_until

CONTENTS = segments(1000)
OPTIONS = LinkOptions()


@contextmanager
def port_without_listener() -> Iterator[tuple[str, int]]:
    """The port is taken, so that no other process listens on it meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()


@contextmanager
def port_that_does_not_answer() -> Iterator[tuple[str, int]]:
    """Connection requests are dropped: the queue of the port is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


def link_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("prfaas-link", "prfaas-connection")]


def free(budget: ConnectionBudget) -> int:
    taken = 0
    while budget.take():
        taken += 1
    for _ in range(taken):
        budget.give_back()
    return taken


def test_thirty_dead_peers_cost_nothing_after_their_transfers() -> None:
    clock, budget = FakeClock(), ConnectionBudget(64)
    with ExitStack() as stack:
        links = [
            TransferLink(stack.enter_context(port_without_listener()), clock=clock, budget=budget)
            for _ in range(30)
        ]
        for link in links:
            stack.enter_context(link)
        transfers = [send(link, grant_for(CONTENTS), CONTENTS) for link in links]
        clock.advance(OPTIONS.open_s)
        for transfer in transfers:
            with pytest.raises(TransferFailed, match="not opened"):
                transfer.done.result(PATIENCE_S)
        clock.advance(OPTIONS.stall_s)
        wait_until(lambda: link_threads() == [])
        assert free(budget) == 64


def test_an_abort_that_cannot_be_delivered_is_dropped() -> None:
    clock = FakeClock()
    with port_without_listener() as address, TransferLink(address, clock=clock) as link:
        send(link, grant_for(CONTENTS), CONTENTS).abort("the client has left")
        clock.advance(OPTIONS.stall_s)
        wait_until(lambda: not link.transfers.busy)
        wait_until(lambda: link_threads() == [])


def test_a_connection_attempt_ends_with_the_last_transfer() -> None:
    clock, budget = FakeClock(), ConnectionBudget(8)
    options = LinkOptions(connect_s=1.5 * PATIENCE_S)
    with port_that_does_not_answer() as address:
        with TransferLink(address, options=options, clock=clock, budget=budget) as link:
            transfer = send(link, grant_for(CONTENTS), CONTENTS)
            assert len(link_threads()) > 1
            transfer.abort("the client has left")
            clock.advance(OPTIONS.stall_s)
            wait_until(lambda: link_threads() == [])
            assert free(budget) == 8


class Deaf:
    """A receiver that opens a transfer and never acknowledges its bytes, but is not silent."""

    def __init__(self, server: socket.socket) -> None:
        self._sock, _ = server.accept()
        self._sock.settimeout(PATIENCE_S)
        decoder = Decoder(MAX_MANIFEST_BYTES)
        answers = {Kind.HELLO: Kind.WELCOME, Kind.PROBE: Kind.ALIVE, Kind.OPEN: Kind.OPENED}
        opened = False
        while not opened:
            for frame in decoder.feed(self._sock.recv(65536)):
                kind = frame.header.kind
                body = encode(HELLO) if kind is Kind.HELLO else b""
                key = frame.header.transfer_id
                self._sock.sendall(encode_message(answers[kind], body, transfer_id=key))
                opened = opened or kind is Kind.OPEN
        self._sock.setblocking(False)

    def talk(self) -> None:
        """Reads what has arrived, and acknowledges a frame that was never sent."""
        try:
            while self._sock.recv(1 << 20):
                pass
        except BlockingIOError:
            self._sock.sendall(encode_message(Kind.ACK, encode_sequences([1 << 60])))
        except ConnectionError:
            pass  # the sender has cut the connection

    def close(self) -> None:
        self._sock.close()


def test_the_senders_memory_is_free_although_a_receiver_never_acknowledges() -> None:
    clock, contents = FakeClock(), {"s0": bytes(500_000)}
    options = LinkOptions(connections=1)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        on_file(contents) as slices,
        TransferLink(server.getsockname(), options=options, clock=clock) as link,
    ):
        server.settimeout(PATIENCE_S)
        transfer = link.open(grant_for(contents), {"s0": 500_000})
        with closing(Deaf(server)) as deaf:
            transfer.ready_all(slices)
            wait_until(lambda: link.stats().in_flight_bytes == 500_000)
            transfer.abort("the client has left")

            def done_while_the_receiver_talks() -> bool:
                deaf.talk()
                clock.advance(0.1)
                return transfer.done.done()

            wait_until(done_while_the_receiver_talks)
        with pytest.raises(TransferFailed, match="the client has left"):
            transfer.done.result(PATIENCE_S)


# A machine that is short of threads ---------------------------------------------------------------


def fail_to_start(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    start, left = threading.Thread.start, [times]

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == name and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)


def test_a_transfer_fails_at_once_where_no_thread_can_watch_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_to_start(monkeypatch, "prfaas-link", 1)
    with nothing_leaks(), Listener() as listener, TransferLink(listener.address) as link:
        grant = expect(listener, CONTENTS, owner := Owner())
        with pytest.raises(TransferFailed, match="cannot start a thread"):
            send(link, grant, CONTENTS)
        assert not link.busy
        send(link, grant, CONTENTS).done.result(PATIENCE_S)
        assert owner.memory == CONTENTS


@pytest.mark.parametrize("name", ["prfaas-connection", "prfaas-listener"])
def test_connections_are_made_when_there_are_threads_again(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    budget = ConnectionBudget(3)
    with nothing_leaks(), Listener() as listener:
        fail_to_start(monkeypatch, name, 3)
        with TransferLink(listener.address, budget=budget) as link:
            owner = Owner()
            send(link, expect(listener, CONTENTS, owner), CONTENTS).done.result(PATIENCE_S)
            assert owner.memory == CONTENTS
        assert free(budget) == 3
