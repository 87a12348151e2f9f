"""Links to receivers that are gone: what a link without transfers still costs is nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from prfaas.errors import TransferFailed
from prfaas.testing import FakeClock
from prfaas.transport.link import ConnectionBudget, LinkOptions, TransferLink
from tests.transport.ends import grant_for, segments, send
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
