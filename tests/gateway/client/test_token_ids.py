from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.client.request_body import encode_body
from prfaas.gateway.client.token_ids import LIMIT, STEP, TokenIds

SPACE = st.text(" \n\r\t", max_size=2)


@st.composite
def written(draw: st.DrawFn) -> tuple[list[int], bytes]:
    """Ids, and one of the ways to write them in JSON."""
    ids = draw(st.lists(st.integers(0, LIMIT - 1), min_size=1, max_size=20))
    items = ",".join(f"{draw(SPACE)}{one}{draw(SPACE)}" for one in ids)
    return ids, f"[{items}]".encode()


@given(written(), st.data())
def test_ids_survive_reading_and_writing(
    written: tuple[list[int], bytes], data: st.DataObject
) -> None:
    ids, text = written
    read = TokenIds.read(text)
    assert read is not None and read.array.tolist() == ids and len(read) == len(ids)
    stop = data.draw(st.integers(1, len(ids) + 1))
    for tokens in (read, TokenIds.of(ids), read.marked()):
        assert json.loads(bytes(tokens.json())) == ids
        assert json.loads(encode_body({"p": tokens.json(stop)}))["p"] == ids[:stop]


@pytest.mark.parametrize("count", [STEP - 1, STEP, STEP + 1, 3 * STEP, 3 * STEP + 7])
def test_long_prompts_are_cut_at_every_place(count: int) -> None:
    ids = [number * number % 200_000 for number in range(count)]
    tokens = TokenIds.of(ids).marked()
    for stop in {1, 2, STEP - 1, STEP, STEP + 1, 2 * STEP, 2 * STEP + 1, count - 1, count}:
        assert json.loads(bytes(tokens.json(stop))) == ids[:stop]


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "7", '"7"', "[-1]", "[1.0]", "[1e3]", "[[1]]", "[1, [2]]", '["1"]', "[true]"),
        *(f"[{LIMIT}]", f"[1, {2**63}]", f"[{10**30}]", "null", "{}"),
    ],
)
def test_other_json_is_not_read(text: str) -> None:
    json.loads(text)
    assert TokenIds.read(text.encode()) is None
