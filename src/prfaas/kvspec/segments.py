"""Segments: the named byte ranges in which KV is transferred, and their place in logical blocks.

A segment is one layer's share of a group for tokens [start, stop). Its bytes are token-major: token
start first, then start + 1, ... A linear state has no token axis: its segment is (0, l), the state
after exactly l tokens. The transport handles names and byte ranges only; pages are the receiver's.

A logical block of a growing or window group holds `block_tokens` consecutive tokens of *all* layers
of the group, layer after layer, so that one layer's tokens of a block are contiguous:

    block b   | layer 0: token b*n .. b*n+n-1 | layer 1: token b*n .. b*n+n-1 | ...
    state     | layer 0: state_bytes          | layer 1: state_bytes          | ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from prfaas.errors import InputError
from prfaas.kvspec.groups import Group, KVSpec, LinearState, SlidingWindow

# At most 18 digits: Python refuses to convert thousands of them, and no model has so many tokens.
_NUMBER = "(0|[1-9][0-9]{0,17})"
_NAME = re.compile(f"([a-z0-9_]+)/{_NUMBER}/{_NUMBER}-{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Segment:
    group: str
    layer: int  # the model's layer number, not the position within the group
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.group}/{self.layer}/{self.start}-{self.stop}"

    @classmethod
    def parse(cls, name: str) -> Segment:
        match = _NAME.fullmatch(name)
        if match is None:
            raise InputError(f"{name!r} is not a segment name", fix="use group/layer/start-stop")
        group, layer, start, stop = match.groups()
        return cls(group, int(layer), int(start), int(stop))


# A segment, and the heads of it that are written; None: all of them.
SegmentShare: TypeAlias = tuple[Segment, range | None]


class BlockSlice(NamedTuple):
    """A contiguous piece of a segment inside one logical block (or inside a state)."""

    block: int  # index along the sequence; 0 for a linear state
    offset: int  # bytes from the start of the block
    nbytes: int


class SegmentSink(Protocol):
    """Where an engine writes finished state. The kvd's client implements it over arena pages."""

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        """Writable views, `segment_bytes(spec, segment)` bytes in total and in the segment's order,
        valid until `ready`. There may be several, because an arena's pages need not be
        neighbours."""

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        """The bytes are final and may be sent at once. The engine calls it once per segment, or
        once per share of its heads when several ranks write one segment. `heads`: only the bytes of
        these heads of the model are final; None means all of them."""


class SegmentSource(Protocol):
    """Where an engine reads existing state."""

    def views(self, segment: Segment) -> Sequence[memoryview]:
        """The segment's bytes, in order; valid and unchanged until the reading job ends."""


def segment_bytes(spec: KVSpec, segment: Segment) -> int:
    group = _checked_group(spec, segment)
    if isinstance(group, LinearState):
        return group.state_bytes
    return group.bytes_per_token * (segment.stop - segment.start)


def all_heads(spec: KVSpec, segment: Segment, heads: range | None) -> bool:
    """Whether these are all heads of the segment's group; None means all of them. InputError when
    the model has no such segment, or its group no such heads."""
    group = _checked_group(spec, segment)
    if heads is None:
        return True
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= group.heads:
        raise InputError(
            f"segment {segment.name}: {heads} is not a range of heads of its group",
            where="heads",
            fix=f"the heads of {group.name} are range(0, {group.heads}); name a part of them that "
            "is not empty, or none for all",
        )
    return len(heads) == group.heads


def block_bytes(group: Group, block_tokens: int) -> int:
    """Size of one logical block of `group`, or of one whole linear state."""
    if isinstance(group, LinearState):
        return len(group.layers) * group.state_bytes
    return len(group.layers) * group.bytes_per_token * block_tokens


def block_slices(spec: KVSpec, segment: Segment, block_tokens: int) -> Iterator[BlockSlice]:
    """The places of the segment's bytes, in wire order."""
    group = _checked_group(spec, segment)
    layer_position = group.layers.index(segment.layer)
    if isinstance(group, LinearState):
        yield BlockSlice(0, layer_position * group.state_bytes, group.state_bytes)
        return
    layer_offset = layer_position * block_tokens * group.bytes_per_token
    start = segment.start
    while start < segment.stop:
        block, within = divmod(start, block_tokens)
        stop = min(segment.stop, (block + 1) * block_tokens)
        offset = layer_offset + within * group.bytes_per_token
        yield BlockSlice(block, offset, (stop - start) * group.bytes_per_token)
        start = stop


def handoff_segments(
    spec: KVSpec, tokens: int, *, chunk_tokens: int, skip_tokens: Mapping[str, int] | None = None
) -> Iterator[Segment]:
    """Every segment of a hand-off after `tokens` tokens, in the order a chunked prefill finishes
    them: growing groups chunk by chunk, windows and linear states with the last chunk.

    `skip_tokens` has, per full-attention group, the leading tokens that the receiver holds.
    """
    skip = skip_tokens or {}
    for start in range(0, tokens, chunk_tokens):
        stop = min(start + chunk_tokens, tokens)
        for group in spec.groups:
            if isinstance(group, LinearState):
                first = 0
                wanted = stop == tokens
            elif isinstance(group, SlidingWindow):
                first = group.first_token(tokens)
                wanted = stop == tokens and first < tokens
            else:
                first = max(start, skip.get(group.name, 0))
                wanted = first < stop
            if wanted:
                for layer in group.layers:
                    yield Segment(group.name, layer, first, stop)


def _checked_group(spec: KVSpec, segment: Segment) -> Group:
    """The segment's group. InputError when the segment does not belong to this model."""
    try:
        group = spec[segment.group]
    except KeyError:
        known = ", ".join(g.name for g in spec.groups)
        raise InputError(
            f"segment {segment.name} names an unknown group", fix=f"groups are: {known}"
        ) from None
    if segment.layer not in group.layers:
        raise InputError(f"segment {segment.name}: layer {segment.layer} is not in that group")
    if not 0 <= segment.start < segment.stop:
        raise InputError(f"segment {segment.name} is empty", fix="start must lie before stop")
    if isinstance(group, LinearState) and segment.start != 0:
        raise InputError(f"segment {segment.name}: a linear state starts at 0")
    return group
