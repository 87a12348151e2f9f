"""vLLM servers behind the gateway: the tokens are those of one plain vLLM, also while the prefill
server is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import pytest

from prfaas.config.address import Address, parse_address
from prfaas.errors import RequestError
from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.gateway.request import RequestTrace
from prfaas.text import Chat, load_tokenizer
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.gateway.backends import (
    answered,
    deployment,
    gateway_request,
    in_use,
    is_clean,
    serving,
    until,
)
from tests.vllm.cases import ALIGNED, MAX_TOKENS, PROMPTS, UNCACHED, Case, boundary, case_id
from tests.waiting import PATIENCE_S, wait_until

AT_ONCE = 8
# While the decode server lives, every request is answered long before a gateway or a client gives
# up on it. On calm cores the first one, which meets the dead server, takes a second.
ANSWER_S = 40.0
MESSAGES = [{"role": "user", "content": "Why is the sky blue? " * 30}]
pytestmark = [
    pytest.mark.timeout(900),  # servers start and stop within it
    pytest.mark.parametrize(
        "case",
        [pytest.param(("falcon-h1", UNCACHED), marks=pytest.mark.grid), ("falcon-h1", ALIGNED)],
        indirect=True,
        ids=case_id,
    ),
]


def behind(case: Case, *, policy: str = "remote", far: dict[str, str] | None = None) -> Any:
    """The prefill server far away, the decode server at home, which has no prefill node beside
    it. `far`: other addresses of the prefill server and its kvd."""
    pair = case.pair
    home = {"url": pair.decode.url, "kvd_url": pair.target.url}
    far = far or {"url": pair.prefill.url, "kvd_url": pair.source.url}
    return serving(deployment([home], [far], prefill=0, policy=policy))


async def test_thirty_prompts_eight_at_once(case: Case) -> None:
    expected = [generated.tokens for generated in case.model.expected["all"]]

    async def one(backend: GatewayBackend, ids: list[int], turn: asyncio.Semaphore) -> list[int]:
        async with turn:
            asked = gateway_request(ids, MAX_TOKENS, salt="thirty")
            found = await answered(
                backend, replace(asked, fields={**asked.fields, "ignore_eos": True})
            )
            assert found.trace.offloaded and found.trace.attempts == 1
            assert found.trace.form == "native"  # the servers are equal
            return found.tokens

    async with behind(case) as backend:
        turn = asyncio.Semaphore(AT_ONCE)
        tokens = await asyncio.gather(*(one(backend, ids, turn) for ids in PROMPTS["all"]))
        await until(lambda: is_clean(backend))
    assert list(tokens) == expected
    await asyncio.to_thread(wait_until, case.pair.nothing_held)


async def test_a_field_that_vllm_refuses_costs_no_prefill(case: Case) -> None:
    async with behind(case) as backend:
        asked = gateway_request(PROMPTS["all"][0], MAX_TOKENS, salt="refused")
        trace = RequestTrace(0.0)
        with pytest.raises(RequestError, match="min_p") as refused:
            async with backend.answer(replace(asked, fields={**asked.fields, "min_p": 5.0}), trace):
                pass
        assert refused.value.status == 400 and trace.granted_s is None
        await until(lambda: is_clean(backend))


async def test_a_chat_is_rendered_here_as_the_engine_renders_it(case: Case) -> None:
    """Its state is computed from our tokens and continued by vLLM's chat endpoint from its own: a
    difference would be refused there."""
    ids = load_tokenizer(case.model.directory).encode_chat(Chat(messages=MESSAGES))
    fields = {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0.0}

    async with behind(case) as backend:
        asked = replace(
            gateway_request(ids, MAX_TOKENS, stream=False, salt="chat", conversation=True),
            path="/v1/chat/completions",
            token_ids=TokenIds.of(ids),
            fields=fields,
        )
        trace = RequestTrace(0.0)
        async with backend.answer(asked, trace) as upstream:
            ((body,),) = [parts async for parts in upstream.events()]
        await until(lambda: is_clean(backend))
    answer = json.loads(body)
    assert trace.offloaded and trace.attempts == 1
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == boundary(len(ids))
    plain = case.pair.decode.complete(ids, MAX_TOKENS, cache_salt="plain", ignore_eos=False)
    assert answer["choices"][0]["message"]["content"] == plain.body["choices"][0]["text"]
    await asyncio.to_thread(wait_until, case.pair.nothing_held)


@pytest.mark.parametrize("policy", ["adaptive", "paper", "remote"])
async def test_a_lost_prefill_server_costs_speed_and_no_service(case: Case, policy: str) -> None:
    """The decode server prefills for itself. Whether a process is gone or its host, the gateway
    sees connections that are reset, and refused from then on."""
    expected = [generated.tokens for generated in case.model.expected["all"]]
    numbers = count()

    async def answer(backend: GatewayBackend, within_s: float = ANSWER_S) -> RequestTrace:
        number = next(numbers) % len(expected)
        asked = gateway_request(PROMPTS["all"][number], MAX_TOKENS, salt=f"lost {policy}")
        asked = replace(asked, fields={**asked.fields, "ignore_eos": True})
        async with asyncio.timeout(within_s):
            found = await answered(backend, asked)
        assert found.tokens == expected[number]
        return found.trace

    with far_relay(case) as relay:
        engine, kvd = (f"http://{address}" for address in relay.addresses)
        async with behind(case, policy=policy, far={"url": engine, "kvd_url": kvd}) as backend:
            await answer(backend, PATIENCE_S)
            relay.outage()
            relay.cut()
            traces = [await answer(backend)]
            traces += [await answer(backend) for _ in range(3)]
            traces += await asyncio.gather(*(answer(backend) for _ in range(4)))
            assert not [trace for trace in traces if trace.offloaded]
            relay.restore()
            await until(lambda: len(in_use(backend)) == 2)
            if policy == "remote":  # with the others it depends on the lengths
                async with asyncio.timeout(PATIENCE_S):
                    while not (await answer(backend)).offloaded:
                        pass
            await until(lambda: is_clean(backend))
    await asyncio.to_thread(wait_until, case.pair.nothing_held)


@contextmanager
def far_relay(case: Case) -> Iterator[Relay]:
    """In front of the prefill server and its kvd."""
    at = [urlsplit(url).netloc for url in (case.pair.prefill.url, case.pair.source.url)]
    engine, kvd = ((Address("127.0.0.1", 0), parse_address(one, "url")) for one in at)
    with Relay(*engine, Conditions(), also=[kvd]) as relay:
        yield relay
