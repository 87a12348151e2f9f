"""Faults of real networks, with real sockets and processes. After each fault the bytes are
identical or the transfer failed with a reason, other transfers are unharmed, and nothing leaks."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prfaas.errors import TransferFailed
from prfaas.transport.grants import new_grant, transfer_key
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas.transport.messages import Ended, decode, encode
from prfaas.transport.wire import (
    Kind,
    SegmentPiece,
    auth_of,
    encode_data,
    encode_message,
    parse_progress,
    parse_sequences,
)
from prfaas_lab.testing import FakeClock
from tests.transport.ends import (
    Owner,
    expect,
    grant_for,
    nothing_leaks,
    on_file,
    segments,
    send,
)
from tests.transport.proxy import Proxy
from tests.transport.raw_peer import Raw, manifest
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
FRAMES = LinkOptions(
    connections=2,
    frame_bytes=64 << 10,
    quantum_bytes=64 << 10,
    connect_s=2,
    open_s=PATIENCE_S,
    silence_s=2,
    stall_s=PATIENCE_S,
    probe_s=0.2,
)
# For transfers that must fail. The others have time, because a busy machine is not a fault.
IMPATIENT = replace(FRAMES, connect_s=1, open_s=2, stall_s=3)
QUICK = ListenerOptions(silence_s=2)
CONTENTS = segments(3_000_000, 100, 2_000_000)


@contextmanager
def bystander(listener: Listener) -> Iterator[None]:
    """Another transfer to the same receiver, half before and half after the fault."""
    contents, owner = segments(500_000, 500_000, seed=9), Owner()
    first, second = contents
    with TransferLink(listener.address, options=FRAMES) as link:
        transfer = link.open(expect(listener, contents, owner), dict.fromkeys(contents, 500_000))
        transfer.ready(first, memoryview(contents[first]))
        yield
        transfer.ready(second, memoryview(contents[second]))
        transfer.done.result(PATIENCE_S)
        assert owner.memory == contents


@pytest.fixture
def listener() -> Iterator[Listener]:
    with nothing_leaks():
        with Listener(options=QUICK) as listener:
            with bystander(listener):
                yield listener
            assert listener.stats().granted == 0


def delivered(listener: Listener, address: tuple[str, int]) -> Owner:
    """Sends CONTENTS through `address`. Returns the owner, which has received them unchanged."""
    owner = Owner()
    with TransferLink(address, options=FRAMES) as link:
        send(link, expect(listener, CONTENTS, owner), CONTENTS).done.result(PATIENCE_S)
    assert owner.wait() is None
    assert owner.memory == CONTENTS
    return owner


def test_a_connection_killed_in_mid_transfer(listener: Listener) -> None:
    was_cut = threading.Event()

    def cut_first(number: int, seen: int, data: bytes) -> bytes | None:
        # The first that has carried so much: any one of the link's connections may be faster.
        if seen > 500_000 and not was_cut.is_set():
            was_cut.set()
            return None
        return data

    with Proxy(listener.address, forward=cut_first) as proxy:
        delivered(listener, proxy.address)
    assert was_cut.is_set()


def test_all_connections_killed_several_times(listener: Listener) -> None:
    def cut_each(number: int, seen: int, data: bytes) -> bytes | None:
        return None if number < 6 and seen > 400_000 else data

    with Proxy(listener.address, forward=cut_each) as proxy:
        delivered(listener, proxy.address)


def test_nothing_comes_back_and_the_transfer_fails_in_time(listener: Listener) -> None:
    owner = Owner()
    grant = expect(listener, CONTENTS, owner)
    with Proxy(listener.address, forward=lambda _, seen, d: None if seen > 300_000 else d) as proxy:
        address = proxy.address
        link = TransferLink(address, options=IMPATIENT)
        transfer = send(link, grant, CONTENTS)
    with link:  # every connection is cut now, and the port is gone
        with pytest.raises(TransferFailed, match="nothing acknowledged|not opened"):
            transfer.done.result(PATIENCE_S)
    listener.cancel(grant.transfer_id, "gave up")
    assert owner.wait() == "gave up"


def test_acks_lost_and_the_resent_frame_dies_half_way(listener: Listener) -> None:
    """Connections 0 and 1 deliver, but their acknowledgements are lost. The resent frames are cut
    in the middle. Verified bytes must not change and must not be counted twice."""
    gate = threading.Event()

    def forward(number: int, seen: int, data: bytes) -> bytes | None:
        if number < 2 and seen > 1_000_000:
            gate.set()
            return None
        if number in (2, 3) and seen > 150_000:
            return None
        return data

    def backward(number: int, seen: int, data: bytes) -> bytes | None:
        # Let WELCOME and OPENED through (they are short), then nothing.
        return data if number > 3 or seen < 200 else b""

    with Proxy(listener.address, forward=forward, backward=backward) as proxy:
        delivered(listener, proxy.address)
    assert gate.is_set()
    assert listener.stats().duplicate_bytes > 0


def test_an_arena_is_not_read_after_the_transfer_is_aborted(listener: Listener) -> None:
    """The kernel sends an arena's pages without a copy. After an abort, `done` is set only when the
    kernel no longer reads them: pages that the owner then overwrites are never sent."""
    gate = threading.Event()
    arrived = bytearray()

    def hold(number: int, seen: int, data: bytes) -> bytes | None:
        gate.wait(PATIENCE_S)
        arrived.extend(data)
        return data

    owner, contents = Owner(), {"s0": b"a" * 4_000_000}
    with Proxy(listener.address, backward=None, forward=hold) as proxy:
        with on_file(contents) as slices, TransferLink(proxy.address, options=FRAMES) as link:
            grant = expect(listener, contents, owner)
            transfer = link.open(grant, {"s0": 4_000_000})
            transfer.ready_all(slices)
            gate.set()
            transfer.abort("changed my mind")
            with pytest.raises(TransferFailed, match="changed my mind"):
                transfer.done.result(PATIENCE_S)
            for part in slices["s0"]:
                part.view[:] = b"z" * part.view.nbytes
        listener.cancel(grant.transfer_id, "over")
        owner.wait()
    assert b"zzzzzzzz" not in arrived


def test_one_flipped_bit(listener: Listener) -> None:
    flipped = threading.Event()

    def flip(number: int, seen: int, data: bytes) -> bytes | None:
        if not flipped.is_set() and seen > 700_000 and len(data) > 1000:
            flipped.set()
            broken = bytearray(data)
            broken[777] ^= 0x10
            return bytes(broken)
        return data

    with Proxy(listener.address, forward=flip) as proxy:
        delivered(listener, proxy.address)
    assert flipped.is_set()


def test_an_arenas_bytes_over_connections_that_are_cut(listener: Listener) -> None:
    def cut_each(number: int, seen: int, data: bytes) -> bytes | None:
        return None if number < 4 and seen > 400_000 else data

    owner = Owner()
    with Proxy(listener.address, forward=cut_each) as proxy, on_file(CONTENTS) as slices:
        with TransferLink(proxy.address, options=FRAMES) as link:
            sizes = {name: len(content) for name, content in CONTENTS.items()}
            transfer = link.open(expect(listener, CONTENTS, owner), sizes)
            transfer.ready_all(slices)
            transfer.done.result(PATIENCE_S)
    assert owner.memory == CONTENTS


def test_a_connection_that_swallows_everything(listener: Listener) -> None:
    """The connection neither fails nor ends: only the silence timeout detects it."""

    def swallow(number: int, seen: int, data: bytes) -> bytes | None:
        return b"" if number == 0 and seen > 300_000 else data

    with Proxy(listener.address, forward=swallow) as proxy:
        delivered(listener, proxy.address)


def test_the_receiver_is_killed() -> None:
    command = [sys.executable, "-m", "tests.transport.peer_process", "receive"]
    with nothing_leaks():
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            host, port = process.stdout.readline().split()
            grant = grant_for(CONTENTS)
            process.stdin.write(msgspec.json.encode(grant).decode() + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "expected\n"
            clock = FakeClock()
            with TransferLink((host, int(port)), options=FRAMES, clock=clock) as link:
                transfer = link.open(grant, {n: len(c) for n, c in CONTENTS.items()})
                first = next(iter(CONTENTS))
                transfer.ready(first, memoryview(CONTENTS[first]))
                wait_until(lambda: transfer.acknowledged_bytes > 0)  # it has begun
                process.kill()

                def over_after_a_while() -> bool:
                    clock.advance(FRAMES.stall_s + 1)
                    return transfer.done.done()

                wait_until(over_after_a_while)  # the last acknowledgements may still arrive
                with pytest.raises(TransferFailed, match="nothing acknowledged for 60 s"):
                    transfer.done.result(PATIENCE_S)
            process.wait(PATIENCE_S)


def test_the_sender_is_killed() -> None:
    clock = FakeClock()
    with nothing_leaks(), Listener(clock=clock) as listener, bystander(listener):
        nbytes = 2_000_000
        grant, owner = new_grant("x", max_bytes=nbytes, deadline_s=5), Owner()
        listener.expect(grant, owner)
        host, port = listener.address
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.peer_process", "send", host, str(port)]
            + [msgspec.json.encode(grant).decode(), str(nbytes)],
            cwd=ROOT,
        )
        with process:
            # More than the bystander has sent so far: the transfer has begun.
            wait_until(lambda: listener.stats().received_bytes > 500_000)
            process.kill()
        wait_until(lambda: listener.connections <= 2)  # the bystander's: all frames are read
        assert not owner.over.is_set()
        clock.advance(5.5)
        assert owner.wait() == "grant expired: no frame arrived in time"
        assert listener.stats().granted == 1  # the bystander's


def test_a_port_without_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with nothing_leaks(), TransferLink(address, options=IMPATIENT) as link:
        transfer = send(link, grant_for(CONTENTS), CONTENTS)
        with pytest.raises(TransferFailed, match="not opened within 2 s.*Connection refused"):
            transfer.done.result(PATIENCE_S)


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100])
def test_a_server_that_is_not_ours(words: bytes) -> None:
    def serve(server: socket.socket) -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            peers.append(peer)
            peer.sendall(words)

    peers: list[socket.socket] = []
    with nothing_leaks():
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=serve, args=(server,), daemon=True)
            thread.start()
            with TransferLink(server.getsockname(), options=IMPATIENT) as link:
                transfer = send(link, grant_for(CONTENTS), CONTENTS)
                reason = "not this protocol" if words else "does not answer HELLO"
                with pytest.raises(TransferFailed, match=reason):
                    transfer.done.result(PATIENCE_S)
            server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
        for peer in peers:
            peer.close()


# Hostile peers, byte by byte ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"y" * 64, b"\x16\x03\x01" + bytes(100), b"PFKV"],
)
def test_strangers_are_cut_off(words: bytes) -> None:
    options = ListenerOptions(silence_s=1, unproven_s=1)
    with nothing_leaks(), Listener(options=options) as listener, bystander(listener):
        with Raw(listener, greet=False) as stranger:
            stranger.send(words)
            stranger.assert_cut_off()


def test_frames_before_hello_and_answers_from_a_sender(listener: Listener) -> None:
    with Raw(listener, greet=False) as peer:
        peer.send(encode_message(Kind.PROBE))
        peer.assert_cut_off()
    grant = grant_for(CONTENTS)
    listener.expect(grant, Owner())
    ids = {"transfer_id": transfer_key(grant.transfer_id), "auth": auth_of(grant.token)}
    with Raw(listener) as peer:
        peer.send(encode_message(Kind.OPENED, **ids))  # type: ignore[arg-type]
        peer.assert_cut_off()
    listener.cancel(grant.transfer_id, "over")


def test_a_push_without_a_grant_gets_no_answer(listener: Listener) -> None:
    grant = grant_for(CONTENTS)
    listener.expect(grant, Owner())
    key = transfer_key(grant.transfer_id)
    piece = SegmentPiece(0, 0, 0, 10, 10)
    for transfer_id, auth in ((bytes(16), bytes(16)), (key, auth_of("guess"))):
        for frame in (
            encode_message(Kind.OPEN, encode(manifest(10)), transfer_id=transfer_id, auth=auth),
            encode_message(Kind.PROBE, transfer_id=transfer_id, auth=auth),
            encode_message(Kind.ABORT, transfer_id=transfer_id, auth=auth),
            encode_data(
                [piece], [b"0123456789"], sequence=0, transfer_id=transfer_id, auth=auth,
                checked=True,
            ) + b"0123456789",
        ):  # fmt: skip
            with Raw(listener) as peer:
                peer.send(bytes(frame))
                peer.assert_cut_off()
    assert listener.stats().granted == 2  # the bystander's, and the one without a valid push
    listener.cancel(grant.transfer_id, "over")


def test_a_grant_that_the_receiver_does_not_know_fails_one_transfer(listener: Listener) -> None:
    """As after a restart of the receiver. The sender's other transfers keep their connection."""
    owner = Owner()
    options = replace(FRAMES, connections=1)
    with Proxy(listener.address) as proxy, TransferLink(proxy.address, options=options) as link:
        sizes = {name: len(content) for name, content in CONTENTS.items()}
        kept = link.open(expect(listener, CONTENTS, owner), sizes)
        wait_until(lambda: kept.opened)
        unknown = send(link, grant_for(CONTENTS), CONTENTS)
        with pytest.raises(TransferFailed, match="the receiver knows no such grant"):
            unknown.done.result(PATIENCE_S)
        kept.ready_all({name: [memoryview(content)] for name, content in CONTENTS.items()})
        kept.done.result(PATIENCE_S)
        assert owner.memory == CONTENTS
        assert proxy.connections == 1


def test_a_manifest_that_asks_for_a_terabyte(listener: Listener) -> None:
    grant, owner = grant_for(CONTENTS), Owner()
    listener.expect(grant, owner)
    ids = {"transfer_id": transfer_key(grant.transfer_id), "auth": auth_of(grant.token)}
    with Raw(listener) as peer:
        peer.send(encode_message(Kind.OPEN, encode(manifest(1 << 40)), **ids))  # type: ignore[arg-type]
        answer = peer.answer()
        assert answer.header.kind is Kind.ENDED
        assert "grant allows" in decode(answer.body, Ended).reason
    assert "1099511627776 bytes" in str(owner.wait())
    assert owner.memory == {}


def test_data_that_breaks_the_manifest(listener: Listener) -> None:
    contents = {"s0": b"x" * 10}
    for piece, payload in (
        (SegmentPiece(1, 0, 0, 10, 10), b"x" * 10),
        (SegmentPiece(0, 0, 5, 5, 5), b"x" * 5),
    ):
        grant, owner = grant_for(contents), Owner()
        listener.expect(grant, owner)
        key, auth = transfer_key(grant.transfer_id), auth_of(grant.token)
        with Raw(listener) as peer:
            peer.send(encode_message(Kind.OPEN, encode(manifest(10)), transfer_id=key, auth=auth))
            assert peer.answer().header.kind is Kind.OPENED
            head = encode_data(
                [piece], [payload], sequence=0, transfer_id=key, auth=auth, checked=True
            )
            peer.send(bytes(head) + payload)
            peer.assert_cut_off()
        listener.cancel(grant.transfer_id, "over")
        assert owner.wait() == "over"


def test_data_before_open_and_after_the_end(listener: Listener) -> None:
    contents = {"s0": b"x" * 10}
    grant, owner = grant_for(contents), Owner()
    listener.expect(grant, owner)
    key, auth = transfer_key(grant.transfer_id), auth_of(grant.token)
    frame = encode_data(
        [SegmentPiece(0, 0, 0, 10, 10)],
        [b"x" * 10],
        sequence=5,
        transfer_id=key,
        auth=auth,
        checked=True,
    )
    data = bytes(frame) + b"x" * 10
    with Raw(listener) as peer:
        peer.send(data)
        peer.assert_cut_off()
    with Raw(listener) as peer:
        peer.send(encode_message(Kind.OPEN, encode(manifest(10)), transfer_id=key, auth=auth))
        assert peer.answer().header.kind is Kind.OPENED
        for _ in range(2):  # the second is late: the answer is how the transfer ended
            peer.send(data)
            answer = peer.answer()
            assert answer.header.kind is Kind.ENDED
            assert decode(answer.body, Ended).committed
    assert owner.wait() is None


def test_an_acknowledgement_does_not_wait_for_the_next_frame(listener: Listener) -> None:
    """Frames that pour in are acknowledged together, but never held back by one that trickles."""
    grant, owner = new_grant("x", max_bytes=200, deadline_s=30), Owner()
    listener.expect(grant, owner)
    key, auth = transfer_key(grant.transfer_id), auth_of(grant.token)
    frames = []
    for index in range(2):
        pieces, payload = [SegmentPiece(index, 0, 0, 100, 100)], [b"x" * 100]
        head = encode_data(
            pieces, payload, sequence=index, transfer_id=key, auth=auth, checked=True
        )
        frames.append(bytes(head) + b"x" * 100)
    with Raw(listener) as peer:
        opening = encode_message(Kind.OPEN, encode(manifest(100, 100)), transfer_id=key, auth=auth)
        peer.send(opening)
        assert peer.answer().header.kind is Kind.OPENED
        peer.send(frames[0] + frames[1][:-50])
        answer = peer.answer()
        assert answer.header.kind is Kind.ACK
        assert parse_sequences(answer.body) == (0,)
        progress = peer.answer()
        assert progress.header.kind is Kind.PROGRESS and progress.header.sequence == 1
        assert parse_progress(progress.body) == 50, "how much of the slow frame has arrived"
        peer.send(frames[1][-50:])
        assert decode(peer.answer().body, Ended).committed
    assert owner.wait() is None


def test_slow_peers_do_not_hold_up_others(listener: Listener) -> None:
    """Thirty peers trickle a frame each; one of them holds a claim on a granted transfer."""
    contents = {"s0": b"x" * 100_000}
    grant, owner = grant_for(contents), Owner()
    listener.expect(grant, owner)
    key, auth = transfer_key(grant.transfer_id), auth_of(grant.token)
    slow = [Raw(listener, greet=False) for _ in range(30)]
    holder = Raw(listener)
    holder.send(encode_message(Kind.OPEN, encode(manifest(100_000)), transfer_id=key, auth=auth))
    assert holder.answer().header.kind is Kind.OPENED
    piece = SegmentPiece(0, 0, 0, 64 << 10, 64 << 10)
    payload = contents["s0"][: 64 << 10]
    head = encode_data([piece], [payload], sequence=0, transfer_id=key, auth=auth, checked=True)
    holder.send(bytes(head) + payload[:1000])  # and no more
    for peer in slow:
        peer.send(b"PFK")
    delivered(listener, listener.address)
    # The half-written piece is free again once its writer has been silent for too long.
    with TransferLink(listener.address, options=FRAMES) as link:
        transfer = link.open(grant, {"s0": 100_000})
        transfer.ready("s0", memoryview(contents["s0"]))
        transfer.done.result(PATIENCE_S)
    assert owner.wait() is None
    assert owner.memory == contents
    for peer in [*slow, holder]:
        peer.__exit__()


def test_idle_strangers_leave_by_themselves() -> None:
    with nothing_leaks():
        options = ListenerOptions(max_unproven=3, unproven_s=1)
        with Listener(options=options) as listener:
            peers = [Raw(listener, greet=False) for _ in range(4)]
            # They have shown no grant: one makes room for the fourth, the others leave in time.
            for peer in peers:
                peer.assert_cut_off()
                peer.__exit__()
            delivered(listener, listener.address)


def test_closing_while_connections_come_in() -> None:
    with nothing_leaks():
        for _ in range(20):
            listener = Listener()
            peers = [socket.create_connection(listener.address) for _ in range(3)]
            listener.close()
            for peer in peers:
                peer.close()


def test_measurements_are_bounded() -> None:
    options = ListenerOptions(measure_bytes_per_minute=100_000)
    with Listener(options=options) as listener, Raw(listener) as peer:
        frame = encode_message(Kind.MEASURE, bytes(60_000))
        peer.send(frame)
        assert peer.answer().header.kind is Kind.ACK
        peer.send(frame)
        peer.assert_cut_off()


def test_grants_and_remembered_results_expire() -> None:
    from prfaas.transport.receiver import ReceiverTransfers
    from prfaas_lab.testing import FakeClock

    clock = FakeClock()
    transfers = ReceiverTransfers(clock)
    grant, owner = new_grant("x", max_bytes=10, deadline_s=5), Owner()
    transfers.expect(grant, owner)
    clock.advance(4.9)
    transfers.expire()
    assert not owner.over.is_set()
    clock.advance(0.2)
    transfers.expire()
    assert owner.wait() == "grant expired: no frame arrived in time"
    assert transfers.stats().remembered == 1
    clock.advance(9.9)
    transfers.expire()
    assert transfers.stats().remembered == 1
    clock.advance(0.2)
    transfers.expire()
    assert transfers.stats().remembered == 0
