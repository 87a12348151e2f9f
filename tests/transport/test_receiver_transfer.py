"""The receiver's state of one transfer, compared with a plain array of bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.errors import WireError
from prfaas.transport.grants import new_grant
from prfaas.transport.messages import Ended, Manifest, ManifestSegment
from prfaas.transport.receiver_transfer import Claims, ReceiverTransfer, TransferState
from prfaas.transport.wire import SegmentPiece

QUANTUM = 4096


class Owner:
    def buffers(self, manifest: Manifest) -> list[list[memoryview]]:
        raise NotImplementedError

    def committed(self) -> None: ...

    def ended(self, reason: str) -> None: ...


def make_transfer(
    sizes: list[int], buffers: list[list[memoryview]] | None = None
) -> ReceiverTransfer:
    grant = new_grant("h:1", max_bytes=sum(sizes), deadline_s=10)
    transfer = ReceiverTransfer(grant, b"", Owner(), now=0.0)
    manifest = Manifest(QUANTUM, tuple(ManifestSegment(f"s{i}", n) for i, n in enumerate(sizes)))
    transfer.open(manifest, buffers or [[memoryview(bytearray(n))] for n in sizes])
    return transfer


def pieces_of(sizes: list[int]) -> list[SegmentPiece]:
    return [
        SegmentPiece(i, 0, at, min(QUANTUM, n - at), min(QUANTUM, n - at))
        for i, n in enumerate(sizes)
        for at in range(0, n, QUANTUM)
    ]


class Receiving(RuleBasedStateMachine):
    """Connections claim, write and settle pieces in any order, some failing half-way."""

    @initialize(
        sizes=st.lists(st.integers(1, 5 * QUANTUM), min_size=1, max_size=5),
        cut=st.integers(100, 3000),
        seed=st.integers(0, 1000),
    )
    def start(self, sizes: list[int], cut: int, seed: int) -> None:
        rng = random.Random(seed)
        self.truth = [rng.randbytes(n) for n in sizes]
        self.memory = [bytearray(n) for n in sizes]
        # Segments lie in several views, as in pages.
        views = [
            [memoryview(m)[at : at + cut] for at in range(0, len(m), cut)] for m in self.memory
        ]
        self.transfer = make_transfer(sizes, views)
        self.all = pieces_of(sizes)
        self.writing: list[tuple[list[SegmentPiece], Claims]] = []
        self.verified: set[SegmentPiece] = set()
        self.complete = False

    def pieces_of(self, claims: Claims) -> set[SegmentPiece]:
        return {self.all[quantum] for quantum in claims.quanta}  # in the manifest's order

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        if self.transfer.state is not TransferState.OPEN:
            return
        pieces = data.draw(st.lists(st.sampled_from(self.all), min_size=1, max_size=4, unique=True))
        claims = self.transfer.claim(pieces)
        claimed = {piece for _, c in self.writing for piece in self.pieces_of(c)}
        for piece, target in zip(pieces, claims.targets, strict=True):
            assert (target is None) == (piece in self.verified or piece in claimed)
        assert claims.busy == any(piece in claimed for piece in pieces)
        self.writing.append((pieces, claims))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), intact=st.booleans())
    def settle(self, data: st.DataObject, intact: bool) -> None:
        index = data.draw(st.integers(0, len(self.writing) - 1))
        pieces, claims = self.writing.pop(index)
        for piece, target in zip(pieces, claims.targets, strict=True):
            at = 0
            for view in target or ():
                source = self.truth[piece.segment][piece.offset + at :][: view.nbytes]
                view[:] = source if intact else bytes(len(source))
                at += view.nbytes
        done = self.transfer.settle(claims, verified=intact)
        if intact and self.transfer.state is TransferState.OPEN:
            self.verified |= self.pieces_of(claims)
        assert done == (
            len(self.verified) == len(self.all) and self.transfer.state is TransferState.OPEN
        )
        if done:
            self.transfer.end(Ended(True))
            self.complete = True

    @rule()
    def abort(self) -> None:
        if not self.complete:
            self.transfer.end(Ended(False, "test"))

    @invariant()
    def verified_bytes_never_change(self) -> None:
        for piece in getattr(self, "verified", ()):
            end = piece.offset + piece.raw_bytes
            assert (
                self.memory[piece.segment][piece.offset : end]
                == self.truth[piece.segment][piece.offset : end]
            )

    @invariant()
    def the_owner_is_notified_once_and_only_without_writers(self) -> None:
        if not hasattr(self, "transfer"):
            return
        notify = self.transfer.take_owner_notice()
        if notify:
            assert not self.writing
            assert self.transfer.state is TransferState.ENDED
            assert not self.transfer.take_owner_notice()

    def teardown(self) -> None:
        if getattr(self, "complete", False):
            assert self.memory == self.truth


Receiving.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReceiving = Receiving.TestCase


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (SegmentPiece(2, 0, 0, 10, 10), "segment index 2"),
        (SegmentPiece(0, 0, 1, QUANTUM, QUANTUM), "offset 1"),
        (SegmentPiece(0, 0, 2 * QUANTUM, 1, 1), "offset 8192 in a segment of 5000"),
        (SegmentPiece(0, 0, QUANTUM, 905, 905), "piece of 905 bytes at offset 4096"),
        (SegmentPiece(0, 0, 0, 5, 5), "piece of 5 bytes at offset 0"),
        (SegmentPiece(1, 0, 2**63, 1, 1), "offset"),
    ],
)
def test_pieces_outside_the_manifest_claim_nothing(piece: SegmentPiece, message: str) -> None:
    transfer = make_transfer([5000, 10])
    good = SegmentPiece(1, 0, 0, 10, 10)
    with pytest.raises(WireError, match=message):
        transfer.claim([good, piece])
    assert transfer.writers == 0
    assert transfer.claim([good]).targets != [
        None
    ]  # the piece claimed before the invalid one is free again


def test_a_manifest_must_keep_to_its_grant() -> None:
    grant = new_grant("h:1", max_bytes=100, deadline_s=10)
    transfer = ReceiverTransfer(grant, b"", Owner(), now=0.0)

    def manifest(*segments: tuple[str, int]) -> Manifest:
        return Manifest(QUANTUM, tuple(ManifestSegment(*s) for s in segments))

    assert (
        transfer.check_manifest(manifest(("a", 1 << 40)))
        == f"the transfer has {1 << 40} bytes, but the grant allows 100"
    )
    assert transfer.check_manifest(manifest(("a", 5), ("a", 5))) == "segment names are not unique"
    good = manifest(("a", 60), ("b", 40))
    assert transfer.check_manifest(good) is None
    transfer.open(good, [[memoryview(bytearray(60))], [memoryview(bytearray(40))]])
    assert transfer.check_manifest(good) is None  # a repeated OPEN
    assert "another manifest" in str(transfer.check_manifest(manifest(("a", 60))))


def test_the_deadline_runs_from_the_last_frame() -> None:
    transfer = make_transfer([10])
    assert transfer.expires_s == 10
    transfer.renew(7.5)
    assert transfer.expires_s == 17.5
