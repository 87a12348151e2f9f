"""Real packets, really lost: the link reports it, and the verdict turns and turns back. Root."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prfaas.scheduler.congestion import LinkHealth, LinkVerdict, judge
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener
from prfaas_lab.testing.lossy_net import LossyNet
from prfaas_lab.testing.netns import why_not
from tests.transport.ends import Owner, expect, segments, send
from tests.waiting import PATIENCE_S

RATE_BPS = 100e6
REPORT_S = 0.25

needs_packets = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@contextmanager
def traffic(net: LossyNet) -> Iterator[TransferLink]:
    """Transfers one after the other, at half the link's rate, from near to far."""
    contents = segments(500_000)
    options = LinkOptions(
        connections=4, frame_bytes=64 << 10, quantum_bytes=64 << 10, rate_bps=RATE_BPS / 2
    )
    stop = threading.Event()

    def keep_sending(listener: Listener, link: TransferLink) -> None:
        while not stop.is_set():
            owner = Owner()
            send(link, expect(listener, contents, owner), contents).done.result(PATIENCE_S)
            assert owner.memory == contents

    with net.inside_far():
        listener = Listener(net.far_address)
    with listener, net.inside_near(), TransferLink(listener.address, options=options) as link:
        sender = threading.Thread(target=keep_sending, args=(listener, link), daemon=True)
        sender.start()
        try:
            yield link
        finally:
            stop.set()
            sender.join(PATIENCE_S)
            assert not sender.is_alive()


@needs_packets
def test_loss_is_reported_and_the_verdict_turns_and_turns_back() -> None:
    tick = threading.Event()  # never set: a report every REPORT_S is what the clock is for
    health = LinkHealth()
    resent = 0

    def report_until(link: TransferLink, clear: bool) -> None:
        """Reports until the link is clear, or until it is not."""
        nonlocal health, resent
        for _ in range(int(PATIENCE_S / REPORT_S)):
            tick.wait(REPORT_S)
            stats = link.stats()
            resent += stats.retransmitted_segments or 0
            health = judge(health, stats, RATE_BPS)
            if (health.verdict is LinkVerdict.CLEAR) == clear:
                return
        raise AssertionError(f"still {health} after {PATIENCE_S} s of reports")

    with LossyNet(rate_bps=RATE_BPS) as net, traffic(net) as link:
        for _ in range(8):  # reports without loss first
            report_until(link, clear=True)
        before = resent
        net.set_loss(0.03)
        report_until(link, clear=False)
        assert resent > before
        net.set_loss(0.0)
        report_until(link, clear=True)
