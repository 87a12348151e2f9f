"""Reading ahead while the kvd decides, over a real pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from prfaas.clock import MonotonicClock
from prfaas.errors import ConnectionLost
from prfaas.transport.channel import Channel
from prfaas.transport.workers import read_ahead
from prfaas.transport.workers.read_ahead import AHEAD_BYTES, ReadAhead

DATA = (bytes(range(251)) * (AHEAD_BYTES // 100))[: 3 * AHEAD_BYTES // 2]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    channel = Channel(far, MonotonicClock(), 10.0)
    with near:
        yield near, channel
    channel.close()


def rest_of(channel: Channel, views: list[memoryview]) -> None:
    if views:
        channel.receive(views, sum(view.nbytes for view in views))


def test_what_was_read_comes_first_and_the_rest_follows(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, channel = ends
    near.sendall(DATA[:50_000])
    monkeypatch.setattr(read_ahead, "_STEP_BYTES", 10_000)
    decisions = iter([False, False, True])
    ahead = ReadAhead()
    ahead.fill(channel, 50_000, lambda: next(decisions))
    assert ahead.nbytes == 20_000, "two steps before the decision"
    target = bytearray(50_000)
    places = [memoryview(target)[a:b] for a, b in ((0, 7), (7, 15_000), (15_000, 50_000))]
    rest_of(channel, ahead.pass_on(places))
    assert target == DATA[:50_000] and ahead.nbytes == 0


def test_no_more_than_the_frame_and_the_limit_is_read(
    ends: tuple[socket.socket, Channel],
) -> None:
    near, channel = ends
    near.sendall(DATA[:900])
    ahead = ReadAhead()
    ahead.fill(channel, 300, lambda: False)
    first = bytearray(300)
    assert ahead.pass_on([memoryview(first)]) == [] and first == DATA[:300]
    ahead.fill(channel, 600, lambda: False)
    pieces = [bytearray(100), bytearray(500)]
    for piece in pieces:  # orders may take it in parts
        assert ahead.pass_on([memoryview(piece)]) == []
    assert b"".join(pieces) == DATA[300:900]


def test_a_peer_that_stops_is_left_to_the_caller_and_one_that_closes_is_lost(
    ends: tuple[socket.socket, Channel],
) -> None:
    near, channel = ends
    near.sendall(DATA[:10])
    ahead = ReadAhead()
    ahead.fill(channel, 1_000, lambda: False)
    assert ahead.nbytes == 10
    assert ahead.pass_on([memoryview(bytearray(10))]) == []
    near.close()
    with pytest.raises(ConnectionLost):
        ahead.fill(channel, 1_000, lambda: False)
