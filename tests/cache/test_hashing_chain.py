from __future__ import annotations

import hashlib
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.hashing import PromptHashes, block_hashes, chain_seed, tail_hash, token_bytes
from prfaas.errors import InputError
from tests.cache.builders import SEEDED

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@SEEDED
@given(TOKENS, st.integers(1, 8))
def test_the_chain_is_what_it_says(tokens: list[int], size: int) -> None:
    last = chain_seed(size, salt="s", adapter="a")
    expected = []
    for start in range(0, len(tokens) // size * size, size):
        data = b"".join(t.to_bytes(4, "little") for t in tokens[start : start + size])
        last = hashlib.sha256(last + data).digest()  # type: ignore[assignment]
        expected.append(last)
    assert block_hashes(tokens, size, salt="s", adapter="a") == expected


@SEEDED
@given(TOKENS)
def test_every_container_gives_the_same_bytes(tokens: list[int]) -> None:
    expected = token_bytes(tokens)
    assert token_bytes(tuple(tokens)) == expected
    assert token_bytes(array("I", tokens)) == expected
    assert token_bytes(array("Q", tokens)) == expected
    for dtype in ("<u4", ">u4", np.int64, np.uint64):
        assert token_bytes(np.array(tokens, dtype=dtype)) == expected
    assert token_bytes(np.array([*tokens, *tokens], dtype=np.uint32)[::2]) == token_bytes(
        [*tokens, *tokens][::2]
    )


@pytest.mark.parametrize(
    "bad",
    [
        [-1],
        [2**32],
        ["a"],
        [1.5],
        np.array([-1]),
        np.array([2**32]),
        np.array([1.0]),
        np.zeros((2, 2), dtype=np.uint32),
    ],
)
def test_what_is_no_token_is_refused(bad: object) -> None:
    with pytest.raises(InputError, match="not token ids"):
        token_bytes(bad)  # type: ignore[arg-type]


def test_block_sizes_below_one_are_refused() -> None:
    with pytest.raises(InputError, match="block_tokens"):
        block_hashes([1], 0)


def test_tenants_adapters_and_block_sizes_never_meet() -> None:
    tokens = list(range(8))
    names = [
        block_hashes(tokens, 4)[1],
        block_hashes(tokens, 4, salt="x")[1],
        block_hashes(tokens, 4, adapter="x")[1],
        block_hashes(tokens, 8)[0],
        block_hashes(tokens, 4, extras=[b"", b"image"])[1],
        block_hashes(tokens, 4, extras=[b"image"])[1],
        block_hashes(tokens, 4, salt="x", adapter="x")[1],
    ]
    assert len(set(names)) == len(names)
    assert (
        len({chain_seed(4), chain_seed(8), chain_seed(4, salt="x"), chain_seed(4, adapter="x")})
        == 4
    )


def test_empty_extras_change_nothing() -> None:
    assert block_hashes([1, 2], 1, extras=[b""]) == block_hashes([1, 2], 1)
    assert block_hashes([1], 1, extras=[b"", b"beyond"]) == block_hashes([1], 1)


@SEEDED
@given(TOKENS, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_can_be_continued_from_any_block(tokens: list[int], size: int, cut: int) -> None:
    whole = block_hashes(tokens, size)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else None
    assert whole[:cut] + block_hashes(tokens[cut * size :], size, parent=parent) == whole


def test_a_name_depends_on_every_token_before_it() -> None:
    tokens = list(range(12))
    names = block_hashes(tokens, 4)
    for changed in range(12):
        other = list(tokens)
        other[changed] += 100
        same = [a == b for a, b in zip(names, block_hashes(other, 4), strict=True)]
        assert same == [block < changed // 4 for block in range(3)]


@SEEDED
@given(TOKENS, st.integers(1, 8))
def test_a_tail_is_what_has_no_name(tokens: list[int], size: int) -> None:
    hashes = block_hashes(tokens, size)
    tail = tail_hash(tokens, hashes, size)
    assert bool(tail) == bool(len(tokens) % size)
    assert tail not in hashes


def test_a_tail_depends_on_every_token_and_on_the_tenant() -> None:
    def tail(tokens: list[int], **apart: str) -> bytes:
        return tail_hash(tokens, block_hashes(tokens, 4, **apart), 4, **apart)

    for length in (3, 10):
        tokens = list(range(length))
        names = {tail(tokens), tail(tokens, salt="x"), tail(tokens, adapter="x")}
        names |= {tail([*tokens[:at], 100, *tokens[at + 1 :]]) for at in range(length)}
        names |= {tail([*tokens, 100]), tail(tokens[:-1])}
        assert len(names) == 5 + length


def test_prompt_hashes_at_several_sizes() -> None:
    tokens = list(range(50))
    prompt = PromptHashes(tokens, salt="t", adapter="a")
    assert prompt.tokens == 50
    for size in (4, 16, 4):
        assert prompt.at(size) == block_hashes(tokens, size, salt="t", adapter="a")
    assert prompt.at(4) is prompt.at(4)
    part = prompt.prefix(33)
    assert part.tokens == 33
    assert part.at(4) == prompt.at(4)[:8]
    assert part.at(11) == block_hashes(tokens[:33], 11, salt="t", adapter="a")
