"""Which tokens and states a prefill or a hand-off owes, what is there of it, and how it travels.

Pure. Of each layer of a group the owed are, after `tokens` tokens and n closing lengths,

    full attention   [skip, tokens)                        one span
    sliding window   [first(l), l) for each length l       spans, merged where they overlap
    linear state     the state after each length l         whole, or not at all

An engine's chunks say in which pieces it becomes ready, `stripes` in which pieces it travels: the
manifest of a transfer is fixed before the first chunk is computed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, LinearState, Segment, SlidingWindow

Lane: TypeAlias = tuple[str, int]  # group, layer
MAX_STRIPES = 4_096  # of growing groups in one transfer: beginning it takes time for each


class Span(NamedTuple):
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Owed:
    """Per group, the same for each of its layers."""

    spans: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)  # disjoint, ascending
    states: Mapping[str, frozenset[int]] = field(default_factory=dict)


def owed(
    spec: KVSpec,
    tokens: int,
    *,
    skip_tokens: Mapping[str, int],
    lengths: Iterable[int],
    whole: int = 1,
) -> Owed:
    """`lengths`: where windows and states are wanted. Spans are widened to multiples of `whole`."""
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
        merged = Spans()
        for start, stop in wanted:
            if start < stop:
                merged.add(Span(start // whole * whole, -(-stop // whole) * whole))
        spans[group.name] = tuple(merged)
    return Owed(spans, states)


class Spans:
    """A set of tokens, as disjoint spans that do not touch."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def add(self, span: Span) -> None:
        start, stop = span
        kept: list[Span] = []
        for other in self._spans:
            if other.stop < start or stop < other.start:
                kept.append(other)
            else:
                start, stop = min(start, other.start), max(stop, other.stop)
        insort(kept, Span(start, stop))
        self._spans = kept

    def has(self, span: Span) -> bool:
        at = bisect_right(self._spans, span.start, key=lambda other: other.start) - 1
        return at >= 0 and self._spans[at].stop >= span.stop


class Coverage:
    """What is there of what is owed."""

    def __init__(self, spec: KVSpec, wanted: Owed) -> None:
        self._spec = spec
        self._wanted = wanted
        self._spans: dict[Lane, Spans] = {}
        self._states: set[tuple[str, int, int]] = set()

    def add(self, segment: Segment) -> None:
        if isinstance(self._spec[segment.group], LinearState):
            self._states.add((segment.group, segment.layer, segment.stop))
        else:
            lane = self._spans.setdefault((segment.group, segment.layer), Spans())
            lane.add(Span(segment.start, segment.stop))

    def has(self, segment: Segment) -> bool:
        if isinstance(self._spec[segment.group], LinearState):
            return (segment.group, segment.layer, segment.stop) in self._states
        lane = self._spans.get((segment.group, segment.layer))
        return lane is not None and lane.has(Span(segment.start, segment.stop))

    def missing(self) -> Segment | None:
        """Something owed that is not there, if anything."""
        for group in self._spec.groups:
            for layer in group.layers:
                for start, stop in self._wanted.spans.get(group.name, ()):
                    segment = Segment(group.name, layer, start, stop)
                    if not self.has(segment):
                        return segment
                for length in self._wanted.states.get(group.name, ()):
                    segment = Segment(group.name, layer, 0, length)
                    if not self.has(segment):
                        return segment
        return None


def mismatch(spec: KVSpec, wanted: Owed, segments: Iterable[Segment]) -> str | None:
    """Why these segments are not exactly what is owed, each token and state once; None if so."""
    there = Coverage(spec, wanted)
    tokens: dict[Lane, int] = {}
    states: dict[Lane, int] = {}
    for segment in segments:
        there.add(segment)
        lane = (segment.group, segment.layer)
        if isinstance(spec[segment.group], LinearState):
            states[lane] = states.get(lane, 0) + 1
        else:
            tokens[lane] = tokens.get(lane, 0) + segment.stop - segment.start
    missing = there.missing()
    if missing is not None:
        return f"{missing.name} is missing"
    for group in spec.groups:
        spans = sum(stop - start for start, stop in wanted.spans.get(group.name, ()))
        lengths = len(wanted.states.get(group.name, ()))
        for layer in group.layers:
            lane = (group.name, layer)
            if (tokens.get(lane, 0), states.get(lane, 0)) != (spans, lengths):
                return f"{group.name}/{layer}: more than is owed, or some of it twice"
    return None


@dataclass(frozen=True, slots=True)
class Stripe:
    """A piece of a transfer. `found`: of the prefix that was found, so it can leave at once."""

    segment: Segment
    found: bool


def stripes(
    spec: KVSpec,
    block_tokens: int,
    tokens: int,
    *,
    skip_tokens: Mapping[str, int],
    lengths: Iterable[int],
    match_tokens: int,
    found_tokens: Mapping[str, int],
    whole: int = 1,
) -> list[Stripe]:
    """How a hand-off travels. The receiver lacks full attention from `skip_tokens` on, and windows
    and states at `lengths`; the sender finds the former up to `found_tokens` and the latter at
    `match_tokens`, and computes the rest."""
    closing = sorted(set(lengths))
    unavailable = [length for length in closing if length < match_tokens]
    if unavailable and any(not isinstance(group, FullAttention) for group in spec.groups):
        raise InputError(
            f"state after {unavailable[0]} tokens is promised, but the prefill resumes after "
            f"{match_tokens}",
            where="grant",
            fix="ask for the last block boundary of the prompt, or for none",
        )
    full_lanes = sum(len(g.layers) for g in spec.groups if isinstance(g, FullAttention))
    blocks = -(-tokens // block_tokens)
    # One fewer of each lane than there is room for: the border of what was found cuts one in two.
    per_lane = max(1, MAX_STRIPES // max(1, full_lanes) - 1)
    step = block_tokens * -(-blocks // per_lane)
    found: list[Stripe] = []
    growing: list[Stripe] = []
    windows: list[Stripe] = []
    states: list[Stripe] = []
    for group in spec.groups:
        if isinstance(group, FullAttention):
            end = -(-tokens // whole) * whole
            border = found_tokens.get(group.name, 0)
            for start, stop in _cut(skip_tokens.get(group.name, 0), end, step, border):
                into = found if stop <= border else growing
                for layer in group.layers:
                    into.append(Stripe(Segment(group.name, layer, start, stop), stop <= border))
            continue
        at = 0  # what lies before travels with an earlier length's window
        for length in closing:
            there = length <= match_tokens
            if isinstance(group, SlidingWindow):
                start = max(at, group.first_token(length) // whole * whole)
                at = stop = -(-length // whole) * whole
                into = windows
            else:
                start, stop, into = 0, length, states
            if start < stop:
                into += (
                    Stripe(Segment(group.name, layer, start, stop), there) for layer in group.layers
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
