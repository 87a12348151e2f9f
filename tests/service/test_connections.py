"""Which connections a service keeps."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.service.connections import (
    MOST,
    MOST_LOOKS,
    RESERVED,
    Bounds,
    Connection,
    ConnectionTable,
    Proxies,
    Reason,
    bounds_of_process,
    origin,
)

A, B = "10.0.0.1", "10.0.0.2"
BOUNDS = Bounds(16)  # 8 from one address, 8 new ones, 4 new ones from one address


def opened(table: ConnectionTable, host: str = A) -> Connection:
    made = table.admit(host).connection
    assert made is not None
    table.check()
    return made


def used(table: ConnectionTable, host: str = A, *, known: bool = False) -> Connection:
    """Idle after a request."""
    made = opened(table, host)
    table.begin(made)
    table.end(made, known=known)
    return made


def test_the_oldest_new_one_of_an_address_is_closed_first() -> None:
    table = ConnectionTable(BOUNDS)
    other = opened(table, B)
    first, *_ = [opened(table) for _ in range(BOUNDS.new_per_address)]
    admission = table.admit(A)
    assert admission.connection is not None and list(admission.closed) == [first]
    assert table.closed == {Reason.ADDRESS: 1}
    assert not first.counted and other.counted


def test_a_known_connection_outlives_strangers_and_a_busy_one_all_others() -> None:
    table = ConnectionTable(BOUNDS)
    busy = opened(table)
    table.begin(busy)
    known = used(table, known=True)
    strangers = [used(table) for _ in range(BOUNDS.per_address - 2)]
    for stranger in strangers:
        admission = table.admit(A)
        assert list(admission.closed) == [stranger]
        assert admission.connection is not None
        table.begin(admission.connection)
    assert list(table.admit(A).closed) == [known]
    table.check()


def test_a_connection_is_refused_where_all_others_are_busy() -> None:
    table = ConnectionTable(BOUNDS)
    for _ in range(BOUNDS.per_address):
        table.begin(opened(table))
    assert table.admit(A).connection is None
    assert table.admit(B).connection is not None, "of another address"
    assert table.closed == {Reason.ADDRESS: 1}


def test_a_search_looks_at_few_busy_ones_and_the_next_one_at_others() -> None:
    """One that ends with nothing closes the new connection, although there is an idle one."""
    table = ConnectionTable(Bounds(2 * (3 * MOST_LOOKS + 1)))
    made = [used(table) for _ in range(table.bounds.per_address)]
    for one in made[:-1]:
        table.begin(one)
    for _ in range(3):
        assert table.admit(A).connection is None
    admission = table.admit(A)
    assert admission.connection is not None and list(admission.closed) == made[-1:]


def test_many_addresses_share_the_total() -> None:
    table = ConnectionTable(BOUNDS)
    made = [used(table, f"10.0.1.{number}") for number in range(BOUNDS.total)]
    assert list(table.admit(B).closed) == made[:1] and len(table) == BOUNDS.total
    table.check()


def test_a_proxy_has_as_many_as_there_are_and_loses_none() -> None:
    table = ConnectionTable(BOUNDS, Proxies([ip_network("10.0.0.0/30")]))
    proxies = [opened(table) for _ in range(BOUNDS.total)]
    assert len(table) == BOUNDS.total and all(one.counted for one in proxies)
    assert table.admit("192.0.2.1").connection is None


def test_a_late_first_request_counts_once() -> None:
    table = ConnectionTable(BOUNDS)
    late, prompt = opened(table), opened(table)
    table.begin(prompt)
    assert table.close_slow(late) and not table.close_slow(late)
    assert not table.close_slow(prompt)
    assert table.closed == {Reason.SLOW: 1} and len(table) == 1


def test_a_connection_may_end_after_it_was_closed() -> None:
    table = ConnectionTable(BOUNDS)
    closed = opened(table)
    assert table.make_room() is closed and table.make_room() is None
    table.begin(closed)
    table.end(closed, known=True)
    assert not table.remove(closed) and len(table) == 0


def warnings_of(hosts: Iterable[str]) -> list[str]:
    """Of busy connections from these hosts, one after the other."""
    table, found = ConnectionTable(Bounds(100)), []
    for host in hosts:
        admission = table.admit(host)
        assert admission.connection is not None
        table.begin(admission.connection)
        found.append(admission.warning)
    return found


def test_a_warning_comes_once_before_the_end() -> None:
    everywhere = warnings_of(f"10.0.{number}.1" for number in range(100))
    assert everywhere.index("80 connections, and the most is 100") == 79
    assert sum(map(bool, everywhere)) == 1
    here = warnings_of([A] * 50)
    expected = "40 connections from 10.0.0.1, and the most from one address is 50"
    assert here.index(expected) == 39 and sum(map(bool, here)) == 1


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a name", "a name"),
    ],
)
def test_what_counts_as_one_address(host: str, expected: str) -> None:
    assert origin(host) == expected


def test_proxies() -> None:
    proxies = Proxies([ip_network("10.0.0.7"), ip_network("2001:db8::/32")])
    assert "10.0.0.7" in proxies and "::ffff:10.0.0.7" in proxies and "2001:db8::9" in proxies
    assert "10.0.0.8" not in proxies and "a name" not in proxies


def test_half_of_the_descriptors_is_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may need another descriptor for the call that it causes."""

    def limit(soft: int) -> Bounds:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
        return bounds_of_process()

    assert limit(256).total == (256 - RESERVED) // 2
    assert limit(RESERVED).total == 1
    assert limit(1 << 20).total == limit(resource.RLIM_INFINITY).total == MOST


@given(st.lists(st.tuples(st.sampled_from("oobekr"), st.integers(0, 40)), max_size=200))
def test_no_sequence_of_events_breaks_the_bounds(events: list[tuple[str, int]]) -> None:
    table = ConnectionTable(Bounds(8), Proxies([ip_network("10.0.0.3")]))
    made: list[Connection] = []
    for event, number in events:
        if event == "o":
            admission = table.admit(f"10.0.0.{number % 5}")
            assert all(not closed.counted for closed in admission.closed)
            if admission.connection is not None:
                made.append(admission.connection)
        elif made:
            one = made[number % len(made)]
            if event == "b":
                table.begin(one)
            elif event == "r":
                table.remove(one)
            elif one.busy:
                table.end(one, known=event == "k")
        table.check()
    assert len(table) == sum(one.counted for one in made)
