"""What this host can do by itself: bytes over loopback, in the clear and with mutual TLS.

Both ends run on this host, with the transport's connections and worker processes. No network is
involved, so the rates show what the cores allow. The certificates are made for the measurement and
thrown away: the cost of TLS does not depend on them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.clock import Clock
from prfaas.config.address import Address
from prfaas.errors import InputError, PeerError
from prfaas.measure.rates import Load, measure
from prfaas.security.certificates import CertificateAuthority
from prfaas.security.tls import TlsFiles, TlsIdentity
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas.transport.workers.pool import WorkerPool, default_workers

MOST_SECONDS = 0.5  # for each of the measurements
MEASUREMENTS = 4  # in the clear and with TLS, with one and two connections for each worker
_MOST_BYTES = 8 << 30  # in each of them
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class HostRate:
    """The better one of the measurements. The figures for one core say how many bytes an end moves
    in a second of one core's time, in the processes that encrypt, send and receive."""

    gbps: float
    connections: int
    sender_gbps_per_core: float | None  # None when the CPU time was too short to be measured
    receiver_gbps_per_core: float | None


@dataclass(frozen=True, slots=True)
class HostRates:
    """Measured on this host alone."""

    cores: float
    clear: HostRate | None = None
    tls: HostRate | None = None
    problem: str | None = None  # why a rate is missing


def measure_host(
    *,
    seconds: float,
    cores: float,
    send_files: bool,
    clock: Clock,
    step: Callable[[], None] = lambda: None,
) -> HostRates:
    """Calls `step` after each of the MEASUREMENTS. A failure is a `problem`, not an exception: the
    check of the path goes on without these rates."""
    clear = tls = None
    workers = default_workers(cores)
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-doctor-"))
            identity = _identity(Path(folder))
            senders = stack.enter_context(WorkerPool(workers, credentials=identity.contents))
            # Also on a host whose kvds have none: both ends in one interpreter would wait for each
            # other's lock.
            receivers = stack.enter_context(
                WorkerPool(max(1, workers), credentials=identity.contents)
            )
            load = Load(
                Address("127.0.0.1", 0),
                None,
                max(1, workers),
                min(seconds, MOST_SECONDS),
                _MOST_BYTES,
                send_files=send_files,
            )
            clear = _measure(load, senders, receivers, clock, step)
            tls = _measure(replace(load, tls=identity), senders, receivers, clock, step)
    except (PeerError, InputError, OSError) as error:
        return HostRates(cores, clear, tls, str(error))
    return HostRates(cores, clear, tls)


def _identity(folder: Path) -> TlsIdentity:
    """Of this host, for both ends."""
    authority = CertificateAuthority.new()
    issued = authority.issue("localhost", days=1)
    ca, cert, key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    key.touch(mode=0o600)
    ca.write_bytes(authority.pem)
    cert.write_bytes(issued.pem)
    key.write_bytes(issued.key_pem)
    return TlsIdentity(TlsFiles(ca, cert, key, cert, key))


def _measure(
    load: Load, senders: WorkerPool, receivers: WorkerPool, clock: Clock, step: Callable[[], None]
) -> HostRate:
    """`load` has one connection for each worker, and no address yet."""
    options = ListenerOptions(measure_bytes_per_minute=_UNLIMITED_BYTES)
    server = None if load.tls is None else load.tls.server
    found: list[HostRate] = []
    with Listener(options=options, tls=server, workers=receivers, clock=clock) as listener:
        load = replace(load, address=listener.address)
        for connections in (load.connections, 2 * load.connections):
            some = replace(load, connections=connections)
            rate, nbytes, (sent_s, received_s) = measure(some, senders, clock, (senders, receivers))
            found.append(
                HostRate(
                    gbps=rate.gbps,
                    connections=connections,
                    sender_gbps_per_core=_per_core(nbytes, sent_s),
                    receiver_gbps_per_core=_per_core(nbytes, received_s),
                )
            )
            step()
    return max(found, key=lambda rate: rate.gbps)


def _per_core(nbytes: int, cpu_s: float) -> float | None:
    return nbytes * 8 / cpu_s / 1e9 if cpu_s > 0 else None
