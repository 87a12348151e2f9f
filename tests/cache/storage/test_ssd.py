from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.cache.storage.ssd import Slot, SpillFile
from prfaas.errors import InputError


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "spill", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def unit(data: bytes) -> list[memoryview]:
    """Cut at odd places, as pages of an arena may lie."""
    view = memoryview(bytearray(data))
    return [view[:5], view[5:]]


def written(file: SpillFile, data: bytes) -> Slot:
    pages = file.take(len(data) // file.page_bytes)
    assert pages is not None
    digest = file.write(pages, unit(data))
    assert digest is not None
    return Slot(pages, digest)


def test_a_unit_comes_back_as_it_was(fd: int) -> None:
    file = SpillFile(fd, page_bytes=8, pages=4)
    slots = [written(file, data) for data in (b"a" * 16, b"b" * 8)]
    file.check([slot.pages for slot in slots])
    assert file.free_pages == 1
    for slot, data in zip(list(slots), (b"a" * 16, b"b" * 8), strict=True):
        back = unit(bytes(len(data)))
        assert file.read(slot, back)
        assert b"".join(map(bytes, back)) == data
        file.free(slot.pages)
        slots.remove(slot)
        file.check([slot.pages for slot in slots])
    assert file.free_pages == 4
    assert file.failures == 0


def test_a_full_file_takes_nothing(fd: int) -> None:
    file = SpillFile(fd, page_bytes=8, pages=1)
    assert file.take(2) is None
    taken = file.take(1)
    assert taken is not None and file.take(1) is None
    assert file.failures == 0
    file.check([taken])


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap"])
def test_damage_is_a_miss_and_said_once(
    fd: int, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = SpillFile(fd, page_bytes=8, pages=4)
    first, second = written(file, b"a" * 16), written(file, b"b" * 16)
    if damage == "flip":
        os.pwrite(fd, b"?", second.pages[1] * 8)
    elif damage == "truncate":
        os.ftruncate(fd, 20)
    else:  # a valid unit, but another one
        os.pwrite(fd, b"a" * 16, second.pages[0] * 8)
    assert file.read(first, unit(bytes(16)))
    for _ in range(2):
        assert not file.read(second, unit(bytes(16)))
    assert file.failures == 2
    assert len(caplog.records) == 1


def test_a_disk_that_refuses_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "spill"
    path.touch()
    read_only = os.open(path, os.O_RDONLY)
    try:
        file = SpillFile(read_only, page_bytes=8, pages=2)
        pages = file.take(2)
        assert pages is not None and file.write(pages, unit(bytes(16))) is None
        file.free(pages)
        assert (file.free_pages, file.failures) == (2, 1)
        file.check([])
    finally:
        os.close(read_only)


def test_nonsense_sizes_are_refused(fd: int) -> None:
    with pytest.raises(InputError):
        SpillFile(fd, page_bytes=0, pages=1)
