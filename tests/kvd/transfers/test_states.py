from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import TransferFailed
from prfaas.kvd.transfers.states import IncomingLife, Sender, Stage, Writer, WritingLife

DISPATCH_S = 10.0


@given(st.lists(st.sampled_from(["over", "lost", "abort", "poll", "wait", "attach", "release"])))
def test_an_incoming_transfer_ends_once_whatever_happens(steps: list[str]) -> None:
    """Plays the owner: steps that its rules do not allow are left out, as it leaves them out."""
    life, now, freed = IncomingLife(DISPATCH_S), 0.0, 0
    for step in steps:
        before = life.stage
        match step:
            case "over" if life.stage is Stage.GRANTED:
                freed += not life.committed(now)
            case "lost" if life.stage is Stage.GRANTED:
                life.failed("lost")
                freed += 1
            case "abort" if life.stage is Stage.GRANTED:
                life.aborting = "aborted"
            case "abort" if life.stage is Stage.COMMITTED:
                life.failed("aborted")
                freed += 1
            case "poll":
                life.polled(now)
                assert not life.expired(now)
            case "wait":
                now += 0.6 * DISPATCH_S
                if life.expired(now):
                    life.failed("expired")
                    freed += 1
            case "attach" if life.stage is Stage.COMMITTED:
                life.attach()
            case "attach":
                with pytest.raises(TransferFailed):
                    life.attach()
            case "release" if life.stage is Stage.ATTACHED:
                life.release()
                freed += 1
        assert freed == (life.stage in (Stage.RELEASED, Stage.FAILED))
        if before in (Stage.RELEASED, Stage.FAILED):
            assert life.stage is before
        if life.stage is Stage.FAILED:
            assert life.reason
        if life.aborting is not None:
            assert life.stage in (Stage.GRANTED, Stage.FAILED)


def test_a_commit_waits_for_its_gateway_and_no_longer() -> None:
    life = IncomingLife(DISPATCH_S)
    assert not life.expired(1e9)  # until the commit the listener decides
    life.committed(100.0)
    assert not life.expired(109.0)
    life.polled(109.0)
    assert not life.expired(118.0)
    assert life.expired(119.0)
    life.attach()
    assert not life.expired(1e9)


def test_attaching_says_why_not() -> None:
    life = IncomingLife(DISPATCH_S)
    with pytest.raises(TransferFailed, match="not committed yet"):
        life.attach()
    life.failed("sender died")
    with pytest.raises(TransferFailed, match="sender died"):
        life.attach()


@given(st.booleans(), st.permutations(["writer", "sender"]), st.booleans(), st.booleans())
def test_pages_are_free_when_writer_and_sender_are_done(
    sending: bool, order: list[str], commits: bool, arrives: bool
) -> None:
    life = WritingLife(sending=sending)
    for step in order:
        assert not life.free
        if step == "sender":
            if sending:
                life.sent("" if arrives else "lost")
        elif commits:
            life.written()
        else:
            assert life.aborted() == (life.sender is Sender.SENDING)
        if not sending and life.writer is not Writer.WRITING:
            break
    assert life.free
