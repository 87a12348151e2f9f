from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import pytest

from prfaas.config.address import Address
from prfaas.engine.emulated.content import Content
from prfaas.errors import InputError, TransferFailed
from prfaas.kvd.engine_socket.messages import Begin, LeaseTicket, TransferEnded
from prfaas.kvd.engine_socket.pins import PinnedPrefixes
from prfaas.kvd.engine_socket.server import EngineSocketServer
from prfaas.kvspec import Segment
from prfaas.transport.grants import new_grant
from prfaas.transport.listener import Listener
from prfaas.types import Grant, NotNow
from tests.kvd.hosts import SPEC, fill, names, prompt_of
from tests.kvd.transfers.parts import Parts, segments_of, transfer_parts
from tests.transport.ends import Owner
from tests.waiting import PATIENCE_S

TOKENS = 40
PROMPT = prompt_of(TOKENS)


@dataclass
class Receiver:
    """The listener of another host, and the memory of one transfer."""

    listener: Listener
    owner: Owner = field(default_factory=Owner)

    def grant(self) -> Grant:
        address = str(Address(*self.listener.address))
        grant = new_grant(address, max_bytes=SPEC.kv_bytes(TOKENS), deadline_s=60.0)
        self.listener.expect(grant, self.owner)
        return grant

    def received(self, segment: Segment) -> bool:
        expected = Content(SPEC, PROMPT).of(segment).tobytes()
        return bytes(self.owner.memory.get(segment.name, b"")) == expected


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with transfer_parts() as made:
        made.register()
        yield made


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Listener() as listener:
        yield Receiver(listener)


@pytest.fixture
def unresponsive() -> Iterator[Grant]:
    """A grant of a host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = str(Address(*server.getsockname()[:2]))
        yield new_grant(address, max_bytes=SPEC.kv_bytes(TOKENS), deadline_s=60.0)


def begin(
    parts: Parts, grant: Grant | None = None, notify: Callable[[TransferEnded], None] | None = None
) -> LeaseTicket:
    request = Begin(tuple(names(PROMPT)), TOKENS, (), grant)
    ticket = parts.outgoing.begin(parts.storage, request, notify or (lambda ended: None))
    assert isinstance(ticket, LeaseTicket), ticket
    return ticket


async def until(condition: Callable[[], bool]) -> None:
    """For conditions that have no event to wait on."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.002)


async def test_a_lease_is_filled_and_kept_as_a_prefix(parts: Parts) -> None:
    ticket = begin(parts)
    assert parts.in_use()[1] == 1 and not ticket.sending
    fill(parts.write_lease(ticket), PROMPT)
    parts.outgoing.commit(ticket.lease_id)
    assert parts.in_use() == (0, 0)
    assert parts.cached_tokens(PROMPT) == TOKENS
    with pytest.raises(TransferFailed, match="has ended"):
        parts.outgoing.commit(ticket.lease_id)


async def test_segments_are_sent_when_they_are_ready(parts: Parts, receiver: Receiver) -> None:
    ended: Future[TransferEnded] = Future()
    grant = receiver.grant()
    ticket = begin(parts, grant, ended.set_result)
    assert ticket.sending and parts.outgoing.counts() == {"writing": 1, "sending": 1}
    lease = parts.write_lease(ticket)
    fill(lease, PROMPT, stop=16)
    await until(lambda: receiver.received(Segment("full0", 0, 0, 4)))
    await until(lambda: receiver.received(Segment("full1", 5, 12, 16)))
    assert not receiver.received(Segment("full0", 0, 16, 20)), "the engine has not written it"
    fill(lease, PROMPT)
    parts.outgoing.commit(ticket.lease_id)
    await until(ended.done)
    assert ended.result() == TransferEnded(ticket.lease_id, "")
    assert receiver.owner.wait() is None
    status = parts.outgoing.status(grant.transfer_id)
    assert status is not None and (status.state, status.nbytes) == ("sent", SPEC.kv_bytes(TOKENS))
    assert all(receiver.received(Segment.parse(name)) for name in receiver.owner.memory)
    assert parts.in_use() == (0, 0) and parts.outgoing.counts() == {"writing": 0, "sending": 0}


@pytest.mark.parametrize("aborted", [False, True])
async def test_nothing_of_a_transfer_waits_for_the_garbage_collector(
    parts: Parts, receiver: Receiver, aborted: bool
) -> None:
    """A manifest has thousands of segments: a kvd would be as large as all transfers between two
    runs of the collector."""
    gc.disable()
    try:
        ended: Future[TransferEnded] = Future()
        notify = partial(ended.set_result)  # lives as long as the lease
        lease = weakref.ref(notify)
        ticket = begin(parts, receiver.grant(), notify)
        del notify
        if aborted:
            parts.outgoing.abort(ticket.lease_id, "the engine gave up")
        else:
            fill(parts.write_lease(ticket), PROMPT)
            parts.outgoing.commit(ticket.lease_id)
        await until(ended.done)
        await until(lambda: lease() is None)
    finally:
        gc.enable()


async def test_a_prefix_of_the_pool_is_sent_before_the_engine_writes(
    parts: Parts, receiver: Receiver
) -> None:
    kept = begin(parts)
    fill(parts.write_lease(kept), PROMPT)
    parts.outgoing.commit(kept.lease_id)
    ticket = begin(parts, receiver.grant())
    assert ticket.match_tokens == TOKENS
    await until(lambda: receiver.owner.over.is_set())
    assert receiver.owner.wait() is None
    parts.outgoing.commit(ticket.lease_id)
    await until(lambda: parts.in_use() == (0, 0))


async def test_a_commit_with_a_missing_segment_is_refused(parts: Parts, receiver: Receiver) -> None:
    grant = receiver.grant()
    ticket = begin(parts, grant)
    fill(parts.write_lease(ticket), PROMPT, stop=16)
    with pytest.raises(InputError, match="is not ready"):
        parts.outgoing.commit(ticket.lease_id)
    await until(lambda: parts.in_use() == (0, 0))
    status = parts.outgoing.status(grant.transfer_id)
    assert status is not None and status.state == "failed"
    assert "committed without" in (receiver.owner.wait() or "")
    assert parts.cached_tokens(PROMPT) == 0, "state that is not complete is not kept"


async def test_a_message_with_an_invalid_segment_leaves_no_transfer_that_waits_for_ever(
    parts: Parts, receiver: Receiver
) -> None:
    """Segments that counted as ready, and were not handed to the link, would let the lease commit
    and its transfer renew the grant without end."""
    grant = receiver.grant()
    ticket = begin(parts, grant)
    segments = [*segments_of(grant, TOKENS), Segment("full0", 99, 0, 4)]
    with pytest.raises(InputError):
        parts.outgoing.ready(ticket.lease_id, [(segment, None) for segment in segments])
    with pytest.raises(InputError, match="is not ready"):
        parts.outgoing.commit(ticket.lease_id)
    await until(lambda: parts.in_use() == (0, 0))
    assert "committed without" in (receiver.owner.wait() or "")


async def test_an_abort_ends_the_transfer_at_both_ends(parts: Parts, receiver: Receiver) -> None:
    ended: Future[TransferEnded] = Future()
    ticket = begin(parts, receiver.grant(), ended.set_result)
    fill(parts.write_lease(ticket), PROMPT, stop=16)
    parts.outgoing.abort(ticket.lease_id, "the client has left")
    await until(ended.done)
    assert "the client has left" in ended.result().reason
    assert "the client has left" in (receiver.owner.wait() or "")
    assert parts.in_use() == (0, 0)
    parts.outgoing.abort(ticket.lease_id, "again")  # without effect
    parts.outgoing.ready(ticket.lease_id, [(Segment("full0", 0, 0, 4), None)])


async def test_pages_stay_while_the_link_may_read_them(parts: Parts, unresponsive: Grant) -> None:
    ticket = begin(parts, unresponsive)
    fill(parts.write_lease(ticket), PROMPT)
    parts.outgoing.commit(ticket.lease_id)
    assert parts.in_use()[1] == 1, "the engine has finished, the transfer has not"
    assert parts.cached_tokens(PROMPT) == TOKENS
    parts.outgoing.abort_transfer(ticket.lease_id, "the link is cut")
    await until(lambda: parts.in_use() == (0, 0))


async def test_pages_stay_until_every_process_of_the_engine_has_exited(
    parts: Parts, receiver: Receiver
) -> None:
    server = EngineSocketServer(
        parts.store,
        parts.incoming,
        parts.outgoing,
        PinnedPrefixes(parts.store, parts.clock),
        "127.0.0.1:1",
    )
    owner, worker = 1, 2
    ticket = begin(parts, receiver.grant())
    server.holders.add(ticket.lease_id, "write", owner)
    assert server.holders.join(ticket.lease_id, worker)
    lease = parts.write_lease(ticket)
    fill(lease, PROMPT, stop=16)
    server.process_exited(owner)
    assert "an engine process has exited" in (receiver.owner.wait() or "")
    await until(lambda: parts.outgoing.counts()["sending"] == 0)
    assert parts.in_use()[1] == 1, "the worker may still write"
    fill(lease, PROMPT)
    server.process_exited(worker)
    assert parts.in_use() == (0, 0)
    assert parts.cached_tokens(PROMPT) == 0, "no process has committed the lease"


async def test_a_receiver_that_has_every_byte_needs_no_transfer(parts: Parts) -> None:
    ended: Future[TransferEnded] = Future()
    grant = new_grant("127.0.0.1:1", max_bytes=0, deadline_s=60.0)
    ticket = begin(parts, grant, ended.set_result)
    assert not ended.done(), "the caller gets the ticket first"
    await until(ended.done)
    assert ended.result().reason == ""
    fill(parts.write_lease(ticket), PROMPT)
    parts.outgoing.commit(ticket.lease_id)
    assert parts.in_use() == (0, 0)


async def test_a_segment_of_another_model_is_refused(parts: Parts) -> None:
    ticket = begin(parts)
    with pytest.raises(InputError):
        parts.outgoing.ready(ticket.lease_id, [(Segment("another", 0, 0, 4), None)])
    parts.outgoing.abort(ticket.lease_id, "done")
    assert parts.in_use() == (0, 0)


async def test_an_address_that_cannot_be_used_reserves_nothing(parts: Parts) -> None:
    grant = new_grant("no address", max_bytes=SPEC.kv_bytes(TOKENS), deadline_s=60.0)
    with pytest.raises(InputError):
        begin(parts, grant)
    assert parts.in_use() == (0, 0)


async def test_memory_that_is_short_refuses_a_lease() -> None:
    async with transfer_parts(memory_bytes=6_000) as parts:
        parts.register()
        held = begin(parts)
        other = prompt_of(3 * TOKENS, seed=1)
        refused = parts.outgoing.begin(
            parts.storage, Begin(tuple(names(other)), len(other)), lambda ended: None
        )
        assert isinstance(refused, NotNow)
        parts.outgoing.abort(held.lease_id, "done")
        assert parts.in_use() == (0, 0)


async def test_a_push_sends_a_prefix_and_refuses_one_that_is_not_here(
    parts: Parts, receiver: Receiver
) -> None:
    grant = receiver.grant()
    with pytest.raises(TransferFailed, match="has 0 of them"):
        parts.outgoing.push(parts.storage, grant, names(PROMPT))
    assert parts.in_use() == (0, 0)
    kept = begin(parts)
    fill(parts.write_lease(kept), PROMPT)
    parts.outgoing.commit(kept.lease_id)
    assert parts.outgoing.push(parts.storage, grant, names(PROMPT)) is None
    assert parts.in_use()[1] == 1
    await until(lambda: parts.in_use() == (0, 0))
    assert receiver.owner.wait() is None
