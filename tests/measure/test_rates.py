from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.clock import MonotonicClock
from prfaas.config.address import Address
from prfaas.errors import PeerError
from prfaas.measure.path_probe import Allowance, Delivery, Frames
from prfaas.measure.rates import Load, all_warmed_up, measure, summarise
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas.transport.wire import intact, parse_header
from prfaas.transport.workers.pool import WorkerPool
from prfaas_lab.testing.certificates import make_certificates
from tests.transport.ends import nothing_leaks
from tests.waiting import PATIENCE_S, wait_until

HERE = Address("127.0.0.1", 1)


def delivery(nbytes: int, last_s: float, base_bytes: int, base_s: float) -> Delivery:
    return Delivery(0.0, nbytes, last_s, base_bytes, base_s, warmed_up=True)


def test_the_rate_counts_after_the_warm_up() -> None:
    gbps, seconds = summarise([delivery(1_000, 3.0, 200, 1.0), delivery(500, 2.0, 100, 1.5)])
    assert seconds == 2.0
    assert gbps == pytest.approx((800 + 400) * 8 / 2.0 / 1e9)


def test_one_acknowledgement_counts_from_the_beginning() -> None:
    only = delivery(1_000, 2.0, 1_000, 2.0)
    assert summarise([only]) == (pytest.approx(1_000 * 8 / 2.0 / 1e9), 2.0)


def test_nothing_has_arrived() -> None:
    assert summarise([]) == summarise([delivery(0, 0.0, 0, 0.0)]) == (0.0, 0.0)


def test_a_connection_without_bytes_says_nothing_about_the_warm_up() -> None:
    warm, cold = delivery(1_000, 3.0, 200, 1.0), Delivery(0.0, 500, 1.0, 500, 1.0, False)
    nothing = Delivery(0.0, 0, 0.0, 0, 0.0, warmed_up=False)
    assert all_warmed_up([warm, nothing])
    assert not all_warmed_up([warm, cold])
    assert not all_warmed_up([nothing])


def test_frames_grow_with_the_bytes_delivered() -> None:
    with Frames() as frames:
        sizes = [frames.after(n).payload.nbytes for n in (0, 1 << 20, 4 << 20, 64 << 20, 1 << 40)]
        assert sizes == [64 << 10, 64 << 10, 256 << 10, 4 << 20, 4 << 20]
        for size in (0, 1 << 40):
            frame = frames.after(size)
            assert intact(frame.head, parse_header(frame.head), frame.view)


def test_an_allowance_is_not_exceeded() -> None:
    allowance = Allowance(100)
    assert [allowance.take(n) for n in (60, 60, 40, 1)] == [True, False, True, False]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("encrypted", [False, True])
def test_several_connections_send_no_more_than_they_may(
    workers: int, encrypted: bool, tmp_path: Path
) -> None:
    """From this process and from workers, which encrypt, too."""
    tls = make_certificates(tmp_path).identity() if encrypted else None
    clock = MonotonicClock()
    with (
        nothing_leaks(),
        Listener(tls=None if tls is None else tls.server) as listener,
        WorkerPool(workers, credentials=None if tls is None else tls.contents) as senders,
    ):
        load = Load(listener.address, tls, 3, PATIENCE_S, 6 << 20)
        rate, nbytes, cpu_s = measure(load, senders, clock, [senders])
        assert rate.connections == 3 and rate.gbps > 0 and len(cpu_s) == 1 and cpu_s[0] > 0
        # A connection stops when the next frame does not fit into what is left.
        assert 5 << 20 <= nbytes <= 6 << 20
        with pytest.raises(PeerError, match="refused"):
            measure(replace(load, address=HERE), senders, clock)
        # The workers can still be used. These loads end before the warm-up, or have none.
        assert not measure(replace(load, warm_up_s=PATIENCE_S), senders, clock).rate.warmed_up
        assert measure(replace(load, warm_up_s=0.0), senders, clock).rate.warmed_up


def test_a_worker_that_dies_is_an_error() -> None:
    options = ListenerOptions(measure_bytes_per_minute=1 << 60)
    with (
        nothing_leaks(),
        Listener(options=options) as listener,
        WorkerPool(1) as senders,
        ThreadPoolExecutor(1) as thread,
    ):
        load = Load(listener.address, None, 1, PATIENCE_S, 1 << 60)
        measured = thread.submit(measure, load, senders, MonotonicClock())
        wait_until(lambda: listener.connections == 1)
        os.kill(senders.pids[0], signal.SIGKILL)
        with pytest.raises(PeerError, match="worker process"):
            measured.result(PATIENCE_S)
