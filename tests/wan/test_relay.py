"""The relay with real sockets. A test either drives the relay's clock itself, or asserts times that
a slow machine cannot fail: a byte is never early, a rate is never exceeded."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from prfaas.config.address import Address
from prfaas.errors import InputError
from prfaas.wan import acceptor as acceptor_module
from prfaas.wan.path import QUEUE_S, Conditions, Recurring
from prfaas.wan.relay import Relay, describe
from prfaas_lab.testing import FakeClock
from tests.transport.wan_peers import TIMEOUT_S, receive, reset, turned_away, wan, was_reset
from tests.waiting import wait_until

MIB = 1024 * 1024


def send_in_background(sock: socket.socket, data: bytes) -> threading.Thread:
    def send() -> None:
        try:
            sock.sendall(data)
        except OSError:
            pass  # the test ended the connection under it

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def finish_a_round(relay: Relay) -> None:
    """Returns after the relay's loop has acted on the current time. The loop runs the first command
    in some round and the second in a later one, so a whole round lies between them."""
    for _ in range(2):
        relay.damage(0)


def test_bytes_arrive_whole_in_both_directions() -> None:
    data = os.urandom(5 * MIB)
    with wan(Conditions(rtt_s=0.004, jitter_s=0.003)) as net:
        client, target = net.connect()
        with client, target:
            for sender, receiver in ((client, target), (target, client)):
                send_in_background(sender, data)
                assert receive(receiver, len(data)) == data
        # The relay counts a chunk after it has sent it.
        wait_until(lambda: net.relay.stats.to_target_bytes == len(data))
        wait_until(lambda: net.relay.stats.to_client_bytes == len(data))


def test_damage_is_one_bit_of_as_many_large_chunks_as_were_ordered() -> None:
    data = os.urandom(MIB)
    with wan(Conditions()) as net:
        client, target = net.connect()
        with client, target:
            net.relay.damage(3)
            send_in_background(client, data)
            arrived = receive(target, len(data))
            assert net.relay.stats.damaged == 3
            differing = [a ^ b for a, b in zip(arrived, data, strict=True) if a != b]
            assert differing == [0x10] * 3
            send_in_background(client, data)
            assert receive(target, len(data)) == data


def test_no_byte_is_early() -> None:
    with wan(Conditions(rtt_s=0.1)) as net:
        client, target = net.connect()
        with client, target:
            for sender, receiver in ((client, target), (target, client)) * 2:
                sent_s = time.monotonic()
                sender.sendall(b"x")
                assert receiver.recv(1) == b"x"
                assert time.monotonic() - sent_s >= 0.05


def test_all_connections_together_stay_below_the_rate() -> None:
    rate_bps, each_bytes = 80e6, MIB
    with wan(Conditions(rate_bps=rate_bps, rtt_s=0.01)) as net:
        pairs = [net.connect() for _ in range(4)]
        started_s = time.monotonic()
        for client, _ in pairs:
            send_in_background(client, bytes(each_bytes))
        received = sum(len(receive(target, each_bytes)) for _, target in pairs)
        took_s = time.monotonic() - started_s
        for ends in pairs:
            for end in ends:
                end.close()
    assert received == 4 * each_bytes
    assert received * 8 / took_s <= rate_bps * 1.001


def test_several_ports_share_one_path() -> None:
    rate_bps, each_bytes = 80e6, MIB
    hosts = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    anywhere = Address("127.0.0.1", 0)
    first, second = ((anywhere, Address(*host.getsockname())) for host in hosts)
    with Relay(*first, Conditions(rate_bps=rate_bps), also=[second]) as relay:
        clients = [socket.create_connection(door, TIMEOUT_S) for door in relay.addresses]
        targets = [host.accept()[0] for host in hosts]
        started_s = time.monotonic()
        for mark, client in zip(b"ab", clients, strict=True):
            send_in_background(client, bytes([mark]) * each_bytes)
        for mark, target in zip(b"ab", targets, strict=True):
            target.settimeout(TIMEOUT_S)
            assert set(receive(target, each_bytes)) == {mark}  # each door leads to its own host
        assert time.monotonic() - started_s >= 2 * each_bytes * 8 / rate_bps * 0.9
        relay.outage()
        for door in relay.addresses:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(door, TIMEOUT_S)
        relay.restore()
        assert accepts(relay)
    for sock in (*clients, *targets, *hosts):
        sock.close()


def test_each_direction_has_its_own_rate() -> None:
    """Saturating one direction leaves the other its own: 32 MiB one way need half a minute, yet
    the answer comes back while they are on their way."""
    with wan(Conditions(rate_bps=8e6)) as net:
        client, target = net.connect()
        with client, target:
            send_in_background(client, bytes(32 * MIB))
            receive(target, 1)
            target.sendall(b"answer")
            assert receive(client, 6) == b"answer"
            assert net.relay.stats.to_target_bytes < 32 * MIB


def test_every_connection_gets_its_share() -> None:
    """While all offer more than the lane takes, they are read in turn."""
    with wan(Conditions(rate_bps=20e6)) as net:
        pairs = [net.connect() for _ in range(6)]
        net.relay.stall()
        for client, _ in pairs:
            client.sendall(bytes(256 * 1024))  # fits into the kernel's buffers
        net.relay.restore()
        wait_until(lambda: net.relay.stats.to_target_bytes >= 6 * 64 * 1024)
        net.relay.stall()
        passed = [len(take_all(target)) for _, target in pairs]
        for ends in pairs:
            for end in ends:
                end.close()
    assert max(passed) - min(passed) <= 2 * net.relay.conditions.chunk_bytes


def test_half_close_passes_through() -> None:
    with wan(Conditions(rtt_s=0.004)) as net:
        client, target = net.connect()
        with client, target:
            client.sendall(b"question")
            client.shutdown(socket.SHUT_WR)
            assert receive(target, 100) == b"question"  # and its end
            target.sendall(b"answer")
            target.close()
            assert receive(client, 100) == b"answer"
        wait_for_connections(net.relay, 0)


def test_a_reset_passes_through_after_the_bytes() -> None:
    with wan(Conditions(rtt_s=0.04)) as net:
        client, target = net.connect()
        client.sendall(b"last words")
        receive(target, 10)
        started_s = time.monotonic()
        reset(client)
        assert was_reset(target)
        assert time.monotonic() - started_s >= 0.02
        target.close()
        wait_for_connections(net.relay, 0)


def test_bytes_for_a_dead_receiver_are_dropped() -> None:
    with wan(Conditions(rate_bps=1e9, rtt_s=0.01)) as net:
        for _ in range(5):
            client, target = net.connect()
            sender = send_in_background(client, bytes(16 * MIB))
            receive(target, MIB)
            reset(target)
            sender.join(TIMEOUT_S)
            assert not sender.is_alive()
            client.close()
        wait_for_connections(net.relay, 0)
        wait_until(lambda: net.relay.stats.held_bytes == 0)


def test_cut_resets_both_ends_and_lets_new_ones_in() -> None:
    with wan() as net:
        client, target = net.connect()
        net.relay.cut()
        assert was_reset(client)
        assert was_reset(target)
        again, target_again = net.connect()
        again.sendall(b"x")
        assert target_again.recv(1) == b"x"
        for sock in (client, target, again, target_again):
            sock.close()


def test_scheduled_cuts() -> None:
    clock = FakeClock()
    with wan(Conditions(cut_every_s=5.0), clock) as net:
        for _ in range(2):
            client, target = net.connect()
            clock.advance(5.0)
            finish_a_round(net.relay)
            with client, target:
                assert was_reset(client)
                assert was_reset(target)


def test_a_stall_keeps_connections_and_bytes() -> None:
    with wan() as net:
        client, target = net.connect()
        with client, target:
            net.relay.stall()
            client.sendall(b"waits")
            target.setblocking(False)
            net.relay.change(Conditions())  # answered by a loop that is alive and still stalled
            with pytest.raises(BlockingIOError):
                target.recv(5)
            target.settimeout(TIMEOUT_S)
            during, during_target = net.connect()
            net.relay.restore()
            assert receive(target, 5) == b"waits"
            during.close()
            during_target.close()


def test_stalled_bytes_resume_their_journey() -> None:
    """A byte that was stalled on the way still needs the rest of its delay."""
    clock = FakeClock()
    with wan(Conditions(rtt_s=4.0), clock) as net:
        client, target = net.connect()
        with client, target:
            client.sendall(b"x")
            wait_until(lambda: net.relay.stats.held_bytes == 1)
            clock.advance(0.5)
            net.relay.stall()
            clock.advance(100.0)
            net.relay.restore()
            clock.advance(1.4)
            finish_a_round(net.relay)
            assert take_all(target) == b""
            clock.advance(0.2)
            finish_a_round(net.relay)
            assert take_all(target) == b"x"


def test_an_outage_refuses_new_connections_and_keeps_the_port() -> None:
    with wan() as net:
        client, target = net.connect()
        with client, target:
            net.relay.outage()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(net.relay.address, TIMEOUT_S)
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(net.relay.address)
            client.sendall(b"x")
            net.relay.restore()
            assert target.recv(1) == b"x"
            again, target_again = net.connect()
            again.close()
            target_again.close()


def test_scheduled_outages_begin_and_end() -> None:
    clock = FakeClock()
    with wan(Conditions(outage=Recurring(10.0, 1.0)), clock) as net:
        assert accepts(net.relay)
        for up_s in (10.0, 9.0):  # outages at 10 s and 20 s
            clock.advance(up_s)
            finish_a_round(net.relay)
            assert not accepts(net.relay)
            clock.advance(1.0)
            finish_a_round(net.relay)
            assert accepts(net.relay)


def test_an_outage_keeps_a_connection_that_waits_to_be_accepted() -> None:
    """For its client such a connection exists; only the relay has not seen it yet."""
    clock = FakeClock()
    here = Address("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        path = Conditions(outage=Recurring(10.0, 1.0))
        relay = Relay(here, Address(*listener.getsockname()), path, clock=clock)
        client = socket.create_connection(relay.address, TIMEOUT_S)
        clock.advance(10.0)
        with relay, client:  # the loop starts here, in the outage
            finish_a_round(relay)
            assert not accepts(relay)
            client.sendall(b"x")
            clock.advance(1.0)
            finish_a_round(relay)
            target, _ = listener.accept()
            with target:
                target.settimeout(TIMEOUT_S)
                assert target.recv(1) == b"x"
            assert relay.stats.accepted == 1


def accepts(relay: Relay) -> bool:
    try:
        socket.create_connection(relay.address, TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def test_conditions_change_while_it_runs() -> None:
    with wan(Conditions(rtt_s=0.0)) as net:
        client, target = net.connect()
        with client, target:
            net.relay.change(Conditions(rtt_s=0.1))
            sent_s = time.monotonic()
            client.sendall(b"x")
            target.recv(1)
            assert time.monotonic() - sent_s >= 0.05


def test_a_receiver_that_does_not_read_makes_the_sender_wait() -> None:
    conditions = Conditions(rate_bps=1e9)
    offered = conditions.held_bytes * 8
    with wan(conditions) as net:
        slow_client, slow_target = net.connect()
        sender = send_in_background(slow_client, bytes(offered))
        # Others are unharmed: their bytes pass while the slow one is held.
        client, target = net.connect()
        data = os.urandom(16 * MIB)
        send_in_background(client, data)
        assert receive(target, len(data)) == data
        wait_until(lambda: net.relay.stats.held_bytes >= conditions.held_bytes)
        assert sender.is_alive()
        # Both connections' shares, and the chunk that went over each border.
        assert net.relay.stats.held_peak_bytes <= 2 * (conditions.held_bytes + MIB)
        assert len(receive(slow_target, offered)) == offered
        wait_until(lambda: net.relay.stats.held_bytes == 0)
        for sock in (slow_client, slow_target, client, target):
            sock.close()


def test_one_connection_alone_fills_a_long_link() -> None:
    """What is held reaches the bandwidth-delay product: with less, the rate is out of reach."""
    rate_bps, rtt_s, offered_bytes = 400e6, 0.1, 16 * MIB
    product_bytes = rate_bps / 8 * rtt_s / 2
    clock = FakeClock()
    with wan(Conditions(rate_bps=rate_bps, rtt_s=rtt_s), clock) as net:
        client, target = net.connect()

        def taken_bytes() -> int:
            stats = net.relay.stats
            return stats.to_target_bytes + stats.held_bytes

        with client, target:
            send_in_background(client, bytes(offered_bytes))
            while taken_bytes() < product_bytes:
                # The lane takes what it can carry up to QUEUE_S from now.
                wait_until(lambda: taken_bytes() >= rate_bps / 8 * (clock.now() + QUEUE_S))
                clock.advance(QUEUE_S)
                finish_a_round(net.relay)
            assert net.relay.stats.held_peak_bytes >= 0.9 * product_bytes
            net.relay.cut()


def test_an_unreachable_target_resets_the_client() -> None:
    closed_server = socket.create_server(("127.0.0.1", 0))
    target = Address(*closed_server.getsockname())
    closed_server.close()
    with Relay(Address("127.0.0.1", 0), target, Conditions()) as relay:
        assert turned_away(relay.address)
        assert relay.stats.refused == 1
        assert relay.stats.connections == 0


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_CONNECTIONS", 2)
    with wan() as net:
        pairs = [net.connect() for _ in range(2)]
        assert turned_away(net.relay.address)
        client, target = pairs[0]
        client.sendall(b"x")
        assert target.recv(1) == b"x"
        for ends in pairs:
            for end in ends:
                end.close()


def test_closing_leaves_nothing() -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with wan(Conditions(rtt_s=10)) as net:
        client, target = net.connect()
        client.sendall(b"on its way")
        address = net.relay.address
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, TIMEOUT_S)
    assert was_reset(client)
    client.close()
    target.close()
    net.relay.close()  # once more does no harm
    # Fewer is possible: a thread of an earlier test may end meanwhile.
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_an_address_in_use_or_unknown_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(*taken.getsockname())
        with pytest.raises(InputError, match="cannot listen on .*: Address already in use"):
            Relay(address, address, Conditions())
        with pytest.raises(InputError, match="check the host name"):
            Relay(address, Address("no.such.host.invalid", 1), Conditions())


def test_conditions_in_words() -> None:
    conditions = Conditions(1e9, 0.06, 0.002, Recurring(10, 1), Recurring(60, 5), 7)
    assert describe(conditions) == (
        "1 Gbit/s, 60 ms round trip, up to 2 ms jitter, stalls 1 s every 10 s, "
        "outages 5 s every 60 s, cuts every 7 s"
    )
    assert describe(Conditions()) == "no rate limit, 0 ms round trip"


def take_all(sock: socket.socket) -> bytes:
    """What has arrived by now."""
    data = b""
    sock.setblocking(False)
    try:
        while part := sock.recv(MIB):
            data += part
    except BlockingIOError:
        pass
    return data


def wait_for_connections(relay: Relay, count: int) -> None:
    wait_until(lambda: relay.stats.connections == count)
