from __future__ import annotations

import math
from collections.abc import AsyncIterator

import pytest

from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.errors import TransferFailed
from prfaas.kvd.transfers.incoming import LONGEST_RETRY_S, NO_ENGINE, bound_retry
from prfaas.types import Grant, NotNow, TransferId
from tests.kvd.hosts import COMPAT, names, prompt_of
from tests.kvd.transfers.parts import OPTIONS, Parts, transfer_parts
from tests.waiting import PATIENCE_S

TOKENS = 40  # whole blocks, so that a committed prompt stays as a prefix
PROMPT = prompt_of(TOKENS)


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    async with transfer_parts() as made:
        made.register()
        yield made


async def committed(parts: Parts, prompt: list[int]) -> Grant:
    grant = parts.grant(prompt)
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
    parts.send(grant, PROMPT)
    await settled(parts, grant, "committed")
    ticket = parts.incoming.attach(grant.transfer_id)
    assert ticket.tokens == TOKENS and ticket.hashes == tuple(names(PROMPT))
    parts.assert_readable(ticket, PROMPT)
    assert parts.in_use()[1] == 1
    assert parts.incoming.release(ticket.lease_id)
    assert not parts.incoming.release(ticket.lease_id), "a lease is released once"
    assert parts.in_use() == (0, 0)
    assert parts.incoming.counts()["released"] == 1
    assert parts.cached_tokens(PROMPT) == TOKENS, "whole blocks stay as a prefix"


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
        assert parts.incoming.differences(COMPAT) == ()


async def test_a_grant_is_refused_when_memory_is_short() -> None:
    async with transfer_parts(memory_bytes=6_000) as parts:
        parts.register()
        first = parts.grant(PROMPT)
        before = parts.in_use()
        refused = parts.open(prompt_of(TOKENS * 3, seed=1))
        assert isinstance(refused, NotNow) and 0 < refused.retry_after_s <= LONGEST_RETRY_S
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


def test_a_refusal_has_a_finite_retry_time() -> None:
    assert bound_retry(NotNow("no page is free", math.inf)).retry_after_s <= LONGEST_RETRY_S
    soon = NotNow("no page is free", 2.0)
    assert bound_retry(soon) is soon
