"""Checks the path to a receiver: reachability, TLS, round trip, MTU, rate, and which limit binds.

The check sends MEASURE frames on the connections, and with the worker processes, that a kvd of this
host would use. A listener discards such frames, within a limit of bytes per minute, so the check
needs no grant and the listener stores nothing.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.clock import Clock
from prfaas.config.address import Address
from prfaas.errors import PeerError, WireError
from prfaas.measure.host_rates import MEASUREMENTS, HostRates, measure_host
from prfaas.measure.path_limit import WARM_UP_ROUND_TRIPS, PathFacts, PathLimit, find_limit
from prfaas.measure.path_probe import TIMEOUT_S, Probe
from prfaas.measure.rates import Load, MeasuredRate, measure
from prfaas.security.tls import SERVICE_NAME, TlsIdentity
from prfaas.service.cores import usable_cores
from prfaas.transport.channel import Channel, connect
from prfaas.transport.host_speed import choose_sending
from prfaas.transport.listener import ListenerOptions
from prfaas.transport.messages import HELLO
from prfaas.transport.workers.pool import WorkerPool, default_workers

# A listener accepts this many bytes per minute for path checks. A check uses less than half of
# them, so that a second one is possible at once, after a change.
MOST_BYTES = ListenerOptions().measure_bytes_per_minute * 7 // 16
_BUSY = 0.5  # processes that want to run, for each core, before the check
_IP_MTU, _IPV6_MTU = 14, 24  # socket options of Linux: the path MTU of a connected socket


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
    receive_buffer_bytes: int | None = None
    load_per_core: float | None = None  # of the whole machine, before the check: load average
    host: HostRates | None = None  # this host alone; None: not measured
    limit: PathLimit | None = None
    advice: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.problem is None

    @property
    def window_bytes(self) -> int | None:
        """The most that one connection can have in flight if the kernels of both hosts have the
        same limits; the check does not see those of the other host."""
        known = [n for n in (self.send_buffer_bytes, self.receive_buffer_bytes) if n is not None]
        return min(known, default=None)


def steps(connections: tuple[int, ...], *, host_alone: bool) -> int:
    """How often `check_path` calls its `step` when nothing fails."""
    return len(connections) + (MEASUREMENTS if host_alone else 0)


def check_path(
    address: tuple[str, int],
    *,
    tls: TlsIdentity | None,
    connections: tuple[int, ...],
    seconds: float,
    clock: Clock,
    host_alone: bool = False,
    step: Callable[[], None] = lambda: None,
) -> PathReport:
    """Checks the path to a listener. Takes about `seconds` for each number of connections, and at
    least 20 round trips. With `host_alone` it also measures what this host can do without the
    network."""
    report = PathReport(
        str(Address(*address)),
        reachable=False,
        congestion_controls=tuple(_sysctl("net/ipv4/tcp_available_congestion_control").split()),
        send_buffer_bytes=_largest_buffer("net/ipv4/tcp_wmem"),
        receive_buffer_bytes=_largest_buffer("net/ipv4/tcp_rmem"),
        load_per_core=_load_per_core(),
    )
    report = _check_connection(report, address, tls, clock)
    if report.problem is not None:
        return report
    assert report.round_trip_s is not None
    cores = usable_cores()
    warm_up_s = min(WARM_UP_ROUND_TRIPS * report.round_trip_s, TIMEOUT_S)
    send_files = tls is not None or choose_sending().send_files
    credentials = None if tls is None else tls.contents
    with WorkerPool(default_workers(cores), credentials=credentials, clock=clock) as senders:
        for count in connections:
            load = Load(
                Address(*address),
                tls,
                count,
                max(seconds, 2 * warm_up_s),
                MOST_BYTES // len(connections),
                warm_up_s,
                send_files,
            )
            try:
                measured = measure(load, senders, clock)
            except PeerError as error:
                problem = f"with {count} connections: {error}"
                return replace(report, problem=problem, advice=(_FIX_FOR_MEASUREMENT,))
            report = replace(report, rates=(*report.rates, measured.rate))
            step()
    if host_alone:
        host = measure_host(
            seconds=seconds, cores=cores, send_files=send_files, clock=clock, step=step
        )
        report = replace(report, host=host)
    limit = find_limit(_facts(report, with_tls=tls is not None))
    return replace(report, limit=limit, advice=(*limit.advice, *suggest_fixes(report)))


def _check_connection(
    report: PathReport, address: tuple[str, int], tls: TlsIdentity | None, clock: Clock
) -> PathReport:
    try:
        started = clock.now()
        context = None if tls is None else tls.client()
        sock = connect(address, timeout_s=TIMEOUT_S, tls=context, tls_name=SERVICE_NAME)
        connect_s = clock.now() - started
    except PeerError as error:
        problem = str(error)
        return replace(report, problem=problem, advice=(_fix_for_unreachable(problem),))
    cipher = None
    if isinstance(sock, ssl.SSLSocket):
        cipher = f"{sock.version()} {(sock.cipher() or ('unknown',))[0]}"
    report = replace(
        report,
        reachable=True,
        connect_s=connect_s,
        tls=cipher,
        path_mtu_bytes=_path_mtu(sock),
    )
    with Probe(Channel(sock, clock, TIMEOUT_S), clock) as probe:
        try:
            software = probe.handshake()
            return replace(report, software=software, round_trip_s=probe.round_trip_s())
        except PeerError as error:
            advice = _fix_for_handshake(error, tls is not None)
            return replace(report, problem=f"connected, but {error}", advice=(advice,))


def _facts(report: PathReport, *, with_tls: bool) -> PathFacts:
    assert report.round_trip_s is not None
    clear = tls = None
    if report.host is not None:
        clear, tls = report.host.clear, report.host.tls
    return PathFacts(
        rates=report.rates,
        round_trip_s=report.round_trip_s,
        window_bytes=report.window_bytes,
        with_tls=with_tls,
        host_clear_gbps=None if clear is None else clear.gbps,
        host_tls_gbps=None if tls is None else tls.gbps,
        bbr="bbr" in report.congestion_controls,
    )


def suggest_fixes(report: PathReport) -> tuple[str, ...]:
    """Changes that are useful whatever limits the rate. Pure."""
    fixes = []
    if report.load_per_core is not None and report.load_per_core > _BUSY:
        fixes.append(
            f"Other work used this host before the check (load average {report.load_per_core:.1f} "
            "per core): the rates may be too low, so measure again while the host is idle."
        )
    if report.software is not None and report.software != HELLO.software:
        fixes.append(
            f"The receiver runs {report.software}, this host runs {HELLO.software}: upgrade the "
            "older one."
        )
    lost = any(rate.retransmitted_segments for rate in report.rates)
    long = report.round_trip_s is not None and report.round_trip_s > 0.005
    if "bbr" not in report.congestion_controls and long and not lost:
        fixes.append(
            "This kernel has no BBR: run `modprobe tcp_bbr`, since loss on a long path costs more "
            "without it."
        )
    if report.path_mtu_bytes is not None and report.path_mtu_bytes < 1280:
        fixes.append(
            f"The path MTU of {report.path_mtu_bytes} bytes is unusually small: look for a tunnel "
            "on the way."
        )
    return tuple(fixes)


def _load_per_core() -> float | None:
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def _path_mtu(sock: socket.socket) -> int | None:
    try:
        if sock.family == socket.AF_INET6:
            return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return None  # not Linux


def _largest_buffer(name: str) -> int | None:
    """The last of the three values of `net.ipv4.tcp_wmem` or `tcp_rmem`. IPv6 uses them, too."""
    values = _sysctl(name).split()
    return int(values[2]) if len(values) == 3 else None


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text()
    except OSError:
        return ""


_FIX_FOR_MEASUREMENT = (
    "The receiver closes the connection when path checks exceed its limit of 2 GiB per minute: "
    "wait a minute and try again, and read the receiver's log if that does not help."
)


def _fix_for_unreachable(problem: str) -> str:
    if "refused" in problem:
        return "No process listens on that port: start the receiver, or check the port."
    if "did not answer" in problem:
        return "A firewall may drop the packets: open the port in both directions."
    if "TLS" in problem:
        return (
            "Check --tls-ca, --tls-cert and --tls-key, and that the receiver's certificate carries "
            f"the name {SERVICE_NAME}, as kvds require of each other."
        )
    return "Check the host name and the route."


def _fix_for_handshake(error: PeerError, with_tls: bool) -> str:
    if isinstance(error, WireError):
        return "Another program, or another version of prfaas, listens on that port."
    if not with_tls:
        return "The receiver may require TLS: give --tls-ca, --tls-cert and --tls-key."
    return "The receiver closed the connection: check that it trusts this certificate's CA."
