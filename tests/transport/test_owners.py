"""Mistakes of a memory's owner end that owner's transfer and no other one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prfaas.errors import TransferFailed
from prfaas.transport import receiver
from prfaas.transport.link import LinkOptions, TransferLink
from prfaas.transport.listener import Listener
from prfaas.transport.messages import Manifest
from prfaas.transport.receiver import ReceiverTransfers
from prfaas_lab.testing import FakeClock
from tests.transport.ends import Owner, expect, grant_for, nothing_leaks, segments, send
from tests.waiting import PATIENCE_S

CONTENTS = segments(1000, 20)


class Careless(Owner):
    def __init__(self, given: Sequence[Sequence[memoryview]] | None) -> None:
        super().__init__()
        self._given = given

    def buffers(self, manifest: Manifest) -> list[list[memoryview]] | str:
        if self._given is None:
            raise KeyError("a page that is not there")
        return [list(views) for views in self._given]


class Gone(Owner):
    def ended(self, reason: str) -> None:
        super().ended(reason)
        raise RuntimeError("the event loop is closed")


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        [[memoryview(bytearray(1000))]],
        [[memoryview(bytearray(1000))], [memoryview(bytearray(21))]],
        [[memoryview(bytearray(1000))], [memoryview(bytearray(20)).cast("I")]],
    ],
)
def test_buffers_that_do_not_fit_end_one_transfer(
    given: Sequence[Sequence[memoryview]] | None,
) -> None:
    options = LinkOptions(connections=1)
    with nothing_leaks(), Listener() as listener:
        with TransferLink(listener.address, options=options) as link:
            other = link.open(
                expect(listener, CONTENTS, kept := Owner()),
                {name: len(content) for name, content in CONTENTS.items()},
            )
            careless = Careless(given)
            transfer = send(link, expect(listener, CONTENTS, careless), CONTENTS)
            with pytest.raises(TransferFailed, match="refused: the receiver has no valid buffers"):
                transfer.done.result(PATIENCE_S)
            assert "no valid buffers" in str(careless.wait())
            other.ready_all({name: [memoryview(content)] for name, content in CONTENTS.items()})
            other.done.result(PATIENCE_S)
            assert kept.memory == CONTENTS


def test_grants_expire_although_an_owner_is_gone() -> None:
    clock = FakeClock()
    gone, other = Gone(), Owner()
    with nothing_leaks(), Listener(clock=clock) as listener:
        for owner in (gone, other):
            listener.expect(grant_for(CONTENTS, deadline_s=5), owner)
            clock.advance(5)
            assert owner.wait() == "grant expired: no frame arrived in time"


def test_remembered_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "MAX_REMEMBERED", 3)
    transfers = ReceiverTransfers(FakeClock())
    for _ in range(5):
        grant = grant_for(CONTENTS)
        transfers.expect(grant, Owner())
        transfers.cancel(grant.transfer_id, "over")
    assert transfers.stats().remembered == 3
