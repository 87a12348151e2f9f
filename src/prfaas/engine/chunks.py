"""How a prompt is cut into chunks, and which segments each layer exports after each chunk. Pure.

Windows and linear states can be read only as they are at the end of a chunk, so chunks end at every
length whose state is wanted. Full attention is exported chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from prfaas.engine.api import Export
from prfaas.kvspec import FullAttention, Group, KVSpec, LinearState, Segment


def chunk_ends(
    start: int,
    stop: int,
    *,
    chunk_tokens: int,
    export: Export | None,
    cuts: Sequence[int] = (),
) -> tuple[int, ...]:
    """The lengths at which chunks of [start, stop) end: every `chunk_tokens` of the prompt, and at
    every length whose state is exported. Counting starts at token 0, so that a resumed prompt has
    the same chunk boundaries.

    With `cuts` (`EngineJob.cut_tokens`), chunks end there instead of every `chunk_tokens`. Pieces
    between them that are longer than a chunk are cut as always, so that no chunk is longer."""
    wanted = {export.tokens, *export.checkpoint_tokens} if export is not None else set()
    ends = {stop, *(length for length in (*wanted, *cuts) if start < length < stop)}
    for first, last in pairwise([start, *sorted(ends)]):
        if not cuts or last - first > chunk_tokens:
            ends.update(range((first // chunk_tokens + 1) * chunk_tokens, last, chunk_tokens))
    return tuple(sorted(ends))


class ExportPlan:
    """The segments to export, layer by layer."""

    def __init__(self, spec: KVSpec, export: Export) -> None:
        self._export = export
        self._closings = {export.tokens, *export.checkpoint_tokens}
        self._groups: dict[int, list[Group]] = {}
        for group in spec.groups:
            for layer in group.layers:
                self._groups.setdefault(layer, []).append(group)

    def growing(self, layer: int, start: int, stop: int) -> Iterator[Segment]:
        """Full attention of tokens [start, stop), once the layer has computed them."""
        for group in self._groups.get(layer, ()):
            if isinstance(group, FullAttention):
                first = max(start, self._export.skip_tokens.get(group.name, 0))
                last = min(stop, self._export.tokens)
                if first < last:
                    yield Segment(group.name, layer, first, last)

    def closing(self, layer: int, length: int) -> Iterator[Segment]:
        """Window and linear state after exactly `length` tokens, where that length is wanted."""
        if length not in self._closings:
            return
        for group in self._groups.get(layer, ()):
            if isinstance(group, LinearState):
                yield Segment(group.name, layer, 0, length)
            elif not isinstance(group, FullAttention) and group.first_token(length) < length:
                yield Segment(group.name, layer, group.first_token(length), length)


def resume_segments(spec: KVSpec, tokens: int) -> Iterator[Segment]:
    """Every segment an engine reads to continue after exactly `tokens` tokens."""
    for group in spec.groups:
        for layer in group.layers:
            if isinstance(group, FullAttention | LinearState):
                yield Segment(group.name, layer, 0, tokens)
            elif group.first_token(tokens) < tokens:
                yield Segment(group.name, layer, group.first_token(tokens), tokens)
