"""An owner of receiving memory that lies in a file, as a kvd's arena does."""

from __future__ import annotations

import mmap
import os

from prfaas.transport.buffers import FileSlice
from prfaas.transport.messages import Manifest
from tests.transport.ends import Owner


class FileOwner(Owner):
    """Each segment lies in slices of `cut` bytes, in reverse order: none of them are neighbours."""

    def __init__(self, *, cut: int = 1 << 30) -> None:
        super().__init__(cut=cut)
        self._fd = os.memfd_create("owner")
        self._region: memoryview = memoryview(b"")
        self._slices: dict[str, list[FileSlice]] = {}

    def buffers(self, manifest: Manifest) -> list[list[FileSlice]]:  # type: ignore[override]
        total = manifest.total_bytes
        os.ftruncate(self._fd, total)
        self._region = memoryview(mmap.mmap(self._fd, total))
        end = total
        for segment in manifest.segments:
            slices = self._slices[segment.name] = []
            left = segment.nbytes
            while left:
                size = min(left, self._cut)
                end -= size
                slices.append(FileSlice(self._region[end : end + size], self._fd, end))
                left -= size
        return list(self._slices.values())

    def fill(self, byte: bytes) -> None:
        self._region[:] = byte * self._region.nbytes

    @property
    def contents(self) -> dict[str, bytes]:
        return {
            name: b"".join(bytes(part.view) for part in slices)
            for name, slices in self._slices.items()
        }

    def close(self) -> None:
        os.close(self._fd)
