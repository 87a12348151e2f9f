from __future__ import annotations

import os
import signal
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.address import Address
from prfaas.errors import PeerError
from prfaas.measure.host_rates import processes_for
from prfaas.measure.path_probe import Allowance, Delivery, Frames
from prfaas.measure.rate_process import Cpu, CpuJob, RateProcess
from prfaas.measure.rates import Load, RateSenders, all_warmed_up, split_load, summarise
from prfaas.transport.listener import Listener
from prfaas.transport.wire import HEADER_BYTES
from tests.transport.ends import nothing_leaks
from tests.waiting import PATIENCE_S

HERE = Address("127.0.0.1", 1)


@given(st.integers(1, 64), st.integers(0, 32), st.integers(0, 1 << 40))
def test_shares_of_a_load(connections: int, processes: int, nbytes: int) -> None:
    shares = split_load(Load(HERE, None, connections, 1.0, nbytes), processes)
    assert len(shares) == max(1, min(processes, connections))
    counts = [share.connections for share in shares]
    assert sum(counts) == connections
    assert 1 <= min(counts) and max(counts) - min(counts) <= 1
    assert nbytes - len(shares) < sum(share.nbytes for share in shares) <= nbytes


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
    frames = Frames()
    sizes = [len(frames.after(n)) - HEADER_BYTES for n in (0, 1 << 20, 4 << 20, 16 << 20, 1 << 40)]
    assert sizes == [64 << 10, 64 << 10, 256 << 10, 1 << 20, 1 << 20]


def test_an_allowance_is_not_exceeded() -> None:
    allowance = Allowance(100)
    assert [allowance.take(n) for n in (60, 60, 40, 1)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("cores", "processes"), [(0.5, 1), (1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (128, 8)]
)
def test_each_end_has_as_many_processes_as_a_kvd(cores: float, processes: int) -> None:
    assert processes_for(cores) == processes


def test_several_processes_send_no_more_than_they_may() -> None:
    with nothing_leaks(), Listener() as listener, RateSenders(2) as senders:
        load = Load(listener.address, None, 3, PATIENCE_S, 6 << 20)
        measured = senders.measure(load)
        assert measured.rate.processes == 2 and measured.rate.connections == 3
        # Each process stops when the next frame does not fit into its share.
        assert 4 << 20 <= measured.nbytes <= 6 << 20
        assert measured.rate.gbps > 0 and measured.cpu_s > 0
        broken = Load(HERE, None, 2, 1.0, 1 << 20)
        with pytest.raises(PeerError, match="refused"):
            senders.measure(broken)
        # The processes can still be used. These loads end before the warm-up, or have none.
        assert not senders.measure(replace(load, warm_up_s=PATIENCE_S)).rate.warmed_up
        assert senders.measure(replace(load, warm_up_s=0.0)).rate.warmed_up


def test_a_process_that_dies_is_an_error() -> None:
    with nothing_leaks(), closing(RateProcess()) as process:
        assert process.ask(CpuJob(), Cpu, PATIENCE_S).seconds > 0
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PeerError, match="a process of this measurement ended"):
            process.ask(CpuJob(), Cpu, PATIENCE_S)
