"""Measures how fast several connections carry bytes together, sent by one or more processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from prfaas.config.address import Address
from prfaas.errors import PeerError
from prfaas.measure.path_probe import TIMEOUT_S, Delivery
from prfaas.measure.rate_process import (
    Connected,
    ConnectJob,
    RateProcess,
    SendJob,
    Sent,
    TlsPaths,
)

_SETUP_STEPS = 3  # of a connection: connect with TLS, HELLO, ping; each may take the timeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    connections: int
    gbps: float  # 10^9 bits per second
    retransmitted_segments: int | None  # None where the platform does not report it
    seconds: float  # over which the rate was measured, without the warm-up
    warmed_up: bool  # False when all bytes were used up before the end of the warm-up
    processes: int  # that sent


@dataclass(frozen=True, slots=True)
class Load:
    """How much to send, and where. The measurement ends when the time is over or the bytes are
    used up. The rate counts after the warm-up, in which TCP finds out what the path carries."""

    address: Address
    tls: TlsPaths | None
    connections: int
    seconds: float  # with the warm-up
    nbytes: int
    warm_up_s: float = 0.0


class Measured(NamedTuple):
    rate: MeasuredRate
    nbytes: int
    cpu_s: float  # of the sending processes


class RateSenders:
    """The sending processes. Use it as a context manager: its end ends them."""

    def __init__(self, most: int) -> None:
        self._processes: list[RateProcess] = []
        self._most = most

    def __enter__(self) -> RateSenders:
        return self

    def __exit__(self, *_: object) -> None:
        while self._processes:
            self._processes.pop().close()

    def measure(self, *loads: Load) -> Measured:
        """Sends all loads at once. The connections of each load are spread over its share of the
        processes. Raises PeerError."""
        shares = [share for load in loads for share in split_load(load, self._most // len(loads))]
        while len(self._processes) < len(shares):
            self._processes.append(RateProcess())
        used = self._processes[: len(shares)]
        for process, share in zip(used, shares, strict=True):
            host, port = share.address
            process.tell(ConnectJob(host, port, share.tls, share.connections))
        _collect(used, Connected, _SETUP_STEPS * TIMEOUT_S * max(s.connections for s in shares))
        for process, share in zip(used, shares, strict=True):
            process.tell(SendJob(share.seconds, share.warm_up_s, share.nbytes))
        results = _collect(used, Sent, loads[0].seconds + 2 * TIMEOUT_S)
        deliveries = [delivery for result in results for delivery in result.deliveries]
        known = [
            result.retransmitted_segments
            for result in results
            if result.retransmitted_segments is not None
        ]
        gbps, seconds = summarise(deliveries)
        rate = MeasuredRate(
            len(deliveries),
            gbps,
            sum(known) if known else None,
            seconds,
            warmed_up=all_warmed_up(deliveries),
            processes=len(used),
        )
        return Measured(
            rate, sum(d.nbytes for d in deliveries), sum(result.cpu_s for result in results)
        )


def split_load(load: Load, processes: int) -> list[Load]:
    """Nearly equal shares for that many processes; each has at least one connection. Pure."""
    count = max(1, min(processes, load.connections))
    each, more = divmod(load.connections, count)
    return [
        replace(
            load,
            connections=each + (index < more),
            nbytes=load.nbytes * (each + (index < more)) // load.connections,
        )
        for index in range(count)
    ]


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
    """Of the connections that delivered something: those of one process share their bytes, and one
    may have used them up before another began. Pure."""
    arrived = [delivery.warmed_up for delivery in deliveries if delivery.nbytes]
    return bool(arrived) and all(arrived)


def _collect(processes: Sequence[RateProcess], kind: type[T], within_s: float) -> list[T]:
    """Waits for all, also after an error, so that each process is free for the next job."""
    results: list[T] = []
    errors: list[PeerError] = []
    for process in processes:
        try:
            results.append(process.wait_for(kind, within_s))
        except PeerError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
