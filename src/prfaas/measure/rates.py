"""Measures how fast several connections carry bytes together, by the ways by which KV travels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.clock import Clock
from prfaas.config.address import Address
from prfaas.measure.path_probe import TIMEOUT_S, Allowance, Delivery, Frames, Probe
from prfaas.security.tls import SERVICE_NAME, TlsIdentity
from prfaas.service.cores import cpu_clock
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.meter import tcp_info
from prfaas.transport.workers.pool import WorkerPool


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    connections: int
    gbps: float  # 10^9 bits per second
    retransmitted_segments: int | None  # None where the platform does not report it
    seconds: float  # over which the rate was measured, without the warm-up
    warmed_up: bool  # False when all bytes were used up before the end of the warm-up


@dataclass(frozen=True, slots=True)
class Load:
    """How much to send, and where. The measurement ends when the time is over or the bytes are
    used up. The rate counts after the warm-up, in which TCP finds out what the path carries."""

    address: Address
    tls: TlsIdentity | None
    connections: int
    seconds: float  # with the warm-up
    nbytes: int
    warm_up_s: float = 0.0
    send_files: bool = True  # with `sendfile`, where nothing is encrypted


class Measured(NamedTuple):
    rate: MeasuredRate
    nbytes: int
    cpu_s: list[float]  # of the processes of each `timed` pool


def measure(
    load: Load, senders: WorkerPool, clock: Clock, timed: Sequence[WorkerPool] = ()
) -> Measured:
    """Sends the load on connections like those of a kvd: `senders` encrypt and send, or this
    process where they are none. Raises PeerError."""
    tls = load.tls
    options = LinkOptions(
        connect_s=TIMEOUT_S,
        silence_s=TIMEOUT_S,
        tls_name=None if tls is None else SERVICE_NAME,
        send_files=load.send_files,
    )
    link = TransferLink(
        load.address,
        options=options,
        tls=None if tls is None else tls.client,
        workers=senders,
        clock=clock,
    )
    probes: list[Probe] = []
    allowance = Allowance(load.nbytes)

    def open_probe(_: int) -> None:
        probe = Probe(link.connect(lambda: False), clock)
        probes.append(probe)
        probe.handshake()
        probe.ping()  # the listener then knows the connection for a path check

    def send(probe: Probe) -> Delivery:
        checked = link.checksums
        return probe.send_for(load.seconds, load.warm_up_s, allowance, frames, checked=checked)

    with Frames() as frames:
        try:
            with ThreadPoolExecutor(load.connections) as threads:
                # Side by side: one after another would take several round trips for each of them.
                list(threads.map(open_probe, range(load.connections)))  # raises the first error
                before_s = [_cpu_s(pool) for pool in timed]
                deliveries = list(threads.map(send, probes))
                cpu_s = [_cpu_s(pool) - s for pool, s in zip(timed, before_s, strict=True)]
            infos = [tcp_info(probe.channel) for probe in probes]
        finally:
            for probe in probes:
                probe.close()
    known = [info.retransmitted_segments for info in infos if info is not None]
    gbps, seconds = summarise(deliveries)
    rate = MeasuredRate(
        len(deliveries),
        gbps,
        sum(known) if known else None,
        seconds,
        warmed_up=all_warmed_up(deliveries),
    )
    return Measured(rate, sum(delivery.nbytes for delivery in deliveries), cpu_s)


def summarise(deliveries: Sequence[Delivery]) -> tuple[float, float]:
    """The rate of all connections together in 10^9 bits per second, and the seconds over which it
    was measured: from the first acknowledgement after the warm-up to the last one. Pure."""
    arrived = [delivery for delivery in deliveries if delivery.nbytes]
    if not arrived:
        return 0.0, 0.0
    last_s = max(delivery.last_s for delivery in arrived)
    nbytes = sum(delivery.nbytes - delivery.base_bytes for delivery in arrived)
    seconds = last_s - min(delivery.base_s for delivery in arrived)
    if nbytes <= 0 or seconds <= 0:  # one acknowledgement for everything
        nbytes = sum(delivery.nbytes for delivery in arrived)
        seconds = last_s - min(delivery.began_s for delivery in arrived)
    return (nbytes * 8 / seconds / 1e9, seconds) if seconds > 0 else (0.0, 0.0)


def all_warmed_up(deliveries: Sequence[Delivery]) -> bool:
    """Of the connections that delivered something: they share their bytes, and one may have used
    them up before another began. Pure."""
    arrived = [delivery.warmed_up for delivery in deliveries if delivery.nbytes]
    return bool(arrived) and all(arrived)


def _cpu_s(pool: WorkerPool) -> float:
    """Of the processes that move the bytes: the workers, or this process where there are none."""
    if not pool.count:
        return time.process_time()
    return sum(time.clock_gettime(cpu_clock(pid)) for pid in pool.pids)
