from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from prfaas.cache.pool import TOO_LARGE_RETRY_S
from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.errors import InputError, TransferFailed
from prfaas.kvd.transfers import incoming
from prfaas.kvd.transfers.incoming import NO_ENGINE
from prfaas.types import Grant, NotNow, TransferId
from tests.kvd.hosts import COMPAT, SPEC, names, prompt_of
from tests.kvd.transfers.parts import OPTIONS, Parts, transfer_parts
from tests.waiting import PATIENCE_S

TOKENS = 40  # whole blocks, so that a committed prompt stays as a prefix
PROMPT = prompt_of(TOKENS)


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with transfer_parts() as made:
        made.register()
        yield made


async def committed(
    parts: Parts, prompt: list[int], transfer_id: TransferId | None = None
) -> Grant:
    grant = parts.grant(prompt, transfer_id)
    parts.send(grant, prompt)
    await settled(parts, grant, "committed")
    return grant


async def settled(parts: Parts, grant: Grant, state: str) -> str:
    """Waits until the transfer has left its first state; the reason."""
    status = await parts.incoming.wait(grant.transfer_id, PATIENCE_S)
    assert status is not None and status.state == state, status
    return status.reason


async def test_a_transfer_from_grant_to_release(parts: Parts) -> None:
    grant = parts.grant(PROMPT)
    assert grant.max_bytes > 0 and parts.in_use()[1] == 1
    status = parts.incoming.status(grant.transfer_id)
    assert status is not None and (status.state, status.nbytes) == ("granted", grant.max_bytes)
    assert status.arrived_bytes == 0
    parts.send(grant, PROMPT)
    await settled(parts, grant, "committed")
    status = parts.incoming.status(grant.transfer_id)
    assert status is not None and status.arrived_bytes == SPEC.kv_bytes(TOKENS)
    ticket = parts.incoming.attach(grant.transfer_id)
    assert ticket.tokens == TOKENS and ticket.hashes == tuple(names(PROMPT))
    parts.assert_readable(ticket, PROMPT)
    assert parts.in_use()[1] == 1
    assert parts.incoming.release(ticket.lease_id)
    assert not parts.incoming.release(ticket.lease_id), "a lease is released once"
    assert parts.in_use() == (0, 0)
    assert parts.incoming.counts()["released"] == 1
    status = parts.incoming.status(grant.transfer_id)
    assert status is not None and status.arrived_bytes == SPEC.kv_bytes(TOKENS)
    assert parts.cached_tokens(PROMPT) == TOKENS, "whole blocks stay as a prefix"


async def test_each_attachment_is_a_lease_on_the_same_pages(parts: Parts) -> None:
    grant = await committed(parts, PROMPT)
    tickets = [parts.incoming.attach(grant.transfer_id, attachments=3, engine=1) for _ in range(3)]
    assert len({ticket.lease_id for ticket in tickets}) == 3
    assert len({ticket.readable for ticket in tickets}) == 1
    with pytest.raises(TransferFailed, match="already attached"):
        parts.incoming.attach(grant.transfer_id, attachments=3, engine=1)
    for ticket in (tickets[0], tickets[2]):  # the pool's own lease ends before others
        assert parts.incoming.release(ticket.lease_id)
        assert not parts.incoming.release(ticket.lease_id), "a lease is released once"
        parts.assert_readable(tickets[1], PROMPT)
        assert parts.in_use()[1] == 1
    assert parts.incoming.release(tickets[1].lease_id)
    assert parts.in_use() == (0, 0)
    assert parts.incoming.counts()["released"] == 1


async def test_attachments_that_do_not_come_end_with_the_deadline(parts: Parts) -> None:
    grant = await committed(parts, PROMPT)
    first = parts.incoming.attach(grant.transfer_id, attachments=2, engine=1)
    with pytest.raises(TransferFailed, match="another engine"):
        parts.incoming.attach(grant.transfer_id, attachments=2, engine=2)
    parts.incoming.release(first.lease_id)
    parts.clock.advance(OPTIONS.dispatch_s - 1)
    parts.incoming.sweep()
    assert parts.in_use()[1] == 1
    parts.clock.advance(1)
    parts.incoming.sweep()
    assert parts.in_use() == (0, 0)


async def test_an_engine_that_exits_attaches_no_more(parts: Parts) -> None:
    grant = await committed(parts, PROMPT)
    first = parts.incoming.attach(grant.transfer_id, attachments=2, engine=1)
    parts.incoming.engine_exited(2)
    parts.incoming.engine_exited(1)
    assert parts.in_use()[1] == 1, "a process that joined the lease may still read"
    with pytest.raises(TransferFailed, match="already attached"):
        parts.incoming.attach(grant.transfer_id, attachments=2, engine=1)
    parts.incoming.release(first.lease_id)
    assert parts.in_use() == (0, 0)


async def test_tokens_after_the_last_whole_block_are_not_kept(parts: Parts) -> None:
    prompt = prompt_of(TOKENS + 2)
    grant = await committed(parts, prompt)
    ticket = parts.incoming.attach(grant.transfer_id)
    parts.assert_readable(ticket, prompt)
    parts.incoming.release(ticket.lease_id)
    assert parts.in_use() == (0, 0)
    assert parts.cached_tokens(prompt) < TOKENS + 2


async def test_nothing_is_granted_before_an_engine_has_registered() -> None:
    async with transfer_parts() as parts:
        request = OpenTransfer(tuple(names(PROMPT)), TOKENS, COMPAT)
        assert parts.incoming.open(request) is NO_ENGINE
        assert parts.store.differences(COMPAT) == ()


async def test_a_grant_is_refused_when_memory_is_short() -> None:
    async with transfer_parts(memory_bytes=6_000) as parts:
        parts.register()
        first = parts.grant(PROMPT)
        before = parts.in_use()
        refused = parts.open(prompt_of(TOKENS * 3, seed=1))
        assert isinstance(refused, NotNow) and 0 < refused.retry_after_s <= TOO_LARGE_RETRY_S
        assert parts.in_use() == before, "a refusal reserves nothing"
        parts.incoming.abort(first.transfer_id, "enough")
        await settled(parts, first, "failed")
        assert parts.in_use() == (0, 0)


async def test_a_grant_without_frames_expires(parts: Parts) -> None:
    grant = parts.grant(PROMPT)
    parts.clock.advance(OPTIONS.grant_s - 1.0)
    parts.incoming.sweep()
    assert parts.incoming.counts()["granted"] == 1
    parts.clock.advance(1.0)  # from here on the listener's thread may end it
    reason = await settled(parts, grant, "failed")
    assert "expired" in reason
    assert parts.in_use() == (0, 0)
    with pytest.raises(TransferFailed, match="expired"):
        parts.incoming.attach(grant.transfer_id)


async def test_an_abort_before_the_commit(parts: Parts) -> None:
    grant = parts.grant(PROMPT)
    assert parts.incoming.abort(grant.transfer_id, "the client has left")
    assert await settled(parts, grant, "failed") == "the client has left"
    assert parts.in_use() == (0, 0)
    assert parts.cached_tokens(PROMPT) == 0, "state that is not complete is not kept"
    assert not parts.incoming.abort(grant.transfer_id, "again")
    with pytest.raises(TransferFailed, match="the client has left"):
        parts.incoming.attach(grant.transfer_id)


async def test_an_abort_after_the_commit_keeps_the_prefix(parts: Parts) -> None:
    grant = await committed(parts, PROMPT)
    assert parts.incoming.abort(grant.transfer_id, "not needed")
    assert parts.in_use() == (0, 0)
    assert parts.cached_tokens(PROMPT) == TOKENS
    with pytest.raises(TransferFailed, match="not needed"):
        parts.incoming.attach(grant.transfer_id)


async def test_an_attached_transfer_cannot_be_aborted_or_attached_again(parts: Parts) -> None:
    grant = await committed(parts, PROMPT)
    ticket = parts.incoming.attach(grant.transfer_id)
    with pytest.raises(TransferFailed, match="already attached"):
        parts.incoming.attach(grant.transfer_id)
    assert not parts.incoming.abort(grant.transfer_id, "too late")
    parts.clock.advance(100 * OPTIONS.dispatch_s)
    parts.incoming.sweep()
    parts.assert_readable(ticket, PROMPT)
    parts.incoming.release(ticket.lease_id)
    assert parts.in_use() == (0, 0)
    with pytest.raises(TransferFailed, match="already attached"):
        parts.incoming.attach(grant.transfer_id)


async def test_attach_needs_a_commit_and_a_known_transfer(parts: Parts) -> None:
    grant = parts.grant(PROMPT)
    with pytest.raises(TransferFailed, match="not committed yet"):
        parts.incoming.attach(grant.transfer_id)
    with pytest.raises(TransferFailed, match="not known"):
        parts.incoming.attach(TransferId("another"))
    assert parts.incoming.status(TransferId("another")) is None


async def test_a_committed_transfer_that_no_gateway_polls_fails(parts: Parts) -> None:
    grant = await committed(parts, PROMPT)
    parts.clock.advance(OPTIONS.dispatch_s - 1.0)
    parts.incoming.status(grant.transfer_id)  # a poll renews it
    parts.clock.advance(OPTIONS.dispatch_s - 1.0)
    parts.incoming.sweep()
    assert parts.incoming.counts()["committed"] == 1
    parts.clock.advance(1.0)
    parts.incoming.sweep()
    status = parts.incoming.status(grant.transfer_id)
    assert status is not None and status.state == "failed" and "no gateway" in status.reason
    assert parts.in_use() == (0, 0)
    assert parts.cached_tokens(PROMPT) == TOKENS, "the state is complete, so the prefix stays"
    parts.clock.advance(OPTIONS.remember_s)
    parts.incoming.sweep()
    assert parts.incoming.status(grant.transfer_id) is None, "the status is forgotten"


async def test_a_prompt_that_is_here_already_commits_at_once(parts: Parts) -> None:
    first = await committed(parts, PROMPT)
    parts.incoming.keep_prefix(first.transfer_id)
    assert parts.in_use() == (0, 0)
    again = parts.grant(PROMPT)
    assert again.max_bytes == 0 and again.skip_tokens["full0"] == TOKENS
    await settled(parts, again, "committed")
    ticket = parts.incoming.attach(again.transfer_id)
    parts.assert_readable(ticket, PROMPT)
    parts.incoming.release(ticket.lease_id)
    assert parts.in_use() == (0, 0)


async def test_waiting_ends_after_its_time(parts: Parts) -> None:
    grant = parts.grant(PROMPT)
    status = await parts.incoming.wait(grant.transfer_id, 0.0)
    assert status is not None and status.state == "granted"


# Ids that the gateway chooses ---------------------------------------------------------------------


def new_id() -> TransferId:
    return TransferId(str(uuid.uuid4()))


async def test_the_gateway_chooses_the_id(parts: Parts) -> None:
    chosen = new_id()
    grant = await committed(parts, PROMPT, chosen)
    assert grant.transfer_id == chosen
    parts.incoming.keep_prefix(chosen)
    assert parts.in_use() == (0, 0)


async def test_a_repeated_open_gets_the_same_grant(parts: Parts) -> None:
    chosen = new_id()
    grant = parts.grant(PROMPT, chosen)
    before = parts.in_use()
    assert parts.open(PROMPT, chosen) == grant and parts.in_use() == before
    parts.send(grant, PROMPT)
    await settled(parts, grant, "committed")
    assert parts.open(PROMPT, chosen) == grant and parts.in_use()[1] == 1
    parts.incoming.abort(chosen, "enough")
    assert parts.in_use() == (0, 0)


async def test_an_id_belongs_to_one_request(parts: Parts) -> None:
    chosen = new_id()
    parts.grant(PROMPT, chosen)
    before = parts.in_use()
    with pytest.raises(InputError, match="transfer_id: .* another body"):
        parts.open(prompt_of(TOKENS, seed=1), chosen)
    assert parts.in_use() == before


@pytest.mark.parametrize("end", ["abort", "attach", "release"])
async def test_an_id_that_has_ended_is_refused(parts: Parts, end: str) -> None:
    chosen = new_id()
    grant = await committed(parts, PROMPT, chosen)
    if end == "abort":
        parts.incoming.abort(chosen, "enough")
    else:
        ticket = parts.incoming.attach(chosen)
        if end == "release":
            parts.incoming.release(ticket.lease_id)
    before = parts.in_use()
    with pytest.raises(TransferFailed, match="transfer_id"):
        parts.open(PROMPT, grant.transfer_id)
    assert parts.in_use() == before


async def test_an_id_whose_abort_is_under_way_is_refused(parts: Parts) -> None:
    chosen = new_id()
    grant = parts.grant(PROMPT, chosen)
    parts.incoming.abort(chosen, "enough")
    with pytest.raises(TransferFailed, match="was aborted"):
        parts.open(PROMPT, chosen)
    await settled(parts, grant, "failed")
    assert parts.in_use() == (0, 0)


async def test_an_id_that_was_aborted_before_its_open_is_refused(parts: Parts) -> None:
    chosen = new_id()
    assert parts.incoming.abort(chosen, "the client has left")
    assert parts.incoming.abort(chosen, "again")
    with pytest.raises(TransferFailed, match="aborted before it was opened"):
        parts.open(PROMPT, chosen)
    assert parts.in_use() == (0, 0)
    parts.clock.advance(OPTIONS.remember_s)
    parts.incoming.sweep()
    parts.grant(PROMPT, chosen)  # the abort is forgotten
    assert parts.in_use()[1] == 1


async def test_remembered_aborts_are_bounded(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "REMEMBERED_ABORTS", 2)
    ids = [new_id() for _ in range(3)]
    for one in ids:
        parts.incoming.abort(one, "enough")
    parts.grant(PROMPT, ids[0])
    for one in ids[1:]:
        with pytest.raises(TransferFailed):
            parts.open(PROMPT, one)


A_UUID = uuid.UUID("0bf27587-16b0-4868-96f7-51e913c6b8be")


@pytest.mark.parametrize(
    "bad", ["", "t-1", str(A_UUID).upper(), A_UUID.hex, f"{{{A_UUID}}}", "\ud800"]
)
async def test_an_id_that_is_not_a_uuid_is_refused(parts: Parts, bad: str) -> None:
    with pytest.raises(InputError, match="transfer_id"):
        parts.open(PROMPT, TransferId(bad))
    assert not parts.incoming.abort(TransferId(bad), "no transfer can have this id")
    assert parts.in_use() == (0, 0)


async def test_an_open_that_fails_after_its_reservation_gives_it_back(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = new_id()
    grant = parts.grant(PROMPT, chosen)
    parts.incoming.abort(chosen, "enough")
    await settled(parts, grant, "failed")
    # The kvd has forgotten the transfer, but the listener still knows it and refuses the id.
    monkeypatch.delitem(parts.incoming._transfers, chosen)
    with pytest.raises(InputError, match="announced before"):
        parts.open(PROMPT, chosen)
    assert parts.in_use() == (0, 0) and parts.incoming.status(chosen) is None
