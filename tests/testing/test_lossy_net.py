"""The test network itself: packets are lost, delayed and slowed as asked. Needs root."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas_lab.testing import netns
from prfaas_lab.testing.lossy_net import LossyNet
from prfaas_lab.testing.netns import NetworkError, add_namespace, inside, why_not
from tests.waiting import PATIENCE_S, wait_until

TIMEOUT_S = PATIENCE_S
MIB = 1024 * 1024
RATE_BPS = 200e6
TOTAL_RETRANSMISSIONS_AT = 100  # tcpi_total_retrans in struct tcp_info

needs_packets = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.fixture(scope="module")
def plain() -> Iterator[LossyNet]:
    with LossyNet(rate_bps=RATE_BPS) as net:
        yield net


@pytest.fixture(scope="module")
def delayed() -> Iterator[LossyNet]:
    with LossyNet(rate_bps=RATE_BPS, rtt_s=0.04) as net:
        yield net


def connect(net: LossyNet) -> tuple[socket.socket, socket.socket]:
    with net.inside_far(), socket.create_server((net.far_address, 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        with net.inside_near():
            near = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        far, _ = listener.accept()
    far.settimeout(TIMEOUT_S)
    return near, far


def send_all(net: LossyNet, size: int) -> int:
    """Sends from near to far over one connection; the sender's retransmissions."""
    near, far = connect(net)
    with near, far:
        sender = threading.Thread(target=near.sendall, args=(bytes(size),))
        sender.start()
        received = 0
        while received < size:
            received += len(far.recv(MIB))
        sender.join(TIMEOUT_S)
        info = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("I", info, TOTAL_RETRANSMISSIONS_AT)[0])


def connect_s(net: LossyNet) -> float:
    """A handshake takes one round trip."""
    with net.inside_far(), socket.create_server((net.far_address, 0)) as listener:
        address = listener.getsockname()
        with net.inside_near():
            started_s = time.monotonic()
            socket.create_connection(address, TIMEOUT_S).close()
            return time.monotonic() - started_s


@needs_packets
@pytest.mark.parametrize("kind", ["plain", "delayed"])
def test_loss_is_seen_by_the_sender_and_stops(kind: str, request: pytest.FixtureRequest) -> None:
    net: LossyNet = request.getfixturevalue(kind)
    net.set_loss(0.01)
    assert send_all(net, 4 * MIB) > 0
    net.set_loss(0.0)
    lost = net.lost_packets()
    assert lost > 0
    # The transfer fits into the queue, so nothing else loses packets. The sender's count is no
    # evidence here: TCP sends packets again that were merely late, as on a busy machine.
    send_all(net, 2 * MIB)
    assert net.lost_packets() == lost


@needs_packets
def test_everything_can_be_lost(plain: LossyNet) -> None:
    lost = plain.lost_packets()
    plain.set_loss(1.0)
    with plain.inside_near(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(50):
            sock.sendto(b"x", (plain.far_address, 9))
    wait_until(lambda: plain.lost_packets() - lost == 50)
    plain.set_loss(0.0)


@needs_packets
def test_packets_are_no_larger_than_the_wire(plain: LossyNet) -> None:
    def sent() -> tuple[int, int]:
        with plain.inside_near():
            text = Path("/proc/thread-self/net/dev").read_text()
        fields = next(line for line in text.splitlines() if "wan0:" in line).split()
        return int(fields[9]), int(fields[10])

    (bytes_before, packets_before), _ = sent(), send_all(plain, 2 * MIB)
    bytes_after, packets_after = sent()
    mean = (bytes_after - bytes_before) / (packets_after - packets_before)
    assert 1000 < mean <= 1514


@needs_packets
def test_no_packet_is_early(delayed: LossyNet) -> None:
    assert connect_s(delayed) >= 0.04
    delayed.set_rtt(0.12)
    # The order travels by a pipe: until it has arrived, connects may be as fast as before.
    wait_until(lambda: connect_s(delayed) >= 0.12)
    delayed.set_rtt(0.04)


@needs_packets
@pytest.mark.parametrize("kind", ["plain", "delayed"])
def test_the_rate_is_not_exceeded(kind: str, request: pytest.FixtureRequest) -> None:
    net: LossyNet = request.getfixturevalue(kind)
    net.set_rate(50e6)
    size = 2 * MIB
    started_s = time.monotonic()
    send_all(net, size)
    took_s = time.monotonic() - started_s
    net.set_rate(RATE_BPS)
    assert (size - 64 * 1024) * 8 / took_s <= 50e6  # an idle bucket passes 64 KiB at once


@needs_packets
def test_commands_run_at_either_end(delayed: LossyNet) -> None:
    for command, address in (
        (delayed.near_command, delayed.near_address),
        (delayed.far_command, delayed.far_address),
    ):
        code = f"import socket; socket.create_server(({address!r}, 0))"
        subprocess.run(command(sys.executable, "-c", code), check=True, timeout=TIMEOUT_S)


@needs_packets
def test_nothing_is_left_even_after_an_error() -> None:
    processes = set(children())
    with pytest.raises(ZeroDivisionError), LossyNet(rtt_s=0.01) as net:
        assert {net.near, net.far} <= set(namespaces())
        assert set(children()) > processes
        _ = 1 / 0
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name and same(name, net)]
    assert set(children()) == processes


@needs_packets
def test_a_network_that_cannot_be_built_leaves_nothing() -> None:
    net = LossyNet(loss=2.0)
    with pytest.raises(NetworkError, match="the loss share is 2.0"), net:
        pass
    assert not [name for name in namespaces() if same(name, net)]


@needs_packets
def test_leftovers_of_killed_processes_are_removed() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(TIMEOUT_S)
    leftover = f"prfaas-{ended.pid}-0-near"
    add_namespace(leftover)
    with LossyNet():
        assert leftover not in namespaces()


@needs_packets
def test_a_delay_cannot_be_added_later(plain: LossyNet) -> None:
    with pytest.raises(NetworkError, match="construct it with rtt_s"):
        plain.set_rtt(0.01)


@needs_packets
def test_the_thread_comes_back(plain: LossyNet) -> None:
    here = os.readlink("/proc/thread-self/ns/net")
    with pytest.raises(ZeroDivisionError), inside(plain.near):
        assert os.readlink("/proc/thread-self/ns/net") != here
        _ = 1 / 0
    assert os.readlink("/proc/thread-self/ns/net") == here


def test_it_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "real packets need root (network namespaces): run the tests as root"
    with pytest.raises(NetworkError, match="need root"), LossyNet():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns, "_CAP_NET_ADMIN", 63)
    assert "need CAP_NET_ADMIN" in (why_not() or "")


@needs_packets
def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert why_not() == "real packets need ip and tc: install the package iproute2"


def namespaces() -> list[str]:
    folder = Path("/run/netns")
    return os.listdir(folder) if folder.is_dir() else []


def same(name: str, net: LossyNet) -> bool:
    return name.rpartition("-")[0] == net.near.rpartition("-")[0]


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
