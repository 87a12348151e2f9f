"""Connections that have not proved a grant: they are few, they cost little, and they end in time,
whatever they send."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prfaas.security.tls import server_context
from prfaas.transport.grants import new_grant, transfer_key
from prfaas.transport.link import TransferLink
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas.transport.messages import encode
from prfaas.transport.wire import (
    MAX_MANIFEST_BYTES,
    MAX_MESSAGE_BYTES,
    Kind,
    SegmentPiece,
    auth_of,
    encode_data,
    encode_message,
)
from prfaas.types import Grant
from prfaas_lab.testing import FakeClock
from prfaas_lab.testing.certificates import make_certificates
from tests.transport.ends import Owner, expect, nothing_leaks, segments, send
from tests.transport.raw_peer import GREETING, Raw, manifest
from tests.waiting import PATIENCE_S, wait_until

CONTENTS = segments(500_000, 3)
# A peer in the middle of a frame is patiently waited for: what ends it here is another limit.
OPTIONS = ListenerOptions(silence_s=1e6, unproven_s=10)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def listener(clock: FakeClock) -> Iterator[Listener]:
    with nothing_leaks(), Listener(options=OPTIONS, clock=clock) as made:
        yield made


def deliver(listener: Listener) -> None:
    owner = Owner()
    with TransferLink(listener.address) as link:
        send(link, expect(listener, CONTENTS, owner), CONTENTS).done.result(PATIENCE_S)
    assert owner.wait() is None
    assert owner.memory == CONTENTS


def granted(listener: Listener, owner: Owner, nbytes: int = 100) -> tuple[Grant, dict[str, bytes]]:
    """A grant, and what its frames carry as proof."""
    grant = new_grant("test", max_bytes=nbytes, deadline_s=1e6)
    listener.expect(grant, owner)
    return grant, {"transfer_id": transfer_key(grant.transfer_id), "auth": auth_of(grant.token)}


def header(kind: Kind, body_bytes: int) -> bytes:
    """A header that announces a body, without the body."""
    frame = bytearray(encode_message(kind))
    struct.pack_into("<I", frame, 8, body_bytes)
    return bytes(frame)


def test_connections_without_a_grant_leave_room_for_senders(listener: Listener) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(Raw(listener, greet=False)).send(GREETING)
        deliver(listener)


def test_the_oldest_connection_without_a_grant_makes_room(clock: FakeClock) -> None:
    options = ListenerOptions(max_unproven=3)
    with nothing_leaks(), Listener(options=options, clock=clock) as listener, ExitStack() as stack:
        oldest, *others = [stack.enter_context(Raw(listener)) for _ in range(4)]
        oldest.assert_cut_off()
        wait_until(lambda: listener.connections == 3)
        _, ids = granted(listener, Owner())
        for peer in others:
            peer.send(encode_message(Kind.PROBE, **ids))  # type: ignore[arg-type]
            assert peer.answer().header.kind is Kind.ALIVE
        stack.enter_context(Raw(listener))
        assert listener.connections == 4, "those with a grant take no place of the others"


def test_a_host_with_many_connections_without_a_grant_loses_its_own(clock: FakeClock) -> None:
    options = ListenerOptions(max_unproven=3)
    with nothing_leaks(), Listener("0.0.0.0", options=options, clock=clock) as listener:
        with Raw(listener) as first, ExitStack() as stack:
            many = [stack.enter_context(Raw(listener, source="127.0.0.2")) for _ in range(5)]
            for peer in many[:3]:
                peer.assert_cut_off()
            _, ids = granted(listener, Owner())
            for peer in (first, *many[3:]):
                peer.send(encode_message(Kind.PROBE, **ids))  # type: ignore[arg-type]
                assert peer.answer().header.kind is Kind.ALIVE


def test_connections_with_a_grant_are_bounded(clock: FakeClock) -> None:
    options = ListenerOptions(max_connections=2)
    with nothing_leaks(), Listener(options=options, clock=clock) as listener, ExitStack() as stack:
        _, ids = granted(listener, Owner())
        for _ in range(2):
            peer = stack.enter_context(Raw(listener))
            peer.send(encode_message(Kind.PROBE, **ids))  # type: ignore[arg-type]
            assert peer.answer().header.kind is Kind.ALIVE
        third = stack.enter_context(Raw(listener))
        third.send(encode_message(Kind.PROBE, **ids))  # type: ignore[arg-type]
        third.assert_cut_off()


def test_path_checks_are_few_and_leave_room_for_senders(clock: FakeClock) -> None:
    options = ListenerOptions(max_measuring=2, max_unproven=1, max_connections=4)
    with nothing_leaks(), Listener(options=options, clock=clock) as listener, ExitStack() as stack:
        for _ in range(2):
            peer = stack.enter_context(Raw(listener))
            peer.send(encode_message(Kind.MEASURE))
            assert peer.answer().header.kind is Kind.ACK
        third = stack.enter_context(Raw(listener))
        third.send(encode_message(Kind.MEASURE))
        third.assert_cut_off()
        deliver(listener)


def test_a_peer_without_a_grant_cannot_fill_the_log(
    listener: Listener, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def cut_off(times: int) -> None:
        for _ in range(times):
            with Raw(listener) as peer:
                peer.send(encode_message(Kind.PROBE))
                peer.assert_cut_off()
        wait_until(lambda: listener.connections == 0)

    cut_off(5)
    clock.advance(1)
    cut_off(1)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 2 and lines[1].endswith("(4 similar lines left out)")


def test_one_hello_is_enough(listener: Listener) -> None:
    with Raw(listener) as peer:
        peer.send(GREETING)
        peer.assert_cut_off()


@pytest.mark.parametrize(
    ("kind", "body_bytes"),
    [
        (Kind.OPEN, MAX_MANIFEST_BYTES),
        (Kind.ABORT, MAX_MESSAGE_BYTES),
        (Kind.OPENED, MAX_MESSAGE_BYTES),
    ],
)
def test_no_body_is_read_without_a_grant(listener: Listener, kind: Kind, body_bytes: int) -> None:
    with Raw(listener) as peer:
        peer.send(header(kind, body_bytes))
        peer.assert_cut_off()


def test_no_table_of_pieces_is_read_without_a_grant(listener: Listener) -> None:
    piece = SegmentPiece(0, 0, 0, 10, 10)
    ids = {"transfer_id": bytes(16), "auth": bytes(16)}
    head = encode_data([piece] * 500, [b"x" * 10] * 500, sequence=1, checked=True, **ids)
    with Raw(listener) as peer:
        peer.send(bytes(head[:64]))
        peer.assert_cut_off()


def test_a_hello_is_small(listener: Listener) -> None:
    with Raw(listener, greet=False) as peer:
        peer.send(header(Kind.HELLO, MAX_MESSAGE_BYTES))
        peer.assert_cut_off()


@pytest.mark.parametrize("greet", [True, False])
def test_a_frame_that_arrives_slowly_does_not_extend_the_time(
    listener: Listener, clock: FakeClock, greet: bool
) -> None:
    with Raw(listener, greet=greet) as peer:
        peer.send(GREETING[:20])
        wait_until(lambda: listener.connections == 1)
        clock.advance(OPTIONS.unproven_s)
        peer.assert_cut_off()


def test_the_tls_handshake_counts(tmp_path: Path, clock: FakeClock) -> None:
    made = make_certificates(tmp_path)
    context = server_context(made.ca, made.server, made.server_key)
    options = ListenerOptions(silence_s=1e6, unproven_s=1e6)
    with Listener(tls=lambda: context, options=options, clock=clock) as listener:
        with Raw(listener, greet=False) as peer:
            peer.send(b"\x16\x03\x01")
            wait_until(lambda: listener.connections == 1)
            clock.advance(options.unproven_s)
            peer.assert_cut_off()


def test_a_path_check_ends(listener: Listener, clock: FakeClock) -> None:
    frame = encode_message(Kind.MEASURE, bytes(1000))

    def measure_for_an_hour() -> None:
        for _ in range(360):
            peer.send(frame)  # one frame always waits to be read: the peer is never silent
            assert peer.answer().header.kind is Kind.ACK
            clock.advance(10)

    with Raw(listener) as peer:
        peer.send(frame)
        with pytest.raises((ConnectionError, AssertionError), match="closed|reset|pipe"):
            measure_for_an_hour()


def test_a_path_check_may_take_longer_than_a_connection_without_a_grant(
    listener: Listener, clock: FakeClock
) -> None:
    frame = encode_message(Kind.MEASURE, bytes(1000))
    with Raw(listener) as peer:
        peer.send(frame)
        assert peer.answer().header.kind is Kind.ACK
        for _ in range(7):  # more than a minute, the longest check of `prfaas doctor`
            clock.advance(OPTIONS.unproven_s)
            peer.send(frame)
            assert peer.answer().header.kind is Kind.ACK


def test_a_connection_ends_some_time_after_its_transfers(
    listener: Listener, clock: FakeClock
) -> None:
    grant, ids = granted(listener, Owner())
    with Raw(listener) as peer:
        peer.send(encode_message(Kind.PROBE, **ids))  # type: ignore[arg-type]
        assert peer.answer().header.kind is Kind.ALIVE
        clock.advance(OPTIONS.idle_s - 1)
        peer.send(encode_message(Kind.PROBE, **ids))  # type: ignore[arg-type]
        assert peer.answer().header.kind is Kind.ALIVE
        listener.cancel(grant.transfer_id, "over")
        clock.advance(OPTIONS.idle_s - 1)
        peer.send(encode_message(Kind.PROBE, **ids))  # type: ignore[arg-type]
        assert peer.answer().header.kind is Kind.ENDED
        clock.advance(1)
        peer.assert_cut_off()


def test_an_owner_gets_its_memory_back_although_a_frame_never_ends(clock: FakeClock) -> None:
    owner, nbytes = Owner(), 64 << 10
    options = ListenerOptions(silence_s=10)
    with Listener(options=options, clock=clock) as listener, Raw(listener) as peer:
        grant, ids = granted(listener, owner, nbytes)
        peer.send(encode_message(Kind.OPEN, encode(manifest(nbytes)), **ids))  # type: ignore[arg-type]
        assert peer.answer().header.kind is Kind.OPENED
        head = encode_data(
            [SegmentPiece(0, 0, 0, nbytes, nbytes)],
            [bytes(nbytes)],
            sequence=1,
            checked=True,
            **ids,
        )
        clock.advance(1)  # progress is reported at intervals
        peer.send(bytes(head) + b"x")
        assert peer.answer().header.kind is Kind.PROGRESS, "the listener writes the frame"
        listener.cancel(grant.transfer_id, "over")
        sent = iter(range(nbytes - 2))

        def over_while_bytes_arrive() -> bool:
            try:
                peer.send(b"x" if next(sent, None) is not None else b"")
            except ConnectionError:
                pass  # cut off
            clock.advance(1)
            return owner.over.is_set()

        wait_until(over_while_bytes_arrive)
        assert owner.wait() == "over"
