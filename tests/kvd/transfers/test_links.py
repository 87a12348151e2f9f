"""The links of a kvd: few, forgotten when idle, and never a reason for the event loop to wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from prfaas.config.address import Address
from prfaas.errors import InputError, TransferFailed
from prfaas.kvd.transfers.links import LINK_IDLE_S, Links
from prfaas.transport.link import ConnectionBudget, LinkOptions
from prfaas.transport.listener import Listener
from prfaas_lab.testing import FakeClock
from tests.transport.ends import Owner, expect, grant_for, nothing_leaks, segments, send
from tests.waiting import PATIENCE_S, wait_until

CONTENTS = segments(1000)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def links(clock: FakeClock) -> Iterator[Links]:
    with nothing_leaks():
        made = Links(
            LinkOptions(connections=2, silence_s=1e6, stall_s=1e6),
            tls=None,
            budget=ConnectionBudget(8),
            clock=clock,
            max_links=3,
        )
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as made:
        yield made


def deliver(links: Links, listener: Listener) -> None:
    owner = Owner()
    grant = expect(listener, CONTENTS, owner)
    send(links.to(str(Address(*listener.address))), grant, CONTENTS).done.result(PATIENCE_S)
    assert owner.wait() is None


def test_a_receiver_has_one_link_however_its_address_is_written(links: Links) -> None:
    assert links.to("127.0.0.1:7") is links.to("127.0.0.1:07")
    assert len(links) == 1
    with pytest.raises(InputError, match="grant: 'nowhere' is not an address"):
        links.to("nowhere")


def test_an_idle_link_is_forgotten_with_its_threads(
    links: Links, listener: Listener, clock: FakeClock
) -> None:
    before = threading.active_count()
    deliver(links, listener)
    links.sample()
    assert [report.peer for report in links.reports] == [str(Address(*listener.address))]
    clock.advance(LINK_IDLE_S)
    links.sample()
    assert len(links) == 0 and links.reports == ()
    wait_until(lambda: threading.active_count() <= before)


def test_a_transfer_that_starts_while_its_link_is_dropped_works(
    links: Links, listener: Listener, clock: FakeClock
) -> None:
    for _ in range(5):
        deliver(links, listener)
        clock.advance(LINK_IDLE_S)
        links.sample()  # the threads of the dropped link are still ending


def test_a_link_that_is_about_to_be_used_is_kept(
    links: Links, listener: Listener, clock: FakeClock
) -> None:
    deliver(links, listener)
    clock.advance(LINK_IDLE_S)
    link = links.to(str(Address(*listener.address)))
    links.sample()
    send(link, expect(listener, CONTENTS, Owner()), CONTENTS).done.result(PATIENCE_S)


def test_a_link_is_kept_while_a_transfer_waits(
    links: Links, listener: Listener, clock: FakeClock
) -> None:
    address = str(Address(*listener.address))
    transfer = links.to(address).open(expect(listener, CONTENTS, Owner()), {"full0/0/0-64": 1000})
    wait_until(lambda: transfer.opened)
    clock.advance(LINK_IDLE_S)
    links.sample()
    assert len(links) == 1
    for name, content in CONTENTS.items():
        transfer.ready(name, memoryview(content))
    transfer.done.result(PATIENCE_S)


def test_the_number_of_links_is_bounded(links: Links, listener: Listener, clock: FakeClock) -> None:
    for port in (1, 2, 3):
        links.to(f"127.0.0.1:{port}")
        clock.advance(1)
    oldest, newest = links.to("127.0.0.1:2"), links.to("127.0.0.1:3")
    deliver(links, listener)  # the link to port 1 made room, which was not used for longest
    assert len(links) == 3
    assert links.to("127.0.0.1:2") is oldest and links.to("127.0.0.1:3") is newest


def test_links_with_transfers_are_not_dropped_for_a_new_one(
    links: Links, listener: Listener
) -> None:
    transfers = [
        send(links.to(f"127.0.0.1:{port}"), grant_for(CONTENTS), CONTENTS) for port in (1, 2, 3)
    ]
    with pytest.raises(TransferFailed, match="transfers to 3 receivers are under way"):
        links.to(str(Address(*listener.address)))
    for transfer in transfers:
        assert not transfer.done.done()
