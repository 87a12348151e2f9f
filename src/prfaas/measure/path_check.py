"""Checks the path to a receiver: reachability, TLS, round trip, MTU and rate; suggests fixes.

The check uses the transport's connections and MEASURE frames. A listener discards such frames,
within a limit of bytes per minute, so the check needs no grant and the listener stores nothing.
"""

from __future__ import annotations

import socket
import ssl
import statistics
import threading
from dataclasses import dataclass
from pathlib import Path

from prfaas.clock import Clock
from prfaas.config.address import Address
from prfaas.errors import ConnectionLost, PeerError, WireError
from prfaas.transport.channel import Channel, connect
from prfaas.transport.messages import HELLO, Hello, decode, encode
from prfaas.transport.meter import tcp_info
from prfaas.transport.wire import Decoder, Frame, Kind, encode_message, parse_sequences

_FRAME_BYTES = 1 << 20
_IN_FLIGHT_FRAMES = 64
_TIMEOUT_S = 5.0
_PING_COUNT = 5
_IP_MTU, _IPV6_MTU = 14, 24  # socket options of Linux: the path MTU of a connected socket


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    connections: int
    gbps: float
    retransmitted_segments: int | None


@dataclass(frozen=True, slots=True)
class PathReport:
    """The results in the order of the checks. A field is None when an earlier check failed."""

    address: str
    reachable: bool
    problem: str | None = None  # why the check stopped early
    connect_s: float | None = None
    tls: str | None = None  # protocol version and cipher
    software: str | None = None
    round_trip_s: float | None = None
    path_mtu_bytes: int | None = None
    rates: tuple[MeasuredRate, ...] = ()
    congestion_controls: tuple[str, ...] = ()  # available in this host's kernel
    send_buffer_bytes: int | None = None  # maximum per connection in this host's kernel
    advice: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.problem is None


def check_path(
    address: tuple[str, int],
    *,
    tls: ssl.SSLContext | None,
    connections: tuple[int, ...],
    seconds: float,
    clock: Clock,
) -> PathReport:
    """Checks the path to a listener. Takes about `seconds` for each number of connections."""
    name = str(Address(*address))
    controls = _congestion_controls()
    buffer_bytes = _largest_send_buffer()
    try:
        started = clock.now()
        probe = _Probe(address, tls, clock)
        connect_s = clock.now() - started
    except PeerError as error:
        return PathReport(
            name,
            reachable=False,
            problem=str(error),
            congestion_controls=controls,
            send_buffer_bytes=buffer_bytes,
            advice=(_fix_for_unreachable(str(error)),),
        )
    with probe:
        cipher, mtu = probe.cipher, probe.path_mtu_bytes
        try:
            software = probe.handshake()
            round_trip_s = probe.round_trip_s()
        except PeerError as error:
            return PathReport(
                name,
                reachable=True,
                problem=f"connected, but {error}",
                connect_s=connect_s,
                tls=cipher,
                path_mtu_bytes=mtu,
                congestion_controls=controls,
                send_buffer_bytes=buffer_bytes,
                advice=(_fix_for_handshake(error, tls is not None),),
            )
    rates: list[MeasuredRate] = []
    problem = None
    for count in connections:
        try:
            rates.append(_measure_rate(address, tls, count, seconds, clock))
        except PeerError as error:
            problem = f"with {count} connections: {error}"
            break
    return PathReport(
        name,
        reachable=True,
        problem=problem,
        connect_s=connect_s,
        tls=cipher,
        software=software,
        round_trip_s=round_trip_s,
        path_mtu_bytes=mtu,
        rates=tuple(rates),
        congestion_controls=controls,
        send_buffer_bytes=buffer_bytes,
        advice=suggest_fixes(software, round_trip_s, mtu, tuple(rates), controls, buffer_bytes),
    )


def suggest_fixes(
    software: str,
    round_trip_s: float,
    path_mtu_bytes: int | None,
    rates: tuple[MeasuredRate, ...],
    congestion_controls: tuple[str, ...],
    send_buffer_bytes: int | None,
) -> tuple[str, ...]:
    """Suggested changes, the most useful one first. Pure."""
    fixes = []
    if software != HELLO.software:
        fixes.append(
            f"the receiver runs {software}, this host runs {HELLO.software}: upgrade the older one"
        )
    if rates:
        best = max(rates, key=lambda rate: rate.gbps)
        enough = next(rate for rate in rates if rate.gbps >= 0.95 * best.gbps)
        fixes.append(
            f"{enough.connections} connections reach {enough.gbps:.2f} Gbps: configure that many"
        )
        if send_buffer_bytes is not None:
            one_gbps = send_buffer_bytes * 8 / round_trip_s / 1e9 if round_trip_s else float("inf")
            if one_gbps < best.gbps:
                fixes.append(
                    f"one connection can have {send_buffer_bytes >> 20} MiB in flight, which is "
                    f"{one_gbps:.2f} Gbps at this round trip: raise net.ipv4.tcp_wmem and tcp_rmem"
                )
        if any(rate.retransmitted_segments for rate in rates) and "bbr" in congestion_controls:
            fixes.append("segments were lost: congestion_control = 'bbr' tolerates loss better")
    if "bbr" not in congestion_controls and round_trip_s > 0.005:
        fixes.append(
            "this kernel has no BBR: run `modprobe tcp_bbr`, since loss on a long path costs "
            "more without it"
        )
    if path_mtu_bytes is not None and path_mtu_bytes < 1280:
        fixes.append(f"the path MTU of {path_mtu_bytes} is unusually small: check for a tunnel")
    return tuple(fixes)


class _Probe:
    """One connection to a listener."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None, clock: Clock) -> None:
        sock = connect(address, timeout_s=_TIMEOUT_S, tls=tls)
        self.cipher = None
        if isinstance(sock, ssl.SSLSocket):
            self.cipher = f"{sock.version()} {(sock.cipher() or ('unknown',))[0]}"
        self.path_mtu_bytes = _path_mtu(sock)
        self.channel = Channel(sock, clock, _TIMEOUT_S)
        self._clock = clock
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def handshake(self) -> str:
        """Sends HELLO. Returns the receiver's software version."""
        self._send(encode_message(Kind.HELLO, encode(HELLO)))
        frame = self._receive()
        if frame.header.kind is not Kind.WELCOME:
            raise WireError(f"the receiver answered HELLO with {frame.header.kind.name}")
        return decode(frame.body, Hello).software

    def round_trip_s(self) -> float:
        """The median round trip through the network and both programs, as for a grant or an ACK."""
        times = []
        for _ in range(_PING_COUNT):
            started = self._clock.now()
            self.ping()
            times.append(self._clock.now() - started)
        return statistics.median(times)

    def ping(self) -> None:
        self._send(encode_message(Kind.MEASURE))
        self._receive()

    def send_for(self, seconds: float) -> int:
        """Sends as fast as possible. Returns the bytes acknowledged within the time."""
        frame = encode_message(Kind.MEASURE, bytes(_FRAME_BYTES))
        until = self._clock.now() + seconds
        sent = acknowledged = 0
        while self._clock.now() < until:
            if sent - acknowledged < _IN_FLIGHT_FRAMES:
                self._send(frame)
                sent += 1
                if not self.channel.wait(0):
                    continue
            acknowledged += len(parse_sequences(self._receive().body))
        return acknowledged * _FRAME_BYTES

    def _send(self, frame: bytes) -> None:
        self.channel.send([memoryview(frame)], len(frame))

    def _receive(self) -> Frame:
        until = self._clock.now() + _TIMEOUT_S
        while not self._frames:
            left_s = until - self._clock.now()
            if left_s <= 0:
                raise ConnectionLost(f"the receiver did not answer within {_TIMEOUT_S:g} s")
            if self.channel.wait(left_s):
                self._frames += self._decoder.feed(self.channel.receive_available())
        return self._frames.pop(0)


def _measure_rate(
    address: tuple[str, int],
    tls: ssl.SSLContext | None,
    count: int,
    seconds: float,
    clock: Clock,
) -> MeasuredRate:
    probes: list[_Probe] = []
    results: dict[int, int | PeerError] = {}

    def run(index: int, probe: _Probe) -> None:
        try:
            results[index] = probe.send_for(seconds)
        except PeerError as error:
            results[index] = error

    try:
        for _ in range(count):
            probes.append(_Probe(address, tls, clock))
            probes[-1].handshake()
            probes[-1].ping()  # the listener then knows the connection for a path check
        threads = [
            threading.Thread(target=run, args=(index, probe), daemon=True)
            for index, probe in enumerate(probes)
        ]
        started = clock.now()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 2 * _TIMEOUT_S)
        took_s = clock.now() - started
        infos = [tcp_info(probe.channel) for probe in probes]
    finally:
        for probe in probes:
            probe.channel.close()
    total = 0
    for result in results.values():
        if isinstance(result, PeerError):
            raise result
        total += result
    known = [info.retransmitted_segments for info in infos if info is not None]
    return MeasuredRate(count, total * 8 / took_s / 1e9, sum(known) if known else None)


def _path_mtu(sock: socket.socket) -> int | None:
    try:
        if sock.family == socket.AF_INET6:
            return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return None  # not Linux


def _congestion_controls() -> tuple[str, ...]:
    return tuple(_sysctl("net/ipv4/tcp_available_congestion_control").split())


def _largest_send_buffer() -> int | None:
    values = _sysctl("net/ipv4/tcp_wmem").split()
    return int(values[2]) if len(values) == 3 else None


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text()
    except OSError:
        return ""


def _fix_for_unreachable(problem: str) -> str:
    if "refused" in problem:
        return "no process listens on that port: start the receiver, or check the port"
    if "did not answer" in problem:
        return "a firewall may drop the packets: open the port in both directions"
    if "TLS" in problem:
        return (
            "check --tls-ca, --tls-cert and --tls-key, and that the receiver's certificate names "
            "this host"
        )
    return "check the host name and the route"


def _fix_for_handshake(error: PeerError, with_tls: bool) -> str:
    if isinstance(error, WireError):
        return "another program, or another version of prfaas, listens on that port"
    if not with_tls:
        return "the receiver may require TLS: give --tls-ca, --tls-cert and --tls-key"
    return "the receiver closed the connection: check that it trusts this certificate's CA"
