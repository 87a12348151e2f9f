"""Memory is registered where it is used, once, and given back."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading

import numpy as np
import pytest

from prfaas.device import PinsAhead, page_pins
from prfaas.device.page_pins import take_memory
from prfaas.errors import EngineError
from prfaas.kvspec.mapped import MappedRanges
from tests.integrations.canonical.caches import HostPins
from tests.waiting import PATIENCE_S, wait_until

PART = 4096


def pages(memory: mmap.mmap, *places: tuple[int, int]) -> list[memoryview]:
    return [memoryview(memory)[start:stop] for start, stop in places]


def test_only_parts_with_used_pages_are_registered_and_only_once() -> None:
    memory = mmap.mmap(-1, 10 * PART + 100)
    pins = HostPins(PART)
    taken = pins.take(pages(memory, (10, 20), (3 * PART - 1, 3 * PART + 1)))
    assert taken is not None
    mapping, places = taken
    base = mapping.base
    assert places.pairs() == [(base + 10, 10), (base + 3 * PART - 1, 2)]
    assert pins.registered == {base + part * PART: PART for part in (0, 2, 3)}
    assert pins.take(pages(memory, (2 * PART, 2 * PART + 1))) is not None  # no second time
    assert pins.take(pages(memory, (10 * PART, 10 * PART + 100))) is not None
    assert pins.registered[base + 10 * PART] == 100  # not beyond the mapping
    assert [mapping.next_seam(base + at) - base for at in (0, PART - 1, PART)] == [
        PART,
        PART,
        2 * PART,
    ]
    pins.release()
    assert pins.registered == {}


def test_an_arena_that_was_left_is_given_back_when_no_copy_uses_it() -> None:
    old, new, newest = (mmap.mmap(-1, PART) for _ in range(3))
    pins = HostPins(PART)
    first = pins.take(pages(old, (0, 1)))
    second = pins.take(pages(new, (0, 1)))
    assert first is not None and second is not None
    assert set(pins.registered) == {first[0].base, second[0].base}  # a copy is under way
    pins.give(first[0])
    pins.give(second[0])
    third = pins.take(pages(newest, (0, 1)))
    assert third is not None
    assert set(pins.registered) == {third[0].base}


def test_memory_that_cannot_be_registered_is_not_taken() -> None:
    pins = HostPins(PART)
    memory, other = mmap.mmap(-1, PART), mmap.mmap(-1, PART)
    assert pins.take([]) is None
    assert pins.take([memoryview(bytearray(8))]) is None
    assert pins.take([*pages(memory, (0, 8)), *pages(other, (0, 8))]) is None
    assert pins.take([page.toreadonly() for page in pages(memory, (0, 8))]) is None
    assert pins.registered == {}
    pins.refuses = True
    assert pins.take(pages(memory, (0, 8))) is None
    pins.refuses = False
    assert pins.take(pages(memory, (0, 8))) is None  # one refusal is enough: no try per copy


def ranges(memory: mmap.mmap, *places: tuple[int, int]) -> MappedRanges:
    table = np.array(places, dtype=np.int64).reshape(-1, 2)
    return MappedRanges(memory, table[:, 0], table[:, 1])


def test_numbers_are_taken_as_views_are() -> None:
    memory = mmap.mmap(-1, 10 * PART)
    places = [(10, 20), (3 * PART - 1, 7 * PART + 1)]
    pins, others = HostPins(PART), HostPins(PART)
    taken, other = pins.take(ranges(memory, *places)), others.take(pages(memory, *places))
    assert taken is not None and other is not None
    assert taken[1].pairs() == other[1].pairs()
    assert pins.registered == others.registered and len(pins.registered) == 7
    for outside in ((-1, 5), (PART, 10 * PART + 1), (7, 7)):
        with pytest.raises(EngineError, match="not in their mapping"):
            pins.take(ranges(memory, outside))
    pins.give(taken[0])
    assert taken[0].users == 0


def test_parts_are_registered_ahead_of_their_use_and_no_further() -> None:
    memory = mmap.mmap(-1, 10 * PART)
    pins = HostPins(PART)
    ahead = PinsAhead(pins, 3 * PART)
    try:
        assert not ahead.wait(0)
        ahead.use(memory)
        assert ahead.wait(PATIENCE_S) and len(pins.registered) == 3
        taken = pins.take(ranges(memory, (0, 1), (PART, PART + 1)))
        assert taken is not None
        base = taken[0].base
        assert pins.registered.keys() >= {base, base + PART}
        wait_until(lambda: len(pins.registered) == 5)  # two are in use: two more
        assert not threading.Event().wait(0.05) and len(pins.registered) == 5
        pins.give(taken[0])
        other = mmap.mmap(-1, 2 * PART)
        ahead.use(other)  # the kvd was replaced
        assert ahead.wait(PATIENCE_S)
        assert sorted(pins.registered.values()) == [PART, PART]
        assert base not in pins.registered
    finally:
        ahead.stop()
    registered = dict(pins.registered)
    ahead.use(memory)
    assert not threading.Event().wait(0.05) and pins.registered == registered
    pins.release()
    assert pins.registered == {}


def test_an_arena_is_left_when_its_last_copy_ends() -> None:
    old, new = mmap.mmap(-1, PART), mmap.mmap(-1, PART)
    pins = HostPins(PART)
    first = pins.take(pages(old, (0, 1)))
    assert first is not None
    pins.adopt(new)
    assert first[0].base in pins.registered
    pins.give(first[0])
    assert pins.registered == {}


class SlowPins(HostPins):
    """Registers when it is let."""

    def __init__(self) -> None:
        super().__init__(PART)
        self.reached, self.let = threading.Event(), threading.Event()

    def _register(self, address: int, nbytes: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.let.wait(PATIENCE_S)
        return super()._register(address, nbytes)


def test_copies_go_on_while_other_parts_are_registered() -> None:
    memory = mmap.mmap(-1, 4 * PART)
    pins = SlowPins()
    ahead = PinsAhead(pins, PART)
    ahead.use(memory)
    try:
        assert pins.reached.wait(PATIENCE_S)  # part 0
        assert pins.take(ranges(memory, (PART, PART + 1))) is not None
        waiting = threading.Thread(target=pins.take, args=(ranges(memory, (0, 1)),))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()  # the part that is being registered is registered once
        pins.let.set()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
    finally:
        pins.let.set()
        ahead.stop()


def test_parts_wait_while_the_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pins, "_PACE_S", 1e-3)
    monkeypatch.setattr(page_pins, "_BUSY_PACE_S", 1e9)
    memory = mmap.mmap(-1, 4 * PART)
    pins = HostPins(PART)
    busy, asked = threading.Event(), threading.Semaphore(0)

    def is_busy() -> bool:
        asked.release()
        return busy.is_set()

    ahead = PinsAhead(pins, PART, is_busy=is_busy)
    try:
        ahead.use(memory)
        assert ahead.wait(PATIENCE_S) and len(pins.registered) == 1
        busy.set()
        taken = pins.take(ranges(memory, (0, 1)))  # one is in use, so that one more is wanted
        assert taken is not None
        for _ in range(5):
            assert asked.acquire(timeout=PATIENCE_S)
            assert len(pins.registered) == 1
        busy.clear()
        wait_until(lambda: len(pins.registered) == 2)
        pins.give(taken[0])
    finally:
        ahead.stop()


def test_a_part_that_cannot_be_registered_ahead_does_no_harm() -> None:
    memory = mmap.mmap(-1, 2 * PART)
    pins = HostPins(PART)
    pins.adopt(memory)
    pins.refuses = True
    assert not pins.register_next(memory, PART)
    pins.refuses = False
    assert pins.take(ranges(memory, (0, 1))) is not None


def test_memory_is_taken_without_changing_it() -> None:
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), 4 * mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE)
        memory[mmap.PAGESIZE] = 7
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if take_memory(address, 4 * mmap.PAGESIZE):  # Linux 5.14
            assert os.fstat(file.fileno()).st_blocks * 512 >= 4 * mmap.PAGESIZE
        assert bytes(memory) == bytes(mmap.PAGESIZE) + b"\7" + bytes(3 * mmap.PAGESIZE - 1)
        assert not take_memory(address + 1, mmap.PAGESIZE)  # not the start of a page
