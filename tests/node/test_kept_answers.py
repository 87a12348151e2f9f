"""The next turn of a conversation resumes where the answer ended, after hand-offs and without."""

from __future__ import annotations

import http.client
import json
import random
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.api import KeepAnswer, Sampling
from prfaas.node.job_builder import JobBuilder, TokenizedRequest
from tests.node.conftest import EMULATED
from tests.node.hosts import START_S, Gateway, Host, cached_of, running_hosts, text_of, tokens_of
from tests.node.local_api import AbsentKvd
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(2 * START_S)  # hosts start within it

BLOCK = 64


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(f"{tokens} {seed}").choices(range(32, 127), k=tokens)


def counted(host: Host, name: str) -> int:
    for line in text_of(f"{host.url}/metrics").splitlines():
        if line.startswith(f"prfaas_node_{name}_total"):
            return int(float(line.rsplit(" ", 1)[1]))
    raise AssertionError(name)


def complete(host: Host, ids: Sequence[int], tokens: int, **fields: Any) -> dict[str, Any]:
    """Returns when the answer is kept as well, or is not going to be."""
    before = counted(host, "kept_answers") + counted(host, "unkept_answers")
    answer = host.complete(list(ids), max_tokens=tokens, ignore_eos=True, **fields)
    wait_until(lambda: counted(host, "kept_answers") + counted(host, "unkept_answers") > before)
    host.wait_until_idle()
    return answer


def test_every_turn_starts_where_the_answer_ended(emulated: Gateway) -> None:
    """The emulated engine checks every byte that it resumes from."""
    host = emulated.decode_host
    ids, salt = prompt(100), "turns"
    for turn in range(3):
        answer = complete(host, ids, 150, cache_salt=salt)
        if turn:
            assert cached_of(answer) == (len(ids) - 31) // BLOCK * BLOCK
        ids += [*tokens_of(answer), *prompt(30, turn)]
    assert host.stats()["pool"]["counters"]["kept_answers"] >= 3
    other = host.complete(ids, max_tokens=1, cache_salt="another tenant")
    assert cached_of(other) == 0


def test_an_answer_that_the_pool_already_has_is_no_failure(emulated: Gateway) -> None:
    host = emulated.decode_host
    ids, before = prompt(90, seed=11), counted(host, "unkept_answers")
    first, again = (complete(host, ids, 150, cache_salt="again") for _ in range(2))
    assert tokens_of(first) == tokens_of(again)
    assert counted(host, "unkept_answers") == before
    assert cached_of(host.complete([*ids, *tokens_of(first), 33], max_tokens=1, cache_salt="again"))


def test_the_answer_to_a_short_prompt_is_kept(emulated: Gateway) -> None:
    host = emulated.decode_host
    ids = prompt(5)
    answer = complete(host, ids, 100)
    ids += [*tokens_of(answer), 33]
    assert cached_of(host.complete(ids, max_tokens=1)) == BLOCK


def test_what_a_client_has_left_is_kept_up_to_where_it_came(emulated: Gateway) -> None:
    host = emulated.decode_host
    ids = prompt(120, seed=7)
    before = counted(host, "kept_answers")
    address = urllib.parse.urlsplit(host.url)
    connection = http.client.HTTPConnection(address.netloc, timeout=START_S)
    body = {"prompt": ids, "max_tokens": 5000, "stream": True, "return_token_ids": True}
    connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}))
    tokens: list[int] = []
    answer = connection.getresponse()
    while len(tokens) < 20:
        line = answer.readline()
        if line.startswith(b"data: {"):
            tokens += json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]
    answer.close()
    connection.close()
    wait_until(lambda: counted(host, "kept_answers") > before)
    host.wait_until_idle()
    # 120 tokens and at least 20 more: the boundary at 128 was passed.
    asked = host.complete([*ids, *tokens], max_tokens=1)
    assert cached_of(asked) == 128


@pytest.mark.slow
def test_without_a_kvd_no_answer_is_kept_and_none_is_lost(tmp_path: Path) -> None:
    with running_hosts(tmp_path, {"host": EMULATED}) as (host,):
        host.kvd.kill()
        answer = host.complete(prompt(100), max_tokens=100, ignore_eos=True)
        assert len(tokens_of(answer)) == 100
        host.start_kvd()
        ids = prompt(100, seed=1)
        wait_until(lambda: bool(host.stats()["engines"]))
        answer = complete(host, ids, 100)
        ids += tokens_of(answer)
        assert cached_of(host.complete(ids, max_tokens=1)) == len(ids[:-1]) // BLOCK * BLOCK
        host.wait_until_idle()


def test_a_node_may_keep_none() -> None:
    request = TokenizedRequest("1", prompt(5), Sampling())
    none = JobBuilder(AbsentKvd(), BLOCK, keeps_answers=False).prepare(request).job
    kept = JobBuilder(AbsentKvd(), BLOCK, keeps_answers=True).prepare(request).job
    assert none is not None and none.keep is None
    assert kept is not None and kept.keep == KeepAnswer(0)


def test_a_hand_off_skips_what_the_decode_node_has_generated(emulated: Gateway) -> None:
    host = emulated.decode_host
    ids, salt = prompt(150, seed=3), "handed off"
    for turn in range(3):
        before = counted(host, "kept_answers")
        handed = emulated.hand_off(ids, max_tokens=80, resumable=True, salt=salt)
        assert len(handed.tokens) == 80
        wait_until(lambda before=before: counted(host, "kept_answers") > before)
        host.wait_until_idle()
        if turn:
            assert handed.skip_tokens == (len(ids) - 31) // BLOCK * BLOCK
        ids = [*ids, *handed.tokens, *prompt(30, seed=turn)]
