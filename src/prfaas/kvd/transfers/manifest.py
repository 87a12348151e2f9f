"""The tokens and states that a prefill or a hand-off must produce, which of them are ready, and the
segments in which they are sent.

Pure. After `tokens` tokens and n closing lengths, each layer of a group requires

    full attention   [skip, tokens)                        one span
    sliding window   [first(l), l) for each length l       spans, merged where they overlap
    linear state     the state after each length l         whole, or not at all

State becomes ready in the engine's chunks and is sent in the segments of `plan_segments`: the
manifest of a transfer is fixed before the engine computes the first chunk.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from prfaas.errors import InputError
from prfaas.kvd.transfers.head_shares import HeadShares
from prfaas.kvspec import (
    FullAttention,
    KVSpec,
    LinearState,
    Segment,
    SegmentShare,
    SlidingWindow,
    all_heads,
)

GroupLayer: TypeAlias = tuple[str, int]  # group, layer
# Of full attention in one transfer: starting a transfer takes time for each segment.
MAX_PLANNED_SEGMENTS = 4_096
# Ranges of tokens of one lease that have some heads but not all. Ranks that write the same tokens
# in the same order have one or two for each layer.
MAX_FRAGMENTS = 1 << 18


class Span(NamedTuple):
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RequiredState:
    """What a lease or a transfer must contain: per group, the same for each of its layers."""

    spans: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)  # disjoint, ascending
    states: Mapping[str, frozenset[int]] = field(default_factory=dict)


def required_state(
    spec: KVSpec,
    tokens: int,
    *,
    skip_tokens: Mapping[str, int],
    lengths: Iterable[int],
    whole: int = 1,
) -> RequiredState:
    """`lengths`: where windows and states are required. Spans are widened to multiples of
    `whole`."""
    closing = sorted(set(lengths))
    spans: dict[str, tuple[Span, ...]] = {}
    states: dict[str, frozenset[int]] = {}
    for group in spec.groups:
        if isinstance(group, LinearState):
            states[group.name] = frozenset(closing)
            continue
        if isinstance(group, FullAttention):
            wanted = [Span(skip_tokens.get(group.name, 0), tokens)]
        else:
            wanted = [Span(group.first_token(length), length) for length in closing]
        merged = SpanSet()
        for start, stop in wanted:
            if start < stop:
                merged.add(Span(start // whole * whole, -(-stop // whole) * whole))
        spans[group.name] = tuple(merged)
    return RequiredState(spans, states)


class SpanSet:
    """A set of tokens, as disjoint spans that do not touch."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def add(self, span: Span) -> None:
        start, stop = span
        if self._spans:
            first, last = self._spans[-1]
            if first <= start <= last:  # tokens are mostly added in their order
                if stop > last:
                    self._spans[-1] = Span(first, stop)
                return
        kept: list[Span] = []
        for other in self._spans:
            if other.stop < start or stop < other.start:
                kept.append(other)
            else:
                start, stop = min(start, other.start), max(stop, other.stop)
        insort(kept, Span(start, stop))
        self._spans = kept

    def gaps(self, span: Span) -> Iterator[Span]:
        """What the set does not have of `span`."""
        at = span.start
        for start, stop in self._spans:
            if stop > at and start < span.stop:
                if at < start:
                    yield Span(at, start)
                at = stop
        if at < span.stop:
            yield Span(at, span.stop)

    def has(self, span: Span) -> bool:
        at = bisect_right(self._spans, span.start, key=lambda other: other.start) - 1
        return at >= 0 and self._spans[at].stop >= span.stop


class Coverage:
    """Which part of the required state is ready. Tokens and states are ready when every head of
    their group is: ranks of an engine may write and report disjoint heads, in any order."""

    def __init__(self, spec: KVSpec, required: RequiredState) -> None:
        self._spec = spec
        self._required = required
        # Ready tokens. In a layer of states, token l - 1 stands for the state after l tokens.
        self._spans: dict[GroupLayer, SpanSet] = {}
        self._shares: dict[GroupLayer, HeadShares] = {}  # tokens that lack a head
        self._fragments = 0  # of all shares

    def check(self, shares: Iterable[SegmentShare]) -> None:
        """InputError when one of them cannot be added: the model has no such segment or heads, or
        too many tokens lack a head."""
        parts = 0
        for segment, heads in shares:
            if not all_heads(self._spec, segment, heads):
                parts += 1
        if parts and self._fragments + parts > MAX_FRAGMENTS:
            raise InputError(
                f"more than {MAX_FRAGMENTS} ranges of tokens lack a head",
                where="heads",
                fix="report longer segments, or let all ranks write in the same order",
            )

    def add(self, segment: Segment, heads: range | None = None) -> bool:
        """Counts these heads of a checked segment as ready; None: all of them. False when no token
        and no state has become ready by that."""
        where = (segment.group, segment.layer)
        group = self._spec[segment.group]
        start = segment.stop - 1 if isinstance(group, LinearState) else segment.start
        span = Span(start, segment.stop)
        spans = self._spans.get(where)
        if spans is None:
            spans = self._spans[where] = SpanSet()
        shares = self._shares.get(where)
        if shares is None:
            if heads is None or len(heads) == group.heads:
                spans.add(span)
                return True
            shares = self._shares[where] = HeadShares(group.heads)
        before, changed = len(shares), False
        for gap in list(spans.gaps(span)):
            for complete in shares.add(*gap, heads or range(group.heads)):
                spans.add(Span(*complete))
                changed = True
        self._fragments += len(shares) - before
        return changed

    def has(self, segment: Segment) -> bool:
        linear = isinstance(self._spec[segment.group], LinearState)
        start = segment.stop - 1 if linear else segment.start
        spans = self._spans.get((segment.group, segment.layer))
        return spans is not None and spans.has(Span(start, segment.stop))

    def missing(self) -> Segment | None:
        """A required segment that is not ready, or None."""
        for group in self._spec.groups:
            for layer in group.layers:
                for start, stop in self._required.spans.get(group.name, ()):
                    segment = Segment(group.name, layer, start, stop)
                    if not self.has(segment):
                        return segment
                for length in self._required.states.get(group.name, ()):
                    segment = Segment(group.name, layer, 0, length)
                    if not self.has(segment):
                        return segment
        return None


def mismatch(spec: KVSpec, required: RequiredState, segments: Iterable[Segment]) -> str | None:
    """How these segments differ from the required state, each token and state once; None when
    they do not."""
    ready = Coverage(spec, required)
    tokens: dict[GroupLayer, int] = {}
    states: dict[GroupLayer, int] = {}
    for segment in segments:
        ready.add(segment)
        where = (segment.group, segment.layer)
        if isinstance(spec[segment.group], LinearState):
            states[where] = states.get(where, 0) + 1
        else:
            tokens[where] = tokens.get(where, 0) + segment.stop - segment.start
    missing = ready.missing()
    if missing is not None:
        return f"{missing.name} is missing"
    for group in spec.groups:
        spans = sum(stop - start for start, stop in required.spans.get(group.name, ()))
        lengths = len(required.states.get(group.name, ()))
        for layer in group.layers:
            where = (group.name, layer)
            if (tokens.get(where, 0), states.get(where, 0)) != (spans, lengths):
                return f"{group.name}/{layer}: more than is required, or a part of it twice"
    return None


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A segment of a transfer. `found`: it belongs to the prefix that the pool already had, so it
    can be sent at once."""

    segment: Segment
    found: bool


def plan_segments(
    spec: KVSpec,
    block_tokens: int,
    tokens: int,
    *,
    skip_tokens: Mapping[str, int],
    lengths: Iterable[int],
    match_tokens: int,
    found_tokens: Mapping[str, int],
    whole: int = 1,
) -> list[PlannedSegment]:
    """The segments in which a hand-off is sent. The receiver lacks full attention from
    `skip_tokens` on, and windows and states at `lengths`. The sender has full attention up to
    `found_tokens` and windows and states at `match_tokens`, and computes the rest."""
    closing = sorted(set(lengths))
    # A grant comes from another host. A negative number would be cut into segments for ever.
    negative = [name for name, skip in skip_tokens.items() if skip < 0]
    if negative or closing[-1:] > [tokens]:
        problem = (
            f"skip_tokens of {negative[0]!r} is negative"
            if negative
            else f"it requires the state after {closing[-1]} tokens, the prefill has {tokens}"
        )
        raise InputError(problem, where="grant", fix="send the grant as the receiver made it")
    unavailable = [length for length in closing if length < match_tokens]
    if unavailable and any(not isinstance(group, FullAttention) for group in spec.groups):
        raise InputError(
            f"the grant requires the state after {unavailable[0]} tokens, but the prefill resumes "
            f"after {match_tokens}",
            where="grant",
            fix="request the last block boundary of the prompt, or none",
        )
    full_layers = sum(len(g.layers) for g in spec.groups if isinstance(g, FullAttention))
    blocks = -(-tokens // block_tokens)
    # One fewer per layer than the limit allows: the end of the found prefix cuts one in two.
    per_layer = max(1, MAX_PLANNED_SEGMENTS // max(1, full_layers) - 1)
    step = block_tokens * -(-blocks // per_layer)
    found: list[PlannedSegment] = []
    growing: list[PlannedSegment] = []
    windows: list[PlannedSegment] = []
    states: list[PlannedSegment] = []
    for group in spec.groups:
        if isinstance(group, FullAttention):
            end = -(-tokens // whole) * whole
            border = found_tokens.get(group.name, 0)
            for start, stop in _cut(skip_tokens.get(group.name, 0), end, step, border):
                into = found if stop <= border else growing
                for layer in group.layers:
                    into.append(
                        PlannedSegment(Segment(group.name, layer, start, stop), stop <= border)
                    )
            continue
        at = 0  # tokens before this are sent with an earlier length's window
        for length in closing:
            available = length <= match_tokens
            if isinstance(group, SlidingWindow):
                start = max(at, group.first_token(length) // whole * whole)
                at = stop = -(-length // whole) * whole
                into = windows
            else:
                start, stop, into = 0, length, states
            if start < stop:
                into += (
                    PlannedSegment(Segment(group.name, layer, start, stop), available)
                    for layer in group.layers
                )
    return [*found, *growing, *windows, *states]


def _cut(start: int, stop: int, step: int, border: int) -> Iterator[Span]:
    """[start, stop) at multiples of `step`, and at `border`."""
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        if start < border < end:
            end = border
        yield Span(start, end)
        start = end
