"""A grant is for one transfer. One that comes again, or that cannot be used, costs nothing: every
page, pin and lease is given back, and the transfer under way goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

import msgspec
import pytest

from prfaas.errors import InputError, PrfaasError, TransferFailed
from prfaas.kvd.engine_socket.messages import Begin, LeaseTicket, TransferEnded
from prfaas.kvd.transfers.outgoing import REMEMBERED_TRANSFERS
from prfaas.kvspec import segment_bytes
from prfaas.transport.grants import new_grant
from prfaas.transport.listener import Listener
from prfaas.transport.sender import SenderTransfers
from prfaas.types import Grant, TransferId
from tests.kvd.hosts import SPEC, fill, names, prompt_of
from tests.kvd.transfers.parts import Parts, segments_of, transfer_parts
from tests.kvd.transfers.test_outgoing import PROMPT, TOKENS, Receiver, begin, until

OTHER = prompt_of(TOKENS, seed=1)


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with transfer_parts() as made:
        made.register()
        yield made


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Listener() as listener:
        yield Receiver(listener)


def keep(parts: Parts, prompt: list[int] = PROMPT) -> None:
    request = Begin(tuple(names(prompt)), TOKENS, ())
    ticket = parts.outgoing.begin(parts.storage, request, lambda ended: None)
    assert isinstance(ticket, LeaseTicket), ticket
    fill(parts.write_lease(ticket), prompt)
    parts.outgoing.commit(ticket.lease_id)
    assert parts.in_use() == (0, 0)


async def test_a_grant_that_is_being_sent_begins_no_second_lease(
    parts: Parts, receiver: Receiver
) -> None:
    ended: Future[TransferEnded] = Future()
    grant = receiver.grant()
    ticket = begin(parts, grant, ended.set_result)
    held = parts.in_use()
    shouted = msgspec.structs.replace(grant, transfer_id=TransferId(grant.transfer_id.upper()))
    for again in (grant, shouted):  # two spellings of one id
        with pytest.raises(TransferFailed, match="is being sent"):
            begin(parts, again)
        with pytest.raises(TransferFailed, match="is being sent"):
            parts.outgoing.push(parts.storage, again, names(PROMPT))
    assert parts.in_use() == held
    fill(parts.write_lease(ticket), PROMPT)
    parts.outgoing.commit(ticket.lease_id)
    await until(ended.done)
    assert ended.result().reason == "" and receiver.owner.wait() is None
    assert parts.in_use() == (0, 0)


async def test_a_push_that_comes_again_is_answered_and_pins_nothing(
    parts: Parts, receiver: Receiver
) -> None:
    keep(parts)
    grant = receiver.grant()
    assert parts.outgoing.push(parts.storage, grant, names(PROMPT)) is None
    assert parts.in_use()[1] == 1
    assert parts.outgoing.push(parts.storage, grant, names(PROMPT)) is None
    assert parts.in_use()[1] == 1
    await until(lambda: parts.in_use() == (0, 0))
    assert receiver.owner.wait() is None


async def test_a_push_of_another_prefix_under_the_same_grant_is_refused(
    parts: Parts, receiver: Receiver
) -> None:
    keep(parts)
    keep(parts, OTHER)
    grant = receiver.grant()
    assert parts.outgoing.push(parts.storage, grant, names(PROMPT)) is None
    other = msgspec.structs.replace(grant, token="another")
    for again, prompt in ((grant, OTHER), (other, PROMPT)):
        with pytest.raises(TransferFailed, match="is being sent"):
            parts.outgoing.push(parts.storage, again, names(prompt))
    assert parts.in_use()[1] == 1
    await until(lambda: parts.in_use() == (0, 0))


@pytest.mark.parametrize("max_bytes", [SPEC.kv_bytes(TOKENS), 0])
async def test_a_grant_whose_transfer_has_ended_here_is_refused(
    parts: Parts, receiver: Receiver, max_bytes: int
) -> None:
    keep(parts)
    grant = msgspec.structs.replace(receiver.grant(), max_bytes=max_bytes)
    ended: Future[TransferEnded] = Future()
    ticket = begin(parts, grant, ended.set_result)
    parts.outgoing.commit(ticket.lease_id)
    await until(ended.done)
    with pytest.raises(TransferFailed, match="has ended"):
        begin(parts, grant)
    with pytest.raises(TransferFailed, match="has ended"):
        parts.outgoing.push(parts.storage, grant, names(PROMPT))
    assert parts.in_use() == (0, 0)


async def test_a_transfer_under_way_is_never_forgotten(parts: Parts, receiver: Receiver) -> None:
    """However many others have ended since it began."""
    keep(parts)
    grant = receiver.grant()
    request = Begin(tuple(names(OTHER)), TOKENS, (), grant)  # the engine has written nothing yet
    assert isinstance(parts.outgoing.begin(parts.storage, request, lambda ended: None), LeaseTicket)
    for _ in range(REMEMBERED_TRANSFERS + 1):
        ended = new_grant("h:1", max_bytes=0, deadline_s=60.0)
        parts.outgoing.commit(begin(parts, ended).lease_id)
    await until(lambda: parts.outgoing.counts()["sending"] == 1)
    status = parts.outgoing.status(grant.transfer_id)
    assert status is not None and status.state == "sending"
    with pytest.raises(TransferFailed, match="is being sent"):
        parts.outgoing.begin(parts.storage, request, lambda ended: None)


async def test_a_transfer_without_a_segment_is_refused(parts: Parts, receiver: Receiver) -> None:
    """Its manifest would break the connection, and with it the frames of other transfers."""
    with pytest.raises(InputError, match="is left to send"):
        parts.outgoing.push(parts.storage, receiver.grant(), [])
    assert parts.in_use() == (0, 0)


def closed_link(parts: Parts, grant: Grant) -> Grant:
    parts.links.to(grant.data_address).close()
    return grant


def being_sent(parts: Parts, grant: Grant) -> Grant:
    """The link has a transfer of this id, and this part of the kvd does not know it."""
    sizes = {one.name: segment_bytes(SPEC, one) for one in segments_of(grant, TOKENS)}
    parts.links.to(grant.data_address).open(grant, sizes)  # and nothing is ready to be sent
    return grant


UNUSABLE: dict[str, Callable[[Parts, Grant], Grant]] = {
    "address": lambda _, grant: msgspec.structs.replace(grant, data_address="no address"),
    "port": lambda _, grant: msgspec.structs.replace(grant, data_address="127.0.0.1:99999999"),
    "id": lambda _, grant: msgspec.structs.replace(grant, transfer_id=TransferId("not a UUID")),
    "oversize": lambda _, grant: msgspec.structs.replace(grant, max_bytes=7),
    "negative": lambda _, grant: msgspec.structs.replace(grant, max_bytes=-7),
    "token": lambda _, grant: msgspec.structs.replace(grant, token="\ud800"),
    "checkpoint": lambda _, grant: msgspec.structs.replace(grant, checkpoint_tokens=(5,)),
    "far": lambda _, grant: msgspec.structs.replace(grant, checkpoint_tokens=(10 * TOKENS,)),
    "skip": lambda _, grant: msgspec.structs.replace(grant, skip_tokens={"full0": -4}),
    "group": lambda _, grant: msgspec.structs.replace(grant, skip_tokens={"no such": 4}),
    "closed": closed_link,
    "duplicate": being_sent,
}


# What raises does not matter here, and may be a defect of the transport: nothing stays reserved.
REFUSALS = (PrfaasError, UnicodeError, AssertionError)


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_a_grant_that_cannot_be_used_leaves_no_lease(
    parts: Parts, receiver: Receiver, kind: str
) -> None:
    grant = UNUSABLE[kind](parts, receiver.grant())
    with pytest.raises(REFUSALS):
        begin(parts, grant)
    assert parts.in_use() == (0, 0)
    keep(parts)
    with pytest.raises(REFUSALS):
        parts.outgoing.push(parts.storage, grant, names(PROMPT))
    assert parts.in_use() == (0, 0)
    assert parts.outgoing.counts() == {"writing": 0, "sending": 0}


async def test_an_unexpected_failure_of_the_link_gives_the_pages_back(
    parts: Parts, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the link has already taken the transfer: the pages come back when it lets go."""
    keep(parts)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cannot start new thread")

    grant = receiver.grant()
    link = parts.links.to(grant.data_address)
    monkeypatch.setattr(link, "add_connections", fail)
    with pytest.raises(RuntimeError):
        begin(parts, grant)
    assert parts.in_use() == (0, 0)
    monkeypatch.undo()
    grant, again = (Receiver(receiver.listener).grant() for _ in range(2))
    monkeypatch.setattr(SenderTransfers, "mark_ready", fail)
    for start in (
        lambda: begin(parts, grant),
        lambda: parts.outgoing.push(parts.storage, again, names(PROMPT)),
    ):
        with pytest.raises(RuntimeError):
            start()
    monkeypatch.undo()
    await until(lambda: parts.in_use() == (0, 0))
    await until(lambda: parts.outgoing.counts() == {"writing": 0, "sending": 0})
