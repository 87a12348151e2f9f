"""The kvd's end of a connection's socket, against a scripted worker."""

from __future__ import annotations

import pytest

from prfaas.clock import MonotonicClock
from prfaas.errors import ConnectionLost
from prfaas.transport.workers.messages import SendFrame, Sent, Working, encode, socket_pair
from prfaas.transport.workers.order_socket import OrderSocket


def test_one_frame_waits_in_the_worker_while_another_is_sent() -> None:
    ours, theirs = socket_pair()
    orders, order = OrderSocket(ours, MonotonicClock()), SendFrame(b"head", [], True)
    waited: list[int] = []
    with theirs:
        orders.send_frame(order, waited.append)
        assert orders.unsent == 1 and not waited, "nothing has been reported yet"
        for report in (Working(7), Sent()):
            theirs.send(encode(report))
        orders.send_frame(order, waited.append)
        assert orders.unsent == 1 and waited == [7]
        orders.until_s = 0.0
        with pytest.raises(ConnectionLost, match="in time"):  # two are not sent
            orders.send_frame(order, waited.append)
    orders.close()
