from __future__ import annotations

import socket
from pathlib import Path

import pytest

from prfaas.clock import MonotonicClock
from prfaas.measure.path_check import MeasuredRate, PathReport, check_path, suggest_fixes
from prfaas.security.certificates import make_certificates
from prfaas.security.tls import client_context, server_context
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas.transport.messages import HELLO
from tests.transport.ends import nothing_leaks


def check(listener: Listener, **more: object) -> PathReport:
    options = {"tls": None, "connections": (1, 2), "seconds": 0.1, **more}
    return check_path(listener.address, clock=MonotonicClock(), **options)  # type: ignore[arg-type]


def test_a_healthy_path() -> None:
    with nothing_leaks(), Listener() as listener:
        found = check(listener)
        assert found.healthy and found.reachable
        assert found.software == HELLO.software
        assert found.round_trip_s is not None and found.round_trip_s > 0
        assert [rate.connections for rate in found.rates] == [1, 2]
        assert all(rate.gbps > 0 for rate in found.rates)
        assert found.path_mtu_bytes is not None and found.path_mtu_bytes > 1000
        assert "cubic" in found.congestion_controls


def test_a_port_without_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    found = check_path(address, tls=None, connections=(1,), seconds=0.1, clock=MonotonicClock())
    assert not found.reachable and "refused" in str(found.problem)
    assert found.advice == (
        "no process listens on that port: start the receiver, or check the port",
    )


def test_mutual_tls_and_a_client_without_it(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "a")
    other = make_certificates(tmp_path / "b")
    server = server_context(made.ca, made.server, made.server_key)
    options = ListenerOptions(unproven_s=1)
    with nothing_leaks(), Listener(tls=lambda: server, options=options) as listener:
        good = check(listener, tls=client_context(made.ca, made.client, made.client_key))
        assert good.healthy and str(good.tls).startswith("TLSv1.3")
        without = check(listener)
        assert not without.healthy and "require TLS" in without.advice[0]
        stranger = client_context(made.ca, other.client, other.client_key)
        assert not check(listener, tls=stranger).healthy


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"software": "prfaas 99"}, "upgrade the older"),
        ({"send_buffer_bytes": 1 << 20, "round_trip_s": 0.1}, "raise net.ipv4.tcp_wmem"),
        ({"rates": (MeasuredRate(1, 5.0, 3),)}, "'bbr' tolerates loss better"),
        ({"congestion_controls": ("cubic",), "round_trip_s": 0.1}, "modprobe tcp_bbr"),
        ({"path_mtu_bytes": 576}, "unusually small"),
        (
            {"rates": (MeasuredRate(1, 1.0, 0), MeasuredRate(4, 4.0, 0), MeasuredRate(8, 4.1, 0))},
            "4 connections reach 4.00",
        ),
    ],
)
def test_suggested_fixes(changes: dict[str, object], expected: str) -> None:
    usual: dict[str, object] = {
        "software": HELLO.software,
        "round_trip_s": 0.001,
        "path_mtu_bytes": 1500,
        "rates": (MeasuredRate(1, 1.0, 0),),
        "congestion_controls": ("cubic", "bbr"),
        "send_buffer_bytes": 4 << 20,
    }
    assert any(expected in line for line in suggest_fixes(**(usual | changes)))  # type: ignore[arg-type]
    assert not any(expected in line for line in suggest_fixes(**usual))  # type: ignore[arg-type]
