"""State leaves one node and is continued by another: real processes, real models, real sockets.

The reference is the decode node alone, under a salt of its own: nothing it has cached matches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from prfaas.text import load_tokenizer
from tests.node.hosts import START_S, Gateway, Host, cached_of, tokens_of

pytestmark = pytest.mark.timeout(2 * START_S)  # hosts start within it

BLOCK, CHUNK, WINDOW, TAIL = 64, 128, 64, 128
NEW_TOKENS = 8
_SALTS = count()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(f"{tokens} {seed}").choices(range(32, 127), k=tokens)


def alone(host: Host, ids: Sequence[int]) -> list[int]:
    """One process, nothing cached."""
    answer = host.complete(
        list(ids), max_tokens=NEW_TOKENS, cache_salt=f"reference {next(_SALTS)}", ignore_eos=True
    )
    assert cached_of(answer) == 0
    return tokens_of(answer)


def check_length(pair: Gateway, length: int, seed: int = 0, *, resumable: bool = False) -> None:
    ids, salt = prompt(length, seed), f"{length} {seed}"
    handed = pair.hand_off(ids, max_tokens=NEW_TOKENS, resumable=resumable, salt=salt)
    assert handed.decode_cached == handed.handoff_tokens
    expected = alone(pair.decode_host, ids)
    assert handed.tokens == expected[: len(handed.tokens)], f"{length} tokens, seed {seed}"
    assert handed.tokens


# One token below, at and above: a block, two blocks (a chunk, the longest tail), and a hand-off at
# N - 1 after a whole chunk.
EDGES = [2, BLOCK, BLOCK + 1, CHUNK + 1, BLOCK + TAIL, BLOCK + TAIL + 1, 300]


@pytest.mark.parametrize("length", EDGES)
def test_tokens_after_a_hand_off_are_those_of_one_process(pair: Gateway, length: int) -> None:
    check_length(pair, length)


def check_edges(pair: Gateway, seed: int) -> None:
    """With an odd seed the hand-offs are resumable."""
    edges = {
        edge + off for edge in (BLOCK, CHUNK, WINDOW + 1, 3 * BLOCK, 512) for off in (-1, 0, 1)
    }
    for length in sorted(edges | {2, 3, 700, 1000}):
        check_length(pair, length, seed, resumable=bool(seed % 2))


@pytest.mark.grid
def test_every_edge(pair: Gateway) -> None:
    check_edges(pair, seed=0)


@pytest.mark.grid
@pytest.mark.parametrize("arch", ["kimi-linear", "mimo"])
@pytest.mark.parametrize("seed", range(1, 5))
def test_every_edge_with_further_prompts(
    start_pair: Callable[[str], Gateway], arch: str, seed: int
) -> None:
    check_edges(start_pair(arch), seed)


def test_a_prompt_of_one_token_goes_straight_to_the_decode_node(kimi: Gateway) -> None:
    answer = kimi.decode_host.complete([65], max_tokens=NEW_TOKENS, ignore_eos=True)
    assert tokens_of(answer) == alone(kimi.prefill_host, [65])


def concurrently(pair: Gateway, number: int) -> None:
    lengths = [100 + 3 * i for i in range(number)]  # hand-offs at and between blocks
    expected = {length: alone(pair.decode_host, prompt(length, 7)) for length in lengths}

    def hand_off(length: int) -> list[int]:
        salt = f"concurrent {number}"
        return pair.hand_off(prompt(length, 7), max_tokens=NEW_TOKENS, salt=salt).tokens

    with ThreadPoolExecutor(number) as threads:
        answers = list(threads.map(hand_off, lengths))
    for length, tokens in zip(lengths, answers, strict=True):
        assert tokens == expected[length][: len(tokens)] and tokens, length
    pair.prefill_host.wait_until_idle()
    pair.decode_host.wait_until_idle()


@pytest.mark.grid
def test_many_at_once(kimi: Gateway) -> None:
    concurrently(kimi, 6)


@pytest.mark.grid
def test_fifty_at_once(pair: Gateway) -> None:
    concurrently(pair, 50)


def test_a_second_turn_sends_only_what_is_new(pair: Gateway) -> None:
    first = prompt(330, 21)
    spec = pair.decode_host.spec()
    before = pair.decode_host.received_bytes()
    turn = pair.hand_off(first, max_tokens=NEW_TOKENS, resumable=True, salt="turns")
    boundary = turn.handoff_tokens // BLOCK * BLOCK
    # The whole prompt, and where the hand-off is not at a boundary the states of the last one.
    checkpoint = 0 if boundary == turn.handoff_tokens else spec.kv_bytes(boundary, boundary)
    received = pair.decode_host.received_bytes() - before
    assert turn.skip_tokens == 0
    assert turn.sent_bytes == received
    assert spec.kv_bytes(turn.handoff_tokens) <= received
    assert received <= spec.kv_bytes(turn.handoff_tokens) + checkpoint

    second = first + turn.tokens + prompt(100, 22)
    before = pair.decode_host.received_bytes()
    turn = pair.hand_off(second, max_tokens=NEW_TOKENS, salt="turns")
    assert turn.skip_tokens == boundary  # held by the decode side: it does not travel again
    assert turn.prefill_cached == boundary  # held by the prefill side: it is not computed again
    assert turn.sent_bytes == spec.kv_bytes(turn.handoff_tokens, boundary)
    assert pair.decode_host.received_bytes() - before == turn.sent_bytes
    expected = alone(pair.decode_host, second)
    assert turn.tokens == expected[: len(turn.tokens)]


def test_what_a_transfer_brought_serves_plain_requests_of_the_decode_node(kimi: Gateway) -> None:
    ids = prompt(BLOCK * 3 + 20, 31)
    handed = kimi.hand_off(ids, max_tokens=NEW_TOKENS, salt="kept")
    assert handed.handoff_tokens == BLOCK * 3
    more = ids + prompt(30, 32)
    answer = kimi.decode_host.complete(
        more, max_tokens=NEW_TOKENS, cache_salt="kept", ignore_eos=True
    )
    assert cached_of(answer) == BLOCK * 3
    assert tokens_of(answer) == alone(kimi.decode_host, more)


def test_what_both_sides_hold_is_neither_computed_nor_sent_again(kimi: Gateway) -> None:
    ids = prompt(BLOCK * 2 + 5, 41)
    for turn in range(2):
        handed = kimi.hand_off(ids, max_tokens=NEW_TOKENS, salt="again")
        assert handed.prefill_cached == turn * BLOCK * 2
        assert handed.tokens == alone(kimi.decode_host, ids)[: len(handed.tokens)]
    assert handed.skip_tokens == BLOCK * 2


def test_salts_keep_tenants_apart(kimi: Gateway) -> None:
    ids = prompt(BLOCK * 2 + 5, 51)
    host = kimi.decode_host
    assert cached_of(host.complete(ids, cache_salt="one")) == 0
    assert cached_of(host.complete(ids, cache_salt="one")) == BLOCK * 2
    assert cached_of(host.complete(ids, cache_salt="two")) == 0


def test_the_text_is_that_of_the_tokens(kimi: Gateway, checkpoint: Callable[[str], Path]) -> None:
    answer = kimi.decode_host.complete("Once upon a time", max_tokens=NEW_TOKENS)
    text = load_tokenizer(checkpoint("mimo")).decode(
        tokens_of(answer)
    )  # the same for all made models
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["prompt_tokens"] == len("Once upon a time")


def test_one_hand_off_has_several_continuations(kimi: Gateway) -> None:
    ids, salt = prompt(200, seed=9), "several continuations"
    sampled = {"temperature": 1.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    granted = kimi.open(ids, salt=salt)
    assert kimi.prefill(granted)[0] == 200 and kimi.state(granted) == "committed"
    answer = kimi.decode_host.complete(
        ids,
        **sampled,
        n=3,
        seed=40,
        cache_salt=salt,
        kv_transfer_params={
            **{"do_remote_prefill": True, "transfer_id": granted.transfer_id, "attachments": 3}
        },
    )
    assert answer["usage"]["prompt_tokens"] == 200
    assert answer["usage"]["completion_tokens"] == 3 * NEW_TOKENS
    assert cached_of(answer) == granted.handoff_tokens
    for index, choice in enumerate(answer["choices"]):
        alone = kimi.decode_host.complete(
            ids, **sampled, seed=40 + index, cache_salt=f"reference {next(_SALTS)}"
        )
        assert (choice["index"], choice["token_ids"]) == (index, tokens_of(alone))
    assert kimi.state(granted, 0.0) == "released"
    kimi.decode_host.wait_until_idle()


def test_continuations_of_a_plain_prompt_compute_it_once(kimi: Gateway) -> None:
    ids, host = prompt(300, seed=10), kimi.decode_host
    before = host.hit_tokens()
    answer = host.complete(
        ids, max_tokens=2, temperature=1.0, n=3, cache_salt="computed once", ignore_eos=True
    )
    assert len(answer["choices"]) == 3 and cached_of(answer) == 0
    assert host.hit_tokens() - before == 2 * 256, "the others resume after the whole blocks"
    again = host.complete(ids, max_tokens=1, cache_salt="computed once", prompt_logprobs=0)
    assert cached_of(again) == 0, "every token's log-probability is computed"
    host.wait_until_idle()
