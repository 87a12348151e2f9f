"""Where an incoming transfer lands: the pages reserved for it, and nothing else.

The listener's threads ask it for buffers, so everything it needs is fixed when it is made. A
sender's manifest must be exactly what was granted, each token and state once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prfaas.cache.storage.places import PageTable, segment_ranges
from prfaas.errors import InputError
from prfaas.kvd.store import Shelf
from prfaas.kvd.transfers.manifest import Owed, mismatch
from prfaas.kvspec import Segment, segment_bytes
from prfaas.transport.messages import Manifest


class Landing:
    """A transport `Receiver`. `over` is called once, from one of the listener's threads, with why
    it failed, or None when everything is in place."""

    def __init__(
        self, shelf: Shelf, table: PageTable, wanted: Owed, over: Callable[[str | None], None]
    ) -> None:
        self._shelf = shelf
        self._table = table
        self._wanted = wanted
        self._over = over
        self.tail = b""  # as the sender names what lies behind the last whole block

    def buffers(self, manifest: Manifest) -> Sequence[Sequence[memoryview]] | str:
        spec, arena = self._shelf.spec, self._shelf.arena
        try:
            segments = [Segment.parse(entry.name) for entry in manifest.segments]
            for segment, entry in zip(segments, manifest.segments, strict=True):
                size = segment_bytes(spec, segment)
                if entry.nbytes != size:
                    return f"{entry.name}: {entry.nbytes} bytes, {size} are expected"
            problem = mismatch(spec, self._wanted, segments)
            if problem is not None:
                return problem
            self.tail = manifest.label
            return [
                [
                    arena.view(start, stop)
                    for start, stop in segment_ranges(
                        spec, self._shelf.block_tokens, arena, segment, self._table.get
                    )
                ]
                for segment in segments
            ]
        except InputError as error:
            return str(error)

    def committed(self) -> None:
        self._over(None)

    def ended(self, reason: str) -> None:
        self._over(reason)
