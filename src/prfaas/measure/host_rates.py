"""What this host can do by itself: bytes over loopback, in the clear and with mutual TLS.

Both ends run on this host, in processes of their own, with the transport's connections. No network
is involved, so the rates show what the cores allow. The certificates are made for the measurement
and thrown away: the cost of TLS does not depend on them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from prfaas.config.address import Address
from prfaas.errors import InputError, PeerError
from prfaas.measure.rate_process import Cpu, CpuJob, Listening, ListenJob, RateProcess, TlsPaths
from prfaas.measure.rates import Load, RateSenders
from prfaas.security.certificates import CertificateAuthority
from prfaas.transport.workers.pool import default_workers

MOST_SECONDS = 0.5  # for each of the measurements
MEASUREMENTS = 4  # in the clear and with TLS, with one and two connections for each process
_MOST_BYTES = 8 << 30  # in each of them
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class HostRate:
    """The better one of the measurements. The figures for one core say how many bytes an end moves
    in a second of one core's time."""

    gbps: float
    connections: int
    processes: int  # of each end
    sender_gbps_per_core: float | None  # None when the CPU time was too short to be measured
    receiver_gbps_per_core: float | None


@dataclass(frozen=True, slots=True)
class HostRates:
    """Measured on this host alone."""

    cores: float
    clear: HostRate | None = None
    tls: HostRate | None = None
    problem: str | None = None  # why a rate is missing


def processes_for(cores: float) -> int:
    """How many processes send, and how many receive: as many as a kvd on this host has for it."""
    return max(1, default_workers(cores))


def measure_host(
    senders: RateSenders, *, seconds: float, cores: float, step: Callable[[], None] = lambda: None
) -> HostRates:
    """Calls `step` after each of the MEASUREMENTS. A failure is a `problem`, not an exception: the
    check of the path goes on without these rates."""
    clear = tls = None
    try:
        with ExitStack() as stack:
            receivers = [
                stack.enter_context(closing(RateProcess())) for _ in range(processes_for(cores))
            ]
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-doctor-"))
            made = _certificate(Path(folder))
            clear = _measure(senders, receivers, None, seconds, step)
            tls = _measure(senders, receivers, made, seconds, step)
    except (PeerError, InputError, OSError) as error:
        return HostRates(cores, clear, tls, str(error))
    return HostRates(cores, clear, tls)


def _certificate(folder: Path) -> TlsPaths:
    """A certificate of this host for both ends."""
    authority = CertificateAuthority.new()
    issued = authority.issue("localhost", days=1)
    ca, cert, key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    key.touch(mode=0o600)
    ca.write_bytes(authority.pem)
    cert.write_bytes(issued.pem)
    key.write_bytes(issued.key_pem)
    return TlsPaths(str(ca), str(cert), str(key))


def _measure(
    senders: RateSenders,
    receivers: list[RateProcess],
    tls: TlsPaths | None,
    seconds: float,
    step: Callable[[], None],
) -> HostRate:
    for receiver in receivers:
        receiver.tell(ListenJob(tls))
    listening = [receiver.wait_for(Listening, _ANSWER_S) for receiver in receivers]
    found: list[HostRate] = []
    for connections in (1, 2):
        loads = [
            Load(
                Address(one.host, one.port),
                tls,
                connections,
                min(seconds, MOST_SECONDS),
                _MOST_BYTES // len(receivers),
            )
            for one in listening
        ]
        before_s = _cpu_s(receivers)
        measured = senders.measure(*loads)
        receiver_s = _cpu_s(receivers) - before_s
        found.append(
            HostRate(
                gbps=measured.rate.gbps,
                connections=measured.rate.connections,
                processes=len(receivers),
                sender_gbps_per_core=_per_core(measured.nbytes, measured.cpu_s),
                receiver_gbps_per_core=_per_core(measured.nbytes, receiver_s),
            )
        )
        step()
    return max(found, key=lambda rate: rate.gbps)


def _cpu_s(receivers: list[RateProcess]) -> float:
    return sum(receiver.ask(CpuJob(), Cpu, _ANSWER_S).seconds for receiver in receivers)


def _per_core(nbytes: int, cpu_s: float) -> float | None:
    return nbytes * 8 / cpu_s / 1e9 if cpu_s > 0 else None
