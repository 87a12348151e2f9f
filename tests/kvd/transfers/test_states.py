from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import TransferFailed
from prfaas.kvd.transfers.states import (
    IncomingStage,
    IncomingState,
    OutgoingState,
    SendStage,
    WriteStage,
)

DISPATCH_S = 10.0


STEPS = ["over", "lost", "abort", "poll", "wait", "attach", "release", "exit"]


@given(st.lists(st.sampled_from(STEPS)), st.integers(1, 3))
def test_an_incoming_transfer_ends_exactly_once(steps: list[str], attachments: int) -> None:
    """Plays the owner: steps that its rules do not allow are left out, as it leaves them out."""
    state, now, freed = IncomingState(DISPATCH_S), 0.0, 0
    attached = awaited = 0
    for step in steps:
        before = state.stage
        match step:
            case "over" if state.stage is IncomingStage.GRANTED:
                freed += not state.commit(now)
            case "lost" if state.stage is IncomingStage.GRANTED:
                state.fail("lost")
                freed += 1
            case "abort" if state.stage is IncomingStage.GRANTED:
                state.aborting = "aborted"
            case "abort" if state.stage is IncomingStage.COMMITTED:
                state.fail("aborted")
                freed += 1
            case "poll":
                state.renew(now)
                assert not state.expired(now)
            case "wait":
                now += 0.6 * DISPATCH_S
                if state.expired(now):
                    state.fail("expired")
                    freed += 1
                if state.lacks_attachments(now):
                    freed += state.await_no_more()
                    awaited = 0
            case "attach" if state.stage is IncomingStage.COMMITTED or awaited:
                awaited = awaited - 1 if attached or awaited else attachments - 1
                attached += 1
                state.attach(now, attachments)
            case "attach":
                with pytest.raises(TransferFailed):
                    state.attach(now, attachments)
            case "release" if attached:
                attached -= 1
                freed += state.release()
            case "exit":
                freed += state.await_no_more()
                awaited = 0
        if state.stage is IncomingStage.ATTACHED:
            assert attached or awaited, "the pages are kept for an attachment"
        else:
            assert not attached and not awaited, "pages of an attachment were freed"
        assert freed == (state.stage in (IncomingStage.RELEASED, IncomingStage.FAILED))
        if before in (IncomingStage.RELEASED, IncomingStage.FAILED):
            assert state.stage is before
        if state.stage is IncomingStage.FAILED:
            assert state.reason
        if state.aborting is not None:
            assert state.stage in (IncomingStage.GRANTED, IncomingStage.FAILED)


def test_a_committed_transfer_expires_without_polls() -> None:
    state = IncomingState(DISPATCH_S)
    assert not state.expired(1e9)  # until the commit the listener decides
    state.commit(100.0)
    assert not state.expired(109.0)
    state.renew(109.0)
    assert not state.expired(118.0)
    assert state.expired(119.0)
    state.attach(118.0)
    assert not state.expired(1e9) and not state.lacks_attachments(1e9)


def test_declared_attachments_that_do_not_come_are_awaited_for_a_while() -> None:
    state = IncomingState(DISPATCH_S)
    state.commit(0.0)
    state.attach(100.0, 3)
    state.attach(101.0, 1)
    assert not state.release("other_prompt")
    assert not state.release(), "a third one may come"
    assert not state.lacks_attachments(109.0) and state.lacks_attachments(110.0)
    assert state.await_no_more()
    assert state.stage is IncomingStage.RELEASED and state.reason == "other_prompt"
    with pytest.raises(TransferFailed, match="already attached"):
        state.attach(111.0)


def test_a_refused_attach_names_the_reason() -> None:
    state = IncomingState(DISPATCH_S)
    with pytest.raises(TransferFailed, match="not committed yet"):
        state.attach(0.0)
    state.fail("sender died")
    with pytest.raises(TransferFailed, match="sender died"):
        state.attach(0.0)


@given(st.booleans(), st.permutations(["writer", "sender"]), st.booleans(), st.booleans())
def test_pages_are_free_when_writing_and_sending_have_ended(
    sending: bool, order: list[str], commits: bool, arrives: bool
) -> None:
    state = OutgoingState(sending=sending)
    for step in order:
        assert not state.free
        if step == "sender":
            if sending:
                state.end_send("" if arrives else "lost")
        elif commits:
            state.commit_write()
        else:
            assert state.abort_write() == (state.send is SendStage.SENDING)
        if not sending and state.write is not WriteStage.WRITING:
            break
    assert state.free
