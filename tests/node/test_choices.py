"""Several choices in one response: continuations of a prompt, several prompts, both endpoints."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.contracts.kv_transfer_params import RemotePrefill
from prfaas.engine.api import (
    Event,
    Finished,
    JobFailed,
    Prefilled,
    PromptLogprobs,
    Sampling,
    Token,
)
from prfaas.engine.hf import HFEngine
from prfaas.node.choices import RunningChoices, continuation_sampling
from prfaas.node.errors import request_error
from prfaas.node.job_builder import TokenizedRequest
from prfaas.node.logprobs import LogprobsReader, prompt_logprobs
from prfaas.node.request_runner import ActiveRequest, EmitEvent
from prfaas.types import TransferId
from tests.engine.hf import models
from tests.node.local_api import BYTES, LocalApi, local_api, pieces
from tests.waiting import HANG_S

PROMPT = models.prompt("qwen3", 30)
SAMPLED: dict[str, Any] = {
    **{"prompt": PROMPT, "temperature": 1.0, "seed": 11, "max_tokens": 6, "ignore_eos": True},
    **{"return_token_ids": True, "skip_special_tokens": False},
}
CHAT: dict[str, Any] = {
    **{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True},
    **{"seed": 5, "n": 3, "skip_special_tokens": False, "return_token_ids": True},
}


@asynccontextmanager
async def node_server(**options: Any) -> AsyncIterator[LocalApi]:
    engine = HFEngine(models.loaded("qwen3"), chunk_tokens=64, **options)
    async with asyncio.timeout(HANG_S), local_api(engine, BYTES) as node:
        yield node


async def choices(node: LocalApi, **fields: Any) -> list[dict[str, Any]]:
    status, answer = await node.complete(**{**SAMPLED, **fields})
    assert status == 200, answer
    found: list[dict[str, Any]] = answer["choices"]
    assert [choice["index"] for choice in found] == list(range(len(found)))
    return found


def joined(parts: Sequence[dict[str, Any]], index: int) -> tuple[str, list[int], str]:
    own = [part for part in parts if part["index"] == index]
    text = "".join(part["text"] for part in own)
    return text, [id for part in own for id in part["token_ids"]], own[-1]["finish_reason"]


async def test_each_continuation_has_the_seed_after_the_one_before() -> None:
    async with node_server() as node:
        alone = [(await choices(node, seed=11 + n))[0] for n in range(3)]
        assert len({tuple(one["token_ids"]) for one in alone}) == 3
        status, answer = await node.complete(**SAMPLED, n=3)
        assert status == 200
        assert [one["token_ids"] for one in answer["choices"]] == [
            one["token_ids"] for one in alone
        ]
        assert answer["usage"]["prompt_tokens"] == 30
        assert answer["usage"]["completion_tokens"] == 18
        assert answer["usage"]["total_tokens"] == 48


OTHERS: tuple[dict[str, Any], ...] = (
    {"prompt": PROMPT[:9], "temperature": 0.0, "max_tokens": 5},
    {"prompt": PROMPT[:20], "temperature": 0.7, "max_tokens": 9, "n": 2, "top_k": 20},
    {
        "prompt": [PROMPT[:12], PROMPT[5:]],
        "max_tokens": 7,
        "repetition_penalty": 1.2,
        "logprobs": 2,
    },
    {"prompt": PROMPT, "seed": 1, "prompt_logprobs": 2},
)


@pytest.mark.slow
@given(st.integers(-5, 2**62), st.integers(2, 4), st.lists(st.sampled_from(OTHERS), max_size=3))
@settings(max_examples=8, deadline=None)
def test_seeded_choices_do_not_depend_on_other_requests(
    seed: int, n: int, others: list[dict[str, Any]]
) -> None:
    async def play() -> None:
        async with node_server() as node:
            beside = [asyncio.create_task(node.complete(**other)) for other in others]
            together = await choices(node, seed=seed, n=n)
            again = await choices(node, seed=seed, n=n)
            for status, answer in await asyncio.gather(*beside):
                assert status == 200, answer
        assert seed == -1 or together == again

    asyncio.run(play())


async def test_prompts_have_their_choices_one_after_another() -> None:
    async with node_server(max_running=2) as node:  # not all at once
        prompts = [PROMPT[:7], PROMPT[3:]]
        alone = [
            (await choices(node, prompt=prompt, seed=11 + n))[0]
            for prompt in prompts
            for n in range(2)
        ]
        both = await choices(node, prompt=prompts, n=2)
        for one, other in zip(both, alone, strict=True):
            assert {**one, "index": 0} == other
        fields = {**SAMPLED, "prompt": prompts, "n": 2, "stream_options": {"include_usage": True}}
        *streamed, last = await node.stream(**fields)
        parts = [piece["choices"][0] for piece in streamed]
        for one in both:
            index = one["index"]
            assert joined(parts, index) == (one["text"], one["token_ids"], "length")
        assert last["choices"] == [] and last["usage"]["prompt_tokens"] == 7 + 27
        assert last["usage"]["completion_tokens"] == 24
        texts = await choices(node, prompt=["some text", "another"], echo=True)
        assert [one["text"][:7] for one in texts] == ["some te", "another"]
        async with node.http.post("/v1/completions/render", json=fields) as response:
            rendered = await response.json()
        assert [one["token_ids"] for one in rendered] == prompts
        assert {one["sampling_params"]["n"] for one in rendered} == {2}


async def test_chats_have_several_choices() -> None:
    async with node_server() as node:
        async with node.http.post("/v1/chat/completions", json=CHAT) as response:
            whole = await response.json()
        assert len({tuple(one["token_ids"]) for one in whole["choices"]}) == 3
        body = {**CHAT, "stream": True}
        async with node.http.post("/v1/chat/completions", json=body) as response:
            parts = [piece["choices"][0] for piece in await pieces(response)]
        for one in whole["choices"]:
            own = [part for part in parts if part["index"] == one["index"]]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(part["delta"]["content"] for part in own)
            assert text == one["message"]["content"]
            assert own[-1]["finish_reason"] == one["finish_reason"] == "length"


async def test_a_choice_that_stops_does_not_end_the_others() -> None:
    async with node_server() as node:
        fields = {"n": 4, "max_tokens": 8, "allowed_token_ids": list(range(97, 107))}
        stopped = await choices(node, **fields, stop="c")
        free = await choices(node, **fields)
        reasons = set()
        for one, whole in zip(stopped, free, strict=True):
            assert one["text"] == whole["text"].partition("c")[0]
            reasons.add(one["finish_reason"])
        assert "stop" in reasons
        parts = await node.stream(**{**SAMPLED, **fields, "stop": "c"})
        for one in stopped:
            found = joined([part["choices"][0] for part in parts], one["index"])
            assert (found[0], found[2]) == (one["text"], one["finish_reason"])


async def test_a_client_that_leaves_ends_every_choice() -> None:
    async with node_server(max_running=2) as node:
        body = {**SAMPLED, "n": 8, "max_tokens": 4000, "stream": True}
        async with node.http.post("/v1/completions", json=body) as response:
            await response.content.readany()
        await node.runner.drain(HANG_S)  # returns when no request is left


async def test_a_failure_of_one_choice_fails_the_request() -> None:
    async with node_server() as node:
        # Whose second token cannot be chosen.
        fields: dict[str, Any] = {"allowed_token_ids": [65], "bad_words": ["AA"], "n": 3}
        status, answer = await node.complete(**{**SAMPLED, **fields})
        assert (status, answer["error"]["code"]) == (500, "engine_failed")
        streamed = await node.stream(**{**SAMPLED, **fields})
        assert streamed[-1]["error"]["code"] == "engine_failed"


async def test_the_card_lists_what_is_served() -> None:
    async with node_server() as node, node.http.get("/v1/models") as response:
        serves = (await response.json())["data"][0]["prfaas"]["serves"]
    assert {"n", "prompt", "prompt_logprobs", "echo", "user"} <= set(serves["completions"])
    assert {"n", "messages", "top_logprobs"} <= set(serves["chat"])
    assert "messages" not in serves["completions"] and "prompt" not in serves["chat"]


# Log-probabilities of prompts ---------------------------------------------------------------------


def model_logprobs(prompt: list[int]) -> np.ndarray[Any, Any]:
    """[tokens - 1, vocab]"""
    with torch.inference_mode():
        logits = models.loaded("qwen3").model(torch.tensor([prompt])).logits[0, :-1]
    found: np.ndarray[Any, Any] = torch.log_softmax(logits.float(), dim=-1).numpy()
    return found


async def test_log_probabilities_of_the_prompt() -> None:
    wanted = model_logprobs(PROMPT)
    async with node_server() as node:
        first, second = await choices(node, prompt_logprobs=2, n=2)
        assert first["prompt_logprobs"] == second["prompt_logprobs"]
        nothing, *rest = first["prompt_logprobs"]
        assert nothing is None and len(rest) == 29
        for row, token, shown in zip(wanted, PROMPT[1:], rest, strict=True):
            assert next(iter(shown)) == str(token)
            assert {str(id) for id in row.argsort()[-2:]} | {str(token)} == set(shown)
            for id, one in shown.items():
                assert one.keys() == {"logprob", "rank", "decoded_token"}
                assert abs(one["logprob"] - row[int(id)]) < 1e-4
                assert one["rank"] == (row >= row[int(id)]).sum()
                assert isinstance(one["decoded_token"], str)
        bare = (await choices(node, prompt_logprobs=0, detokenize=False))[0]["prompt_logprobs"]
        assert [len(one) for one in bare[1:]] == [1] * 29
        assert bare[1][str(PROMPT[1])]["decoded_token"] is None
        (plain,) = await choices(node)
        assert "prompt_logprobs" not in plain
        chat = {**CHAT, "prompt_logprobs": 1}
        async with node.http.post("/v1/chat/completions", json=chat) as response:
            answer = await response.json()
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert "prompt_logprobs" not in answer["choices"][0]


async def test_echo_shows_the_log_probabilities_of_the_prompt_before_those_of_the_answer() -> None:
    text = "some text with ä and more"
    fields: dict[str, Any] = {"prompt": text, "echo": True, "logprobs": 1}
    fields |= {"allowed_token_ids": list(range(97, 123))}
    async with node_server() as node:
        (whole,) = await choices(node, **fields)
        shown, count = whole["logprobs"], len(text.encode())
        assert {len(values) for values in shown.values()} == {count + 6}
        assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
        assert "".join(shown["tokens"]) == whole["text"]
        lengths = [0, *map(len, shown["tokens"])]
        assert shown["text_offset"] == list(itertools.accumulate(lengths))[:-1]
        found = model_logprobs(list(text.encode()))
        wanted = [row[id] for row, id in zip(found, text.encode()[1:], strict=True)]
        assert np.abs(np.array(shown["token_logprobs"][1:count]) - wanted).max() < 1e-4
        assert len(whole["prompt_logprobs"]) == count
        parts = [piece["choices"][0] for piece in await node.stream(**{**SAMPLED, **fields})]
        for field, values in shown.items():
            streamed = [part["logprobs"][field] for part in parts if part["logprobs"] is not None]
            assert [one for some in streamed for one in some] == values
        (alone,) = await choices(node, **fields, max_tokens=0)
        assert alone["text"] == text and len(alone["logprobs"]["tokens"]) == count


async def test_a_response_has_a_bounded_number_of_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prfaas.node.request_reader.MAX_PROMPT_LOGPROBS", 200)
    async with node_server() as node:
        await choices(node, prompt=[PROMPT, PROMPT], prompt_logprobs=2)
        for fields in ({"prompt": [PROMPT] * 3}, {"prompt": [PROMPT] * 2, "n": 2}):
            status, answer = await node.complete(**{**SAMPLED, **fields, "prompt_logprobs": 2})
            assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


def test_prompt_logprobs_have_vllms_form() -> None:
    values = np.array([[-0.5, -1.0], [-0.25, -np.inf]], np.float32)
    found = PromptLogprobs(
        np.array([-1.0, -2.0], np.float32),
        np.array([2, 9], np.int32),
        np.array([[5, 6], [5, 7]], np.int32),
        values,
    )
    listed = prompt_logprobs([4, 6, 8], found, lambda token, context: f"{token}{list(context)}")
    assert listed == [
        None,
        {
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": "6[4]"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "5[4]"},
        },
        {
            "8": {"logprob": -2.0, "rank": 9, "decoded_token": "8[4, 6]"},
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": "5[4, 6]"},
            "7": {"logprob": -9999.0, "rank": 2, "decoded_token": "7[4, 6]"},
        },
    ]
    entries = LogprobsReader(lambda token, context: f"{token}", 1).prompt_entries([4, 6, 8], found)
    assert [entry.text for entry in entries] == ["4", "6", "8"]
    assert entries[2].ranked == (("8", -2.0), ("5", -0.25))


# Which choices run when ---------------------------------------------------------------------------


def test_seeds_of_continuations() -> None:
    assert continuation_sampling(Sampling(seed=7), 3).seed == 10
    for random in (None, -1):
        assert continuation_sampling(Sampling(seed=random), 3).seed == random
    # -1 would mean no seed.
    assert continuation_sampling(Sampling(seed=-3), 2).seed == 2**64 - 1
    torch.Generator().manual_seed(2**64 - 1)


class Started:
    """A runner whose requests do what a test says."""

    def __init__(self) -> None:
        self.emits: dict[str, EmitEvent] = {}
        self.cancelled: list[str] = []
        self.most = 0

    def start(
        self, request: TokenizedRequest, emit: EmitEvent, *, is_part: bool = False
    ) -> ActiveRequest:
        assert is_part == bool(request.id != "0")
        self.emits[request.id] = emit
        self.most = max(self.most, len(self.emits))
        return ActiveRequest(request, emit, 0.0, self.cancelled.append)


def planned(prompts: int, n: int, transfer: RemotePrefill | None = None) -> list[TokenizedRequest]:
    return [
        TokenizedRequest(f"{index}", [1], Sampling(), transfer=transfer, continuation=index % n)
        for index in range(prompts * n)
    ]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.data())
@settings(max_examples=50, deadline=None)
def test_every_choice_runs_once_after_its_prompt_is_computed(
    prompts: int, n: int, together: int, data: st.DataObject
) -> None:
    async def play() -> None:
        started = Started()
        running = RunningChoices(
            started.start, planned(prompts, n), continuations=n, together=together
        )
        stages: dict[str, int] = {}
        script: list[Event] = [Prefilled(0, 1, 0), Token(1), Finished("length")]
        ends = 0
        while ends < prompts * n:
            for id in started.emits:
                first = str(int(id) // n * n)
                assert id == first or stages.get(first, 0) >= 1, "its prompt is not computed"
            id = data.draw(st.sampled_from(sorted(started.emits)))
            emit, stage = started.emits[id], stages.get(id, 0)
            if stage == len(script) - 1:
                del started.emits[id]
            emit(script[stage])
            assert await running.next() == (int(id), script[stage])
            stages[id] = stage + 1
            ends += stage == len(script) - 1
        assert not started.emits and len(stages) == prompts * n
        assert started.most <= together

    asyncio.run(play())


async def test_continuations_of_a_hand_off_start_at_once() -> None:
    started = Started()
    transfer = RemotePrefill(TransferId("t"), attachments=3)
    running = RunningChoices(started.start, planned(1, 3, transfer), continuations=3, together=1)
    assert list(started.emits) == ["0", "1", "2"]
    running.stop(1)
    started.emits["1"](JobFailed(request_error("draining", "cancelled")))
    started.emits["2"](Prefilled(0, 1, 0))
    assert (await running.next()).choice == 2, "a choice that was stopped says nothing"
    running.abort()
    assert started.cancelled == ["1", "0", "2"]
