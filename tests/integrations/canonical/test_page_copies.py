"""Pages at equal distances are copied together, and every byte is copied once."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.integrations.canonical import page_copies
from prfaas.integrations.canonical.page_copies import PageGroup, page_groups


def test_a_layer_of_neighbouring_blocks_is_one_group() -> None:
    pages = [(1_000 + 4_096 * n, 256) for n in range(100)]
    assert page_groups(pages) == [PageGroup(1_000, 256, 100, 4_096)]


def test_a_shorter_page_and_a_jump_end_a_group() -> None:
    pages = [(0, 100), (1_000, 256), (2_000, 256), (3_000, 256), (9_000, 256), (8_000, 256)]
    assert page_groups(pages) == [
        PageGroup(0, 100, 1, 100),
        PageGroup(1_000, 256, 3, 1_000),
        PageGroup(9_000, 256, 1, 256),
        PageGroup(8_000, 256, 1, 256),
    ]


def test_a_pitch_beyond_cuda_is_not_used() -> None:
    assert len(page_groups([(0, 256), (1 << 31, 256)])) == 2


@given(st.lists(st.tuples(st.integers(0, 20).map(lambda n: n * 64), st.sampled_from([32, 64]))))
def test_groups_are_the_pages_in_order(pages: list[tuple[int, int]]) -> None:
    found = [
        (group.address + n * group.pitch, group.nbytes)
        for group in page_groups(pages)
        for n in range(group.pages)
    ]
    assert found == pages


class Driver:
    """Does what CUDA's driver does with an order, on memory of the host."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, order: page_copies._Copy2D, stream: int) -> int:
        self.calls += 1
        source = order.srcHost if order.srcMemoryType == 1 else order.srcDevice
        target = order.dstHost if order.dstMemoryType == 1 else order.dstDevice
        assert {order.srcMemoryType, order.dstMemoryType} == {1, 2}
        for row in range(order.Height):
            ctypes.memmove(
                target + row * order.dstPitch, source + row * order.srcPitch, order.WidthInBytes
            )
        return 0


class Stream:
    cuda_stream = 7


@pytest.mark.parametrize("refused", [False, True])
def test_orders_to_the_driver(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """`refused`: CUDA takes no order, and the pages are copied one by one."""
    driver = Driver()
    copy = (lambda order, stream: 1) if refused else driver
    monkeypatch.setattr(page_copies, "_copy_2d", lambda: copy)
    assert ctypes.sizeof(page_copies._Copy2D) == 128
    memory = bytearray(1_000)
    starts = [10, 30, 130, 230, 330]
    sizes = [7, 40, 40, 40, 40]
    pages = [memoryview(memory)[at : at + n] for at, n in zip(starts, sizes, strict=True)]
    rows = torch.arange(1, 168).to(torch.uint8)
    page_copies.copy_pages(rows, pages, Stream(), into_pages=True)  # type: ignore[arg-type]
    assert b"".join(pages) == bytes(rows.numpy())
    assert sum(byte != 0 for byte in memory) == len(rows)
    back = torch.zeros_like(rows)
    page_copies.copy_pages(back, pages, Stream(), into_pages=False)  # type: ignore[arg-type]
    assert torch.equal(back, rows)
    assert driver.calls == (0 if refused else 4)
