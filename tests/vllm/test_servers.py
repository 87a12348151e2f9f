"""Two vLLM servers, two kvds, TCP between them: the same tokens as one plain vLLM, or none."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prfaas.cache.hashing import block_hashes
from prfaas.contracts.kvd_api import spec_of
from prfaas.engine.hf import HFEngine
from prfaas.engine.hf.load import load_model
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvspec import FullAttention, Segment, SlidingWindow
from prfaas.text import load_tokenizer
from prfaas.types import BlockHash, TransferId
from prfaas_lab.testing.vllm_server import MAX_LOGPROB_DIFFERENCE, Generated, VllmServer
from tests.node.local_api import local_api
from tests.vllm.cases import (
    ALIGNED,
    BLOCK,
    BRANCH,
    LENGTHS,
    MAX_TOKENS,
    PROMPTS,
    TURNS,
    Case,
    boundary,
    case_id,
)
from tests.vllm.kvds import HttpRefusal, Kvd
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)  # servers start and stop within it

CONCURRENT = 8


def test_thirty_prompts_eight_at_a_time(case: Case) -> None:
    """Every other one is handed off at N - 1, the rest at the last boundary."""

    def answer(index: int) -> Generated:
        prompt = PROMPTS["all"][index]
        aligned = boundary(len(prompt)) if index % 2 else 0
        return case.pair.generate(prompt, aligned or len(prompt) - 1, MAX_TOKENS)

    with ThreadPoolExecutor(CONCURRENT) as threads:
        answers = list(threads.map(answer, range(len(LENGTHS))))
    expected = case.model.expected["all"]
    wrong = [
        (length, answer, plain)
        for length, answer, plain in zip(LENGTHS, answers, expected, strict=True)
        if not answer.same(plain)
    ]
    assert not wrong
    several = {tuple(answer.tokens) for answer in answers}
    assert len(several) > len(LENGTHS) // 2, "the model does not discriminate"
    wait_until(case.pair.nothing_held)


def test_one_hand_off_has_several_continuations(case: Case) -> None:
    """All equal, because vLLM on a CPU ends with an error for a seed."""
    (prompt,), (expected,) = PROMPTS["continuations"], case.model.expected["continuations"]
    params = {**case.pair.hand_off(prompt, len(prompt) - 1), "attachments": 3}
    sampled = {"temperature": 1.0, "top_k": 1, "n": 3}
    answer = case.pair.decode.complete(prompt, MAX_TOKENS, **sampled, kv_transfer_params=params)
    assert answer.status == 200, answer.body
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2]
    for choice in answer.body["choices"]:
        assert Generated(choice["token_ids"], choice["logprobs"]["token_logprobs"]).same(expected)
    wait_until(case.pair.nothing_held)
    assert case.pair.target.status(TransferId(params["transfer_id"])).state == "released"


LETTERS = list(range(ord("a"), ord("z") + 1))
TEXT = "some text, with umlauts: äöü. "
COMPARED: tuple[dict[str, Any], ...] = (
    {"prompt": TEXT, "logprobs": 2},
    {"prompt": TEXT, "echo": True, "logprobs": 2},
    {"prompt": TEXT, "echo": True, "logprobs": 0, "prompt_logprobs": 1},
    {"prompt": PROMPTS["all"][2], "prompt_logprobs": 3},
    {"prompt": PROMPTS["all"][2], "prompt_logprobs": 0, "logprobs": 1},
    {"prompt": [TEXT, TEXT * 2, "short"], "logprobs": 1},
    {"prompt": [list(TEXT.encode()), list(b"hi"), [104]], "echo": True, "logprobs": 1},
    {"prompt": TEXT, "n": 2},  # greedy: refused
    {"prompt": TEXT, "n": 0},
)


@pytest.mark.parametrize("case", [("falcon-h1", ALIGNED)], indirect=True, ids=case_id)
async def test_a_node_answers_as_vllm_does(case: Case) -> None:
    engine = HFEngine(load_model(case.model.directory), chunk_tokens=64)
    tokenizer = load_tokenizer(case.model.directory)
    assert tokenizer is not None
    async with asyncio.timeout(120), local_api(engine, tokenizer) as node:
        for fields in COMPARED:
            body = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **fields}
            body["allowed_token_ids"] = LETTERS  # an unfinished character shows here, but not there
            theirs = await asyncio.to_thread(
                case.pair.decode.post, "/v1/completions", {"model": "m", **body}
            )
            status, ours = await node.complete(**body)
            assert status == theirs.status, (ours, theirs.body)
            if status != 200:
                continue
            for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert ours["usage"][field] == theirs.body["usage"][field]
            for one, other in zip(ours["choices"], theirs.body["choices"], strict=True):
                for field in ("index", "text", "finish_reason", "stop_reason"):
                    assert one[field] == other[field], fields
                _assert_near(one["logprobs"], other["logprobs"])
                _assert_near(one.get("prompt_logprobs"), other["prompt_logprobs"])


def _assert_near(one: Any, other: Any) -> None:
    """Equal, but for the rounding of log-probabilities."""
    match one, other:
        case dict(), dict():
            assert one.keys() == other.keys()
            for key in one:
                _assert_near(one[key], other[key])
        case list(), list():
            assert len(one) == len(other)
            for mine, theirs in zip(one, other, strict=True):
                _assert_near(mine, theirs)
        case float(), float():
            assert abs(one - other) <= MAX_LOGPROB_DIFFERENCE
        case _:
            assert one == other


def test_a_second_turn_sends_only_what_is_new(case: Case) -> None:
    first, second = PROMPTS["turns"]
    expected = case.model.expected["turns"]
    whole = case.pair.hand_off(first, boundary(TURNS[0]))
    answer = case.pair.resume(first, MAX_TOKENS, whole["transfer_id"])
    computed = _computed_tokens(case.pair.prefill)
    more = case.pair.hand_off(second, boundary(TURNS[1]))
    assert case.pair.sent_bytes(whole) == case.pair.source.handoff_bytes(boundary(TURNS[0]))
    assert case.pair.sent_bytes(more) == case.pair.source.handoff_bytes(
        boundary(TURNS[1]), boundary(TURNS[0])
    )
    resumed = case.pair.resume(second, MAX_TOKENS, more["transfer_id"])
    assert answer.generated.same(expected[0]) and resumed.generated.same(expected[1])
    # The prefill side resumed too: from its own cache, its kvd's pool, or both.
    new_tokens = boundary(TURNS[1]) - boundary(TURNS[0])
    assert _computed_tokens(case.pair.prefill) - computed == new_tokens


def test_a_branch_of_a_longer_prompt_is_not_computed_again(case: Case) -> None:
    """The decode server holds attention blocks beyond the branch, but no state where it ends."""
    longer, branch = PROMPTS["branch"]
    answers = [case.pair.generate(longer, boundary(len(longer)), MAX_TOKENS)]
    cut = boundary(BRANCH[1] - 40)
    computed = _computed_tokens(case.pair.decode)
    answers.append(case.pair.generate(branch, cut, MAX_TOKENS))
    assert all(a.same(e) for a, e in zip(answers, case.model.expected["branch"], strict=True))
    assert _computed_tokens(case.pair.decode) - computed <= len(branch) - cut


@pytest.mark.parametrize("what", ["growing", "closing"])
def test_zeroed_state_changes_the_answer(case: Case, what: str) -> None:
    """The control: answers depend on full attention as well as on states and windows."""
    number = ["growing", "closing"].index(what)
    prompt, expected = PROMPTS["edges"][number], case.model.expected["edges"][number]
    params = case.pair.hand_off(prompt, boundary(len(prompt)))
    _zero(case.pair.target, prompt, boundary(len(prompt)), what)
    answer = case.pair.resume(prompt, MAX_TOKENS, params["transfer_id"]).generated
    assert not answer.same(expected)
    # Zeroed states and windows change the tokens themselves.
    assert what == "growing" or answer.tokens != expected.tokens


def test_an_engine_of_another_kind_is_refused_with_the_reason(case: Case) -> None:
    other = load_model(case.model.directory, device="cpu").compat(BLOCK)
    with pytest.raises(HttpRefusal) as refusal:
        case.pair.target.open(PROMPTS["edges"][0], 384, other)
    assert refusal.value.status == 409
    named = ("block_tokens: 64 here, 128 there", "the canonical form", "the native form")
    assert all(what in str(refusal.value) for what in named), refusal.value
    assert case.pair.target.report().incoming["granted"] == 0


def test_a_lost_transfer_is_an_error_not_an_answer(case: Case) -> None:
    prompt, expected = PROMPTS["edges"][2], case.model.expected["edges"][2]
    assert case.pair.resume(prompt, MAX_TOKENS, "no-such-transfer").status == 500
    params = case.pair.hand_off(prompt, boundary(len(prompt)))
    case.pair.target.abort(TransferId(params["transfer_id"]))
    assert case.pair.resume(prompt, MAX_TOKENS, params["transfer_id"]).status == 500
    assert case.pair.generate(prompt, len(prompt) - 1, MAX_TOKENS).same(expected)
    wait_until(case.pair.nothing_held)


def test_a_prefill_without_its_grant_is_told_so(case: Case) -> None:
    prompt = PROMPTS["edges"][3]
    grant = case.pair.grant(prompt, len(prompt) - 1)
    case.pair.target.abort(grant.transfer_id)
    case.pair.run_prefill(prompt, len(prompt) - 1, grant)
    assert case.pair.target.status(grant.transfer_id).state == "failed"
    malformed = case.pair.prefill.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
    assert malformed.transfer["error"]["code"] == "invalid_request"
    wait_until(case.pair.nothing_held)


def test_a_prompt_beyond_the_arena_is_refused_before_it_is_computed(case: Case) -> None:
    """Grants of a far larger kvd: the sender's own has no room for what it promised."""
    prompt = PROMPTS["edges"][5]
    grant = case.pair.grant(prompt, len(prompt) - 1)
    case.pair.restart_source(memory_bytes=2 << 20)
    try:
        answer = case.pair.run_prefill(prompt, len(prompt) - 1, grant)
        assert answer.transfer["error"]["code"] == "overloaded", answer.transfer
        assert answer.body["usage"]["prompt_tokens"] >= 1
        case.pair.target.abort(grant.transfer_id)
    finally:
        case.pair.restart_source()


# What the tests above look at ---------------------------------------------------------------------


def _zero(kvd: Kvd, prompt: list[int], tokens: int, what: str) -> None:
    """Overwrites the pages of a prefix through another mapping of the arena."""
    pool = kvd.pool()
    spec = spec_of(pool.groups)
    hashes: list[BlockHash] = block_hashes(prompt[:tokens], BLOCK)
    with KvdClient(
        kvd.socket,
        engine_id="control",
        spec=spec,
        block_tokens=BLOCK,
        compat=pool.compat,
        whole_blocks=True,
    ) as client:
        lease = client.pin(hashes)
        assert lease.tokens == tokens
        for group in spec.groups:
            if isinstance(group, FullAttention) is (what == "growing"):
                first = 0
                if isinstance(group, SlidingWindow):
                    first = group.first_token(tokens) // BLOCK * BLOCK
                for layer in group.layers:
                    for view in lease.views(Segment(group.name, layer, first, tokens)):
                        view[:] = bytes(len(view))
        lease.release()


def _computed_tokens(server: VllmServer) -> float:
    return server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
