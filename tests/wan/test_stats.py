"""How well a relay keeps its own time, and what is not its lateness."""

from __future__ import annotations

import socket

import msgspec

from prfaas.config.address import Address
from prfaas.wan.flow import RelayedConnection
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from prfaas.wan.stats import LatenessCounter, RelayStats
from prfaas_lab.testing import FakeClock
from tests.transport.wan_peers import TIMEOUT_S
from tests.waiting import wait_until


def test_lateness_adds_up_and_is_never_negative() -> None:
    late = LatenessCounter()
    for late_s in (0.5, -1.0, 0.25):
        late.add(late_s)
    assert (late.count, late.total_s, late.peak_s) == (3, 0.75, 0.5)


def test_bytes_that_leave_after_their_time_are_late_by_the_difference() -> None:
    clock = FakeClock()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        to = Address(*listener.getsockname())
        conditions = Conditions(rtt_s=20.0)  # ten seconds in each direction
        with Relay(Address("127.0.0.1", 0), to, conditions, clock=clock) as relay:
            client = socket.create_connection(relay.address, TIMEOUT_S)
            target, _ = listener.accept()
            with client, target:
                target.settimeout(TIMEOUT_S)
                client.sendall(b"x")
                wait_until(lambda: relay.stats.held_bytes == 1)
                clock.advance(10.5)  # the relay sleeps for half a second too long
                assert target.recv(1) == b"x"
                wait_until(lambda: relay.stats.forwards == 1)
                assert relay.stats.forward_late_s == relay.stats.forward_late_peak_s == 0.5


def test_waiting_for_the_receiver_is_not_relay_lateness() -> None:
    ours, theirs = socket.socketpair()
    client, server = socket.socketpair()
    with ours, theirs, client, server:
        ours.setblocking(False)
        flow = RelayedConnection(client, ours, 0.0).flows[0]
        flow.put(memoryview(bytes(8 << 20)), 0.0)
        flow.send_due(1.0)
        assert flow.blocked and flow.delayed_by_target  # nothing reads at the other end
        theirs.settimeout(TIMEOUT_S)
        while flow.queue:
            theirs.recv(1 << 20)
            flow.blocked = False
            flow.send_due(1.0)
        assert (
            not flow.delayed_by_target
        )  # the next bytes are on time or late by the relay's own doing


def test_stats_are_one_line_of_json() -> None:
    stats = RelayStats(1, 2, 0, 5, 0, 0, 5, 0, forwards=3, forward_late_s=0.25)
    line = msgspec.json.encode(stats)
    assert line.startswith(b'{"event":"stats",') and b"\n" not in line
    assert msgspec.json.decode(line, type=RelayStats) == stats
