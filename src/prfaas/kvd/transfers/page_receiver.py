"""The receiving end of one incoming transfer: bytes go into the pages reserved for it, and into no
others.

The listener's threads ask it for buffers, so everything that it needs is fixed when it is made. A
sender's manifest must be exactly what was granted, each token and state once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prfaas.cache.storage.places import PageTable, segment_ranges
from prfaas.errors import InputError
from prfaas.kvd.store import Storage
from prfaas.kvd.transfers.manifest import RequiredState, mismatch
from prfaas.kvspec import Segment, segment_bytes
from prfaas.transport.buffers import FileSlice
from prfaas.transport.messages import Manifest


class PageReceiver:
    """A transport `Receiver`. `on_end` is called once, from one of the listener's threads, with the
    reason of a failure, or with None when every byte is in place."""

    def __init__(
        self,
        storage: Storage,
        table: PageTable,
        required: RequiredState,
        on_end: Callable[[str | None], None],
    ) -> None:
        self._storage = storage
        self._table = table
        self._required = required
        self._on_end = on_end
        self.tail = b""  # the sender's hash of the tokens after the last whole block

    def buffers(self, manifest: Manifest) -> Sequence[Sequence[FileSlice]] | str:
        """For each segment of the manifest its memory; or the reason to refuse the manifest."""
        spec, arena = self._storage.spec, self._storage.arena
        try:
            segments = [Segment.parse(entry.name) for entry in manifest.segments]
            for segment, entry in zip(segments, manifest.segments, strict=True):
                size = segment_bytes(spec, segment)
                if entry.nbytes != size:
                    return f"{entry.name}: {entry.nbytes} bytes, {size} are expected"
            problem = mismatch(spec, self._required, segments)
            if problem is not None:
                return problem
            self.tail = manifest.label
            return [
                [
                    FileSlice(arena.view(start, stop), self._storage.fd, start)
                    for start, stop in segment_ranges(
                        spec, self._storage.block_tokens, arena, segment, self._table.get
                    )
                ]
                for segment in segments
            ]
        except InputError as error:
            return str(error)

    def committed(self) -> None:
        self._on_end(None)

    def ended(self, reason: str) -> None:
        self._on_end(reason)
