import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.laid import Laid


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_slices_of_views_laid_end_to_end(sizes: list[int], data: st.DataObject) -> None:
    whole = random.Random(1).randbytes(sum(sizes))
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(whole)[at : at + size])
        at += size
    laid = Laid("x", at, views)
    offset = data.draw(st.integers(0, at - 1))
    nbytes = data.draw(st.integers(1, at - offset))
    assert b"".join(laid.slices(offset, nbytes)) == whole[offset : offset + nbytes]


def test_wider_items_are_bytes_all_the_same() -> None:
    numbers = memoryview(bytearray(range(16))).cast("I")
    assert bytes(Laid("x", 16, [numbers]).slices(3, 2)[0]) == bytes([3, 4])


@pytest.mark.parametrize("sizes", [[3], [2, 2], []])
def test_buffers_of_another_size_are_a_bug_of_ours(sizes: list[int]) -> None:
    with pytest.raises(AssertionError, match="5 bytes announced"):
        Laid("x", 5, [memoryview(bytes(size)) for size in sizes])
