"""State of one sequence in plain memory: a sink, a source, and bytes to move to another process.

It is a hand-off without arena, pool or network. The warm-up resumes from it, and tests move it
between processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prfaas.errors import EngineError, InputError
from prfaas.kvspec import KVSpec, LinearState, Segment, all_heads, segment_bytes


class MemorySegments:
    """Keeps every written segment and serves any range of tokens that ready segments cover."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self._written: dict[Segment, bytearray] = {}
        self._ready: list[Segment] = []

    # As a sink ------------------------------------------------------------------------------------

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        assert segment not in self._written, f"{segment.name} is written twice"
        self._written[segment] = bytearray(segment_bytes(self.spec, segment))
        return (memoryview(self._written[segment]),)

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        _check_whole(self.spec, segment, heads)
        self._ready.append(segment)

    # As a source ----------------------------------------------------------------------------------

    def views(self, segment: Segment) -> Sequence[memoryview]:
        if isinstance(self.spec[segment.group], LinearState):
            return (self._piece(segment, 0, segment_bytes(self.spec, segment)),)
        return tuple(self._covering(segment))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order in which they became ready."""
        return tuple(self._ready)

    @property
    def nbytes(self) -> int:
        return sum(segment_bytes(self.spec, segment) for segment in self._ready)

    def dump(self) -> dict[str, bytes]:
        """The ready segments' bytes by segment name, in wire form."""
        return {segment.name: bytes(self._written[segment]) for segment in self._ready}

    @classmethod
    def load(cls, spec: KVSpec, dumped: dict[str, bytes]) -> MemorySegments:
        state = cls(spec)
        for name, data in dumped.items():
            segment = Segment.parse(name)
            (view,) = state.buffers(segment)
            view[:] = data
            state.ready(segment)
        return state

    def _covering(self, wanted: Segment) -> Iterator[memoryview]:
        per_token = segment_bytes(self.spec, wanted) // (wanted.stop - wanted.start)
        at = wanted.start
        while at < wanted.stop:
            piece = next((s for s in self._ready if self._serves(s, wanted, at)), None)
            if piece is None:
                raise EngineError(f"segment {wanted.name}: token {at} is missing")
            stop = min(piece.stop, wanted.stop)
            yield self._piece(piece, (at - piece.start) * per_token, (stop - at) * per_token)
            at = stop

    @staticmethod
    def _serves(piece: Segment, wanted: Segment, at: int) -> bool:
        same_layer = (piece.group, piece.layer) == (wanted.group, wanted.layer)
        return same_layer and piece.start <= at < piece.stop

    def _piece(self, segment: Segment, offset: int, nbytes: int) -> memoryview:
        if segment not in self._written:
            raise EngineError(f"segment {segment.name} is missing")
        return memoryview(self._written[segment])[offset : offset + nbytes]


def _check_whole(spec: KVSpec, segment: Segment, heads: range | None) -> None:
    """InputError for a share of the heads: this memory belongs to one process, which writes all."""
    if heads is not None and not all_heads(spec, segment, heads):
        raise InputError(
            f"segment {segment.name}: only {heads} of its heads are written",
            where="heads",
            fix="write whole segments, or let the ranks join a lease of a kvd",
        )
