"""The path check against real listeners."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas.clock import MonotonicClock
from prfaas.config.address import Address
from prfaas.measure.path_check import PathReport, check_path, steps, suggest_fixes
from prfaas.measure.path_limit import LIMITS
from prfaas.measure.rates import MeasuredRate
from prfaas.security.tls import TlsFiles, TlsIdentity
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas.transport.messages import HELLO
from prfaas.transport.workers.pool import WorkerPool
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from prfaas_lab.testing.certificates import make_certificates
from tests.transport.ends import nothing_leaks
from tests.waiting import PATIENCE_S


def check(address: tuple[str, int], **more: object) -> PathReport:
    options = {"tls": None, "connections": (1, 2), "seconds": 0.1, **more}
    return check_path(address, clock=MonotonicClock(), **options)  # type: ignore[arg-type]


@contextmanager
def with_worker(tls: TlsIdentity | None = None) -> Iterator[Address]:
    """A listener whose bytes another process receives, so that it does not wait for this one."""
    credentials = None if tls is None else tls.contents
    with (
        WorkerPool(1, credentials=credentials) as workers,
        Listener(tls=None if tls is None else tls.server, workers=workers) as listener,
    ):
        yield listener.address


@contextmanager
def relay_to(target: Address, conditions: Conditions) -> Iterator[Address]:
    with closing(Relay(Address("127.0.0.1", 0), target, conditions).start()) as relay:
        yield relay.address


def test_a_healthy_path() -> None:
    done: list[None] = []
    with nothing_leaks(), Listener() as listener:
        found = check(listener.address, step=lambda: done.append(None))
        assert found.healthy and found.reachable
        assert found.software == HELLO.software
        assert found.round_trip_s is not None and found.round_trip_s > 0
        assert [rate.connections for rate in found.rates] == [1, 2]
        assert all(rate.gbps > 0 and rate.seconds > 0 for rate in found.rates)
        assert found.path_mtu_bytes is not None and found.path_mtu_bytes > 1000
        assert "cubic" in found.congestion_controls
        assert found.window_bytes is not None and found.window_bytes > 0
        assert found.host is None and found.limit is not None
    assert len(done) == steps((1, 2), host_alone=False)


def free_address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[:2]


def test_a_port_without_a_listener() -> None:
    found = check(free_address())
    assert not found.reachable and "refused" in str(found.problem)
    assert found.advice == (
        "No process listens on that port: start the receiver, or check the port.",
    )


def test_mutual_tls_and_a_client_without_it(tmp_path: Path) -> None:
    made, other = (make_certificates(tmp_path / name) for name in "ab")
    tls = made.identity()
    with nothing_leaks(), Listener(tls=tls.server) as listener:
        good = check(listener.address, connections=(1,), tls=tls)
        assert good.healthy and str(good.tls).startswith("TLSv1.3")
        without = check(listener.address)
        assert not without.healthy and "require TLS" in without.advice[0]
        pair = (other.client, other.client_key)
        stranger = TlsIdentity(TlsFiles(made.ca, *pair, *pair))
        assert not check(listener.address, tls=stranger).healthy


def test_a_receiver_that_accepts_too_few_bytes() -> None:
    options = ListenerOptions(measure_bytes_per_minute=1 << 20)
    with nothing_leaks(), Listener(options=options) as listener:
        found = check(listener.address, seconds=PATIENCE_S)
    assert not found.healthy and str(found.problem).startswith("with 1 connections: ")
    assert "wait a minute" in found.advice[0]
    assert found.limit is None


@pytest.mark.slow
def test_two_checks_fit_into_one_minute_of_a_receiver() -> None:
    """On a path that is fast enough to use all bytes that a check may send."""
    with Listener() as listener:
        for _ in range(2):
            assert check(listener.address, seconds=PATIENCE_S).healthy


@pytest.mark.slow
def test_this_host_alone_beside_a_path_on_itself() -> None:
    with nothing_leaks(), with_worker() as address:
        found = check(address, seconds=0.5, host_alone=True)
    assert found.healthy and found.host is not None and found.host.problem is None
    assert found.host.cores > 0
    for rate in (found.host.clear, found.host.tls):
        assert rate is not None and rate.gbps > 0
        assert rate.sender_gbps_per_core is not None and rate.receiver_gbps_per_core is not None
    assert found.limit is not None and found.limit.limit in LIMITS


@pytest.mark.slow
def test_a_listener_with_tls_and_what_this_host_can_do_without(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path).identity()
    with nothing_leaks(), with_worker(tls) as address:
        found = check(address, seconds=0.5, tls=tls, host_alone=True)
    assert found.healthy and found.host is not None and found.host.problem is None
    assert found.host.clear is not None and found.host.clear.gbps > 0
    assert found.host.tls is not None and found.host.tls.gbps > 0
    assert found.limit is not None and found.limit.limit in LIMITS


@pytest.mark.slow
def test_a_slow_link_is_the_limit() -> None:
    """40 Mbit/s: every host is more than five times as fast."""
    conditions = Conditions(rate_bps=40e6)
    with with_worker() as target, relay_to(target, conditions) as address:
        found = check(address, connections=(1, 4), seconds=1.0, host_alone=True)
    assert all(rate.gbps < 0.1 for rate in found.rates)
    assert found.limit is not None
    assert found.limit.limit == "link", found


@dataclass(frozen=True)
class _SmallBuffers(Conditions):
    """A path on which each connection has at most a window in flight."""

    window_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.window_bytes // 2  # in each direction, which takes half of the round trip


@pytest.mark.slow
def test_the_round_trip_is_the_limit() -> None:
    """A window in 100 ms: every host is more than five times as fast."""
    window_bytes = check(free_address()).window_bytes
    conditions = _SmallBuffers(rtt_s=0.1, window_bytes=window_bytes or 0)
    with with_worker() as target, relay_to(target, conditions) as address:
        found = check(address, connections=(1, 4), seconds=1.0, host_alone=True)
    assert found.limit is not None
    assert found.limit.limit == "round trip", found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"software": "prfaas 99"}, "upgrade the older"),
        ({"congestion_controls": ("cubic",), "round_trip_s": 0.1}, "modprobe tcp_bbr"),
        ({"path_mtu_bytes": 576}, "unusually small"),
        ({"load_per_core": 2.0}, "load average 2.0 per core"),
    ],
)
def test_suggested_fixes(changes: dict[str, object], expected: str) -> None:
    usual: dict[str, object] = {
        "software": HELLO.software,
        "round_trip_s": 0.001,
        "path_mtu_bytes": 1500,
        "load_per_core": 0.1,
        "rates": (MeasuredRate(1, 1.0, 0, seconds=1.0, warmed_up=True),),
        "congestion_controls": ("cubic", "bbr"),
    }

    def fixes(fields: dict[str, object]) -> tuple[str, ...]:
        return suggest_fixes(PathReport("h:1", reachable=True, **fields))  # type: ignore[arg-type]

    assert any(expected in line for line in fixes(usual | changes))
    assert fixes(usual) == ()
