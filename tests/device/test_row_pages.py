"""Rows over pages that end anywhere; a rank writes its own columns and no other byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.device.row_pages import page_range, readable_rows, writable_rows
from prfaas.errors import EngineError
from tests.integrations.canonical.caches import Pages


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[int, int, Pages]:
    rows, row_bytes = draw(st.integers(0, 9)), draw(st.integers(1, 24))
    cuts = draw(st.lists(st.integers(0, rows * row_bytes), max_size=12))
    return rows, row_bytes, Pages(rows * row_bytes, cuts, draw(st.integers(0, 3)))


def content_of(rows: int, row_bytes: int) -> torch.Tensor:
    return (torch.arange(rows * row_bytes) % 251).to(torch.uint8).view(rows, row_bytes)


@settings(max_examples=120, deadline=None)
@given(laid_out(), st.sampled_from([1, 2, 4]))
def test_reading(layout: tuple[int, int, Pages], alignment: int) -> None:
    rows, row_bytes, pages = layout
    expected = content_of(rows, row_bytes)
    pages.content = bytes(expected.numpy())
    at = 0
    for first, run in readable_rows(pages.views, rows, row_bytes, alignment):
        assert first == at
        assert torch.equal(run, expected[at : at + len(run)])
        at += len(run)
    assert at == rows


@settings(max_examples=120, deadline=None)
@given(laid_out(), st.sampled_from([1, 2, 4]), st.data())
def test_writing(layout: tuple[int, int, Pages], alignment: int, data: st.DataObject) -> None:
    rows, row_bytes, pages = layout
    edges = sorted(data.draw(st.lists(st.integers(0, row_bytes), min_size=4, max_size=4)))
    columns = [range(edges[0], edges[1]), range(edges[2], edges[3])]
    new = content_of(rows, row_bytes)
    pages.fill(0xEE)
    expected = torch.full((rows, row_bytes), 0xEE, dtype=torch.uint8)
    for column in columns:
        expected[:, column.start : column.stop] = new[:, column.start : column.stop]
    for first, run in writable_rows(pages.views, rows, row_bytes, columns, alignment):
        for column in columns:
            own = slice(column.start, column.stop)
            run[:, own] = new[first : first + len(run), own]
    assert pages.content == bytes(expected.numpy())
    assert pages.guards_are_whole()


def test_whole_rows_of_a_page_are_not_copied() -> None:
    pages = Pages(6 * 8, [16, 36])
    runs = list(readable_rows(pages.views, 6, 8, 1))
    assert [(first, len(run)) for first, run in runs] == [(0, 2), (2, 2), (4, 1), (5, 1)]
    memory = [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in pages.views]
    assert runs[0][1].data_ptr() == memory[0] and runs[1][1].data_ptr() == memory[1]


@pytest.mark.parametrize("rows", [3, 5])
def test_pages_of_another_size_are_refused(rows: int) -> None:
    with pytest.raises(EngineError, match=f"{rows} rows of 8 bytes"):
        list(readable_rows(Pages(32, [9]).views, rows, 8, 1))


def test_read_only_pages_can_be_read_and_not_written() -> None:
    page = memoryview(bytes(range(16)))
    (_, run), *rest = readable_rows([page], 2, 8, 1)
    assert run.flatten().tolist() == list(range(16)) and not rest
    with pytest.raises(EngineError, match="read-only"):
        list(writable_rows([page], 2, 8, [range(8)], 1))


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 40), st.integers(0, 40))
def test_a_range_of_pages(cuts: list[int], first: int, last: int) -> None:
    pages = Pages(40, cuts)
    pages.content = bytes(range(40))
    found = b"".join(page_range(pages.views, first, last))
    assert found == bytes(range(40))[first:last]
