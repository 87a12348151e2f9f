from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.kvd.engine_socket.messages import Begin, LeaseTicket, SegmentName
from prfaas.kvd.transfers import manifest
from prfaas.kvd.transfers.manifest import Coverage, RequiredState, required_state
from prfaas.kvspec import KVSpec, LinearState, Segment, SegmentShare
from tests.cache.builders import SEEDED
from tests.kvd.hosts import SPEC, fill, names, prompt_of
from tests.kvd.transfers.parts import Parts, transfer_parts

HEADS = {"full0": 4, "window0": 2, "linear0": 3, "full1": 1}
SHARED = KVSpec(tuple(replace(group, heads=HEADS[group.name]) for group in SPEC.groups))
TOKENS = 18
PROMPT = prompt_of(TOKENS)
REQUIRED = required_state(SHARED, TOKENS, skip_tokens={"full0": 2}, lengths=(16, TOKENS))


def atoms(segment: Segment, heads: range | None) -> set[tuple[str, int, int, int]]:
    """Every head of every token; of a state, the token is its length."""
    group = SHARED[segment.group]
    linear = isinstance(group, LinearState)
    tokens = [segment.stop] if linear else range(segment.start, segment.stop)
    written = range(group.heads) if heads is None else heads
    return {(segment.group, segment.layer, token, head) for token in tokens for head in written}


def required_segments(required: RequiredState) -> list[Segment]:
    return [
        Segment(group.name, layer, start, stop)
        for group in SHARED.groups
        for layer in group.layers
        for start, stop in (
            *required.spans.get(group.name, ()),
            *((0, length) for length in required.states.get(group.name, ())),
        )
    ]


@st.composite
def any_share(draw: st.DrawFn) -> SegmentShare:
    group = draw(st.sampled_from(SHARED.groups))
    layer = draw(st.sampled_from(group.layers))
    linear = isinstance(group, LinearState)
    start = 0 if linear else draw(st.integers(0, TOKENS - 1))
    stop = draw(st.sampled_from((16, TOKENS)) if linear else st.integers(start + 1, TOKENS))
    first = draw(st.integers(0, group.heads - 1))
    last = draw(st.integers(first + 1, group.heads))
    heads = draw(st.sampled_from((range(first, last), range(first, last), None)))
    return Segment(group.name, layer, start, stop), heads


@st.composite
def partitions(draw: st.DrawFn) -> list[SegmentShare]:
    """The required state, each head of each token once, in any order."""
    shares: list[SegmentShare] = []
    for segment in required_segments(REQUIRED):
        group = SHARED[segment.group]
        cuts = sorted(draw(st.sets(st.integers(1, max(1, group.heads - 1)), max_size=3)))
        borders = [0, *(cut for cut in cuts if cut < group.heads), group.heads]
        for first, last in zip(borders, borders[1:], strict=False):
            heads = None if last - first == group.heads else range(first, last)
            start = segment.start
            while start < segment.stop:
                stop = segment.stop
                if not isinstance(group, LinearState):
                    stop = draw(st.integers(start + 1, segment.stop))
                shares.append((replace(segment, start=start, stop=stop), heads))
                start = stop
    return draw(st.permutations(shares))


@settings(max_examples=60)
@given(st.lists(any_share(), max_size=30))
def test_tokens_are_ready_when_every_head_of_them_is(shares: list[SegmentShare]) -> None:
    coverage, written = Coverage(SHARED, REQUIRED), set[tuple[str, int, int, int]]()
    coverage.check(shares)
    for segment, heads in shares:
        changed = coverage.add(segment, heads)
        new = atoms(segment, None) <= written | atoms(segment, heads)
        assert changed or not new or atoms(segment, None) <= written
        written |= atoms(segment, heads)
        assert coverage.has(segment) == (atoms(segment, None) <= written)
    for segment in required_segments(REQUIRED):
        assert coverage.has(segment) == (atoms(segment, None) <= written)
        for start in range(segment.start, segment.stop, 5):
            part = replace(segment, start=start)
            if not isinstance(SHARED[part.group], LinearState):
                assert coverage.has(part) == (atoms(part, None) <= written)
    complete = all(atoms(segment, None) <= written for segment in required_segments(REQUIRED))
    assert (coverage.missing() is None) == complete


@settings(max_examples=40)
@given(partitions(), st.data())
def test_everything_is_covered_with_the_last_share_and_not_before(
    shares: list[SegmentShare], data: st.DataObject
) -> None:
    coverage, without = Coverage(SHARED, REQUIRED), Coverage(SHARED, REQUIRED)
    left_out = data.draw(st.integers(0, len(shares) - 1))
    for number, (segment, heads) in enumerate(shares):
        assert coverage.missing() is not None
        coverage.add(segment, heads)
        if number != left_out:
            without.add(segment, heads)
    assert coverage.missing() is None
    missing = without.missing()
    assert missing is not None and atoms(*shares[left_out]) & atoms(missing, None)


@settings(max_examples=60)
@given(st.lists(any_share(), max_size=40))
def test_only_tokens_that_lack_a_head_are_remembered(shares: list[SegmentShare]) -> None:
    coverage = Coverage(SHARED, REQUIRED)
    for number, (segment, heads) in enumerate(shares):
        coverage.add(segment, heads)
        assert coverage._fragments <= 2 * (number + 1)
    for segment in required_segments(REQUIRED):
        for head in range(SHARED[segment.group].heads):
            coverage.add(replace(segment, start=0), range(head, head + 1))
    assert coverage.missing() is None and coverage._fragments == 0
    for segment, heads in shares:  # a rank reports again what it has reported
        coverage.add(segment, heads)
    assert coverage._fragments == 0


mislabelled = st.sampled_from(
    (
        SegmentName("full0", 0, 2, 18, 2, 3),  # beyond the last head
        SegmentName("full0", 0, 2, 18, 4, 1),
        SegmentName("full0", 0, 2, 18, 3, 0),  # an empty range
        SegmentName("full0", 0, 2, 18, 0, 65_536),
        SegmentName("full1", 5, 0, 18, 1, 1),  # a group that is written as a whole
        SegmentName("full1", 5, 0, 18, 0, 2),
        SegmentName("linear0", 1, 0, 18, 0, 4),
        SegmentName("linear0", 1, 4, 18, 0, 3),  # a state starts at 0
        SegmentName("full0", 1, 2, 18, 0, 2),  # a layer of another group
        SegmentName("window0", 99, 12, 18, 0, 1),
        SegmentName("full2", 0, 0, 18, 0, 1),
        SegmentName("full0", 0, 18, 18, 0, 2),
    )
)


def begin(parts: Parts) -> LeaseTicket:
    ticket = parts.outgoing.begin(
        parts.storage, Begin(tuple(names(PROMPT)), TOKENS, (16,)), lambda _: None
    )
    assert isinstance(ticket, LeaseTicket), ticket
    return ticket


def report(parts: Parts, ticket: LeaseTicket, shares: Sequence[SegmentShare]) -> None:
    parts.outgoing.ready(ticket.lease_id, shares)


def lease_shares(order: list[SegmentShare]) -> list[SegmentShare]:
    """The shares of a lease that finds nothing: full attention from token 0."""
    first = [
        (Segment("full0", layer, 0, 2), range(head, head + 1))
        for layer in SHARED["full0"].layers
        for head in range(4)
    ]
    return [*order, *first]


@settings(SEEDED, max_examples=6, phases=[Phase.generate])
@given(partitions(), mislabelled, st.data())
def test_one_mislabelled_share_makes_none_of_its_message_ready(
    shares: list[SegmentShare], wrong: SegmentName, data: st.DataObject
) -> None:
    everything = lease_shares(shares)
    at = data.draw(st.integers(0, len(everything)))

    async def run() -> None:
        async with transfer_parts() as parts:
            parts.register(SHARED)
            ticket = begin(parts)
            fill_pages(parts, ticket)
            with pytest.raises(InputError):
                report(parts, ticket, [*everything[:at], wrong.share, *everything[at:]])
            with pytest.raises(InputError, match=r"full0/0/0-18 is not ready"):
                parts.outgoing.commit(ticket.lease_id)
            assert parts.in_use() == (0, 0) and parts.cached_tokens(PROMPT) == 0

    asyncio.run(run())


@settings(SEEDED, max_examples=6, phases=[Phase.generate])
@given(partitions(), st.data())
def test_a_commit_with_a_missing_head_is_refused_and_keeps_nothing(
    shares: list[SegmentShare], data: st.DataObject
) -> None:
    everything = lease_shares(shares)
    left_out = data.draw(st.integers(0, len(everything) - 1))

    async def run() -> None:
        async with transfer_parts() as parts:
            parts.register(SHARED)
            ticket = begin(parts)
            fill_pages(parts, ticket)
            for number, share in enumerate(everything):
                if number != left_out:
                    report(parts, ticket, [share])
            group = everything[left_out][0].group
            with pytest.raises(InputError, match=f"{group}/.* is not ready"):
                parts.outgoing.commit(ticket.lease_id)
            assert parts.in_use() == (0, 0) and parts.cached_tokens(PROMPT) == 0

            ticket = begin(parts)
            fill_pages(parts, ticket)
            for share in everything:
                report(parts, ticket, [share])
            parts.outgoing.commit(ticket.lease_id)
            assert parts.in_use() == (0, 0) and parts.cached_tokens(PROMPT) == 16

    asyncio.run(run())


def fill_pages(parts: Parts, ticket: LeaseTicket) -> None:
    """Writes every byte, and reports nothing."""
    lease = parts.write_lease(ticket)
    lease.ready = lambda segment, heads=None: None  # type: ignore[method-assign]
    fill(lease, PROMPT)


def test_what_lacks_a_head_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_FRAGMENTS", 8)
    coverage = Coverage(SHARED, REQUIRED)
    scattered = [(Segment("full0", 0, at, at + 1), range(1)) for at in range(0, 18, 2)]
    for share in scattered[:8]:
        coverage.check([share])
        coverage.add(*share)
    with pytest.raises(InputError, match="report longer segments"):
        coverage.check(scattered[8:])
    coverage.check([(Segment("full0", 0, 0, 18), None)])  # whole segments need no memory
    for head in range(1, 4):
        coverage.add(Segment("full0", 0, 0, 18), range(head, head + 1))
    coverage.add(Segment("full0", 0, 0, 18), range(1))
    coverage.check(scattered[8:])
    with pytest.raises(InputError, match="report longer segments"):
        coverage.check(scattered)
