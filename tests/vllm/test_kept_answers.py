"""Real servers: the next turn starts where the last answer ended, with the tokens of one server."""

from __future__ import annotations

import random

import pytest

from prfaas_lab.testing.vllm_server import VllmServer
from tests.vllm.cases import BLOCK, MAX_TOKENS, Case, boundary
from tests.vllm.kvds import Kvd
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)  # servers start and stop within it

FIRST, ANSWER, NEW = 300, 150, 100
KEPT = boundary(FIRST + ANSWER)


def prompt_of(tokens: int, name: str) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(256) for _ in range(tokens)]


def wait_until_kept(kvd: Kvd, conversation: list[int]) -> int:
    """Until the kvd has this conversation. A count of kept answers would not do: the answers of the
    tests before are kept while this test runs. Returns the length that the kvd has."""
    wait_until(lambda: kvd.matched_tokens(conversation) >= KEPT)
    return kvd.matched_tokens(conversation)


def computed_tokens(server: VllmServer) -> float:
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def test_a_second_turn_is_handed_off_from_where_the_answer_ended(case: Case) -> None:
    pair = case.pair
    first = prompt_of(FIRST, "handed-off")
    params = pair.hand_off(first, FIRST - 1)
    answer = pair.resume(first, ANSWER, params["transfer_id"]).generated.tokens
    wait_until_kept(pair.target, [*first, *answer])
    second = [*first, *answer, *prompt_of(NEW, "more")]
    # What the gateway does before the prefill: it copies the prefix to the prefill node's kvd.
    pair.source.pull(pair.target.url, second[:KEPT], "native", "")
    computed = computed_tokens(pair.prefill)
    params = pair.hand_off(second, boundary(len(second)))
    resumed = pair.resume(second, MAX_TOKENS, params["transfer_id"])
    assert computed_tokens(pair.prefill) - computed == boundary(len(second)) - KEPT
    assert pair.sent_bytes(params) == pair.source.handoff_bytes(boundary(len(second)), KEPT)
    alone = pair.decode.complete(second, MAX_TOKENS, cache_salt="alone")
    assert resumed.generated.same(alone.generated)
    wait_until(pair.nothing_held)


def test_a_second_turn_on_the_same_server_computes_what_is_new(case: Case) -> None:
    server = case.pair.decode
    first = prompt_of(FIRST, "local")
    answer = server.complete(first, ANSWER).generated.tokens
    wait_until_kept(case.pair.target, [*first, *answer])
    second = [*first, *answer, *prompt_of(NEW, "more")]
    computed = computed_tokens(server)
    resumed = server.complete(second, MAX_TOKENS).generated
    assert computed_tokens(server) - computed <= NEW + BLOCK
    assert resumed.same(server.complete(second, MAX_TOKENS, cache_salt="alone").generated)
    wait_until(case.pair.nothing_held)


def test_a_client_that_leaves_has_its_answer_kept_so_far(case: Case) -> None:
    server = case.pair.decode
    first = prompt_of(FIRST, "leaves")
    # vLLM may decode some more tokens before it notices that the client has left.
    longest = server.complete(first, 2 * ANSWER, cache_salt="alone").generated.tokens
    seen: list[int] = []
    with server.streaming(first, 2_000) as events:
        for event in events:
            seen += event["choices"][0]["token_ids"]
            if len(seen) >= ANSWER:
                break
    assert seen == longest[: len(seen)]
    kept = wait_until_kept(case.pair.target, [*first, *longest])
    second = [*first, *longest[: kept - FIRST], *prompt_of(NEW, "more")]
    computed = computed_tokens(server)
    resumed = server.complete(second, MAX_TOKENS).generated
    assert computed_tokens(server) - computed <= NEW + BLOCK
    assert resumed.same(server.complete(second, MAX_TOKENS, cache_salt="alone").generated)
    wait_until(case.pair.nothing_held)
