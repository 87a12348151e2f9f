"""Links, listeners and relays at IPv6 addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prfaas.clock import MonotonicClock
from prfaas.config.address import Address, parse_address
from prfaas.errors import InputError
from prfaas.kvd.transfers.links import Links
from prfaas.measure.path_check import check_path
from prfaas.transport.link import ConnectionBudget, LinkOptions, TransferLink
from prfaas.transport.listener import Listener
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.transport.ends import Owner, expect, nothing_leaks, segments, send
from tests.waiting import PATIENCE_S

CONTENTS = segments(300_000, 5)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with nothing_leaks(), Listener("::1") as made:
        yield made


def deliver(listener: Listener, link: TransferLink) -> None:
    owner = Owner()
    send(link, expect(listener, CONTENTS, owner), CONTENTS).done.result(PATIENCE_S)
    assert owner.wait() is None
    assert owner.memory == CONTENTS


def test_a_link_to_an_ipv6_address_is_reported_with_brackets(listener: Listener) -> None:
    address = str(listener.address)
    assert address == f"[::1]:{listener.address.port}"
    links = Links(LinkOptions(), tls=None, budget=ConnectionBudget(4))
    try:
        deliver(listener, links.to(address))
        links.sample()
        assert [report.peer for report in links.reports] == [address]
    finally:
        links.close()


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_the_ipv6_wildcard_is_reached_at_addresses_of_both_kinds(host: str) -> None:
    with nothing_leaks(), Listener("::") as listener:
        assert str(listener.address).startswith("[::]:")
        with TransferLink((host, listener.address.port)) as link:
            deliver(listener, link)


def test_a_relay_between_ipv6_addresses(listener: Listener) -> None:
    with Relay(Address("::1", 0), listener.address, Conditions()) as relay:
        assert parse_address(str(relay.address), "relay") == relay.address
        with TransferLink(relay.address) as link:
            deliver(listener, link)


def test_a_relay_from_ipv4_to_ipv6(listener: Listener) -> None:
    with Relay(Address("127.0.0.1", 0), listener.address, Conditions()) as relay:
        with TransferLink(relay.address) as link:
            deliver(listener, link)


def test_the_path_check_of_an_ipv6_address(listener: Listener) -> None:
    found = check_path(
        listener.address, tls=None, connections=(1,), seconds=0.1, clock=MonotonicClock()
    )
    assert found.healthy and found.address == str(listener.address)
    assert found.path_mtu_bytes is not None and found.path_mtu_bytes >= 1280


def test_a_host_that_cannot_be_a_name_is_named() -> None:
    host = "x" * 70
    with pytest.raises(InputError, match="is not a host"):
        Listener(host)
    with pytest.raises(InputError, match="is not a host"):
        Relay(Address("127.0.0.1", 0), Address(host, 1), Conditions())
