"""`prfaas wan` in a process of its own, as an operator runs it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from prfaas.config.address import Address, parse_address
from prfaas.wan.stats import RelayStats
from tests.cli.runner import Result
from tests.waiting import PATIENCE_S

Run = Callable[..., Result]
COMMAND = Path(sys.executable).with_name("prfaas")
TIMEOUT_S = PATIENCE_S


class Process:
    def __init__(self, *arguments: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(TIMEOUT_S)
        target = str(Address(*self.listener.getsockname()))
        self.process = subprocess.Popen(
            [COMMAND, "wan", "--listen", "127.0.0.1:0", "--to", target, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.banner = self.line()
        self.address = parse_address(self.banner.split()[1], "banner")

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def say(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")

    def obeyed(self, order: str) -> None:
        """Says it and waits until it is in force."""
        self.say(order)
        self.say("stats")
        msgspec.json.decode(self.line(), type=RelayStats)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(self.address, TIMEOUT_S)
        target, _ = self.listener.accept()
        target.settimeout(TIMEOUT_S)
        return client, target

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        self.listener.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def begin(*arguments: str) -> Process:
        running.append(Process(*arguments))
        return running[-1]

    yield begin
    for process in running:
        process.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_relays_and_ends_cleanly(start: Callable[..., Process], number: signal.Signals) -> None:
    relay = start("--gbps", "1", "--rtt-ms", "20")
    assert "1 Gbit/s, 20 ms round trip; Ctrl-C ends it" in relay.banner
    client, target = relay.connect()
    with client, target:
        sent_s = time.monotonic()
        client.sendall(b"hello")
        assert target.recv(5) == b"hello"
        assert time.monotonic() - sent_s >= 0.01
        code, out, err = relay.end(number)
    assert (code, err) == (0, "")
    stats = msgspec.json.decode(out, type=RelayStats)
    assert (stats.accepted, stats.refused) == (1, 0)
    assert (stats.to_target_bytes, stats.to_client_bytes) == (5, 0)
    assert stats.forwards >= 1 and 0 <= stats.forward_late_peak_s <= stats.forward_late_s
    assert stats.wakeups >= 1  # five bytes wait for half a round trip


def test_obeys_lines_on_standard_input(start: Callable[..., Process]) -> None:
    relay = start("--control")
    client, target = relay.connect()
    with client, target:
        relay.obeyed("rtt-ms 100")
        sent_s = time.monotonic()
        client.sendall(b"x")
        assert target.recv(1) == b"x"
        assert time.monotonic() - sent_s >= 0.05
        relay.obeyed("cut")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    relay.obeyed("outage")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(relay.address, TIMEOUT_S)
    relay.obeyed("restore")
    socket.create_connection(relay.address, TIMEOUT_S).close()
    relay.say("gbps -1")
    relay.say("faster")
    relay.obeyed("gbps none")
    code, _, err = relay.end(signal.SIGINT)
    assert code == 0
    assert err.splitlines() == [
        "error: the rate is -1e+09 bit/s; give more than 0",
        "error: unknown order 'faster'; there are: gbps X, rtt-ms X, jitter-ms X, stall, outage, "
        "restore, cut, damage N, stats",
    ]


def test_as_many_ways_in_as_out(prfaas: Run) -> None:
    here = "127.0.0.1:0"
    result = prfaas("wan", "--listen", here, "--listen", here, "--to", "127.0.0.1:9")
    assert result.code == 2 and "2 addresses lead to 1" in result.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--listen", "nowhere"), "--listen: 'nowhere' is no address; write HOST:PORT"),
        (("--to", "127.0.0.1:0"), "--to: '0' is no port; give 1 to 65535"),
        (("--to", "no.such.host.invalid:1"), "check the host name"),
        (("--gbps", "0"), "the rate is 0 bit/s; give more than 0"),
        (("--rtt-ms", "-1"), "the round trip is -0.001 s; give 0 or more"),
        (("--jitter-ms", "nan"), "the jitter is nan s; give 0 or more"),
        (("--cut-every", "0"), "the time between cuts is 0 s; give more than 0"),
        (("--stall", "10"), "--stall: '10'; give EVERY_S,FOR_S"),
        (("--outage", "1,2"), "--outage: every 1 s for 2 s; give two values above 0"),
        (("--outage", "a,b"), "--outage: 'a,b'; give EVERY_S,FOR_S"),
    ],
)
def test_mistakes_are_one_line(prfaas: Run, arguments: tuple[str, str], expected: str) -> None:
    flags = {"--listen": "127.0.0.1:0", "--to": "127.0.0.1:9"} | dict([arguments])
    result = prfaas("wan", *(part for flag in flags.items() for part in flag))
    assert result.code == 2
    assert expected in result.err
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
