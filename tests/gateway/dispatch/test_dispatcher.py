"""Requests through the backend: real kvds and nodes, engines that check every byte they resume."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace

import pytest

from prfaas.errors import StreamBroken
from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.text import Chat, load_tokenizer
from prfaas.tracing.spans import LOST
from prfaas.types import NodeId
from tests.gateway.backends import (
    THRESHOLD,
    answered,
    gateway_request,
    in_use,
    is_clean,
    prompt,
    serving,
    tokens_of,
    until,
    with_role,
)
from tests.gateway.conftest import Hosts
from tests.node.hosts import Host

LONG, SHORT = 2 * THRESHOLD, THRESHOLD // 2


def alone(hosts: Hosts, ids: list[int], max_tokens: int = 4) -> list[int]:
    """One process that has computed everything itself."""
    answer = hosts.home[0].complete(ids, max_tokens=max_tokens, cache_salt="alone")
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


async def collect(backend: GatewayBackend, asked: GatewayRequest, trace: RequestTrace) -> list[int]:
    tokens: list[int] = []
    async with backend.answer(asked, trace) as upstream:
        async for together in upstream.events():
            tokens += [token for event in together for token in tokens_of(event)]
    return tokens


def with_use(backend: GatewayBackend, name: str) -> bool:
    return any(node["node"] == name for node in in_use(backend))


async def test_long_prompts_are_prefilled_far_away_and_short_ones_at_home(emulated: Hosts) -> None:
    async with serving(emulated.deployment()) as backend:
        (near,) = with_role(backend, "prefill")
        for ids, where, cluster in ((prompt(LONG), "far0", "far"), (prompt(SHORT), near, "pd")):
            found = await answered(backend, gateway_request(ids))
            assert found.tokens == alone(emulated, ids)
            assert (found.trace.prefill, found.trace.cluster) == (where, cluster)
            assert found.trace.decode in with_role(backend, "decode")
            assert found.trace.offloaded == (cluster == "far")
            trace = found.trace
            times = (trace.routed_s, trace.granted_s, trace.committed_s, trace.first_token_s)
            assert None not in times and list(times) == sorted(times)
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_many_at_once_with_second_turns(emulated: Hosts) -> None:
    """Every answer is that of one process."""
    offloaded: set[bool] = set()

    async def conversation(backend: GatewayBackend, seed: int) -> None:
        length = (1, 2, 70, SHORT, THRESHOLD + 1, LONG)[seed % 6]
        ids = prompt(length, seed)
        for turn in range(2):
            asked = gateway_request(
                ids, conversation=True, stream=seed % 2 == 0, salt=f"tenant {seed % 3}"
            )
            found = await answered(backend, asked)
            expected = await asyncio.to_thread(alone, emulated, ids)
            assert found.tokens == expected, f"conversation {seed}, turn {turn}"
            offloaded.add(found.trace.offloaded)
            ids = [*ids, *found.tokens, *prompt(200, seed)]

    async with serving(emulated.deployment()) as backend:
        async with asyncio.TaskGroup() as group:
            for seed in range(24):
                group.create_task(conversation(backend, seed))
        await until(lambda: is_clean(backend))
        assert backend.state()["retries"]["spent"] == 0
    assert offloaded == {True, False}
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_a_lost_remote_prefill_is_made_at_home(emulated: Hosts) -> None:
    far = emulated.far[0]

    try:
        async with serving(emulated.deployment()) as backend:
            (near,) = with_role(backend, "prefill")
            far.node.popen.send_signal(signal.SIGSTOP)
            asked, trace = gateway_request(prompt(LONG, 1)), RequestTrace(0.0)
            answering = asyncio.create_task(collect(backend, asked, trace))
            await until(lambda: trace.granted_s is not None)
            far.node.kill()
            assert await answering == alone(emulated, prompt(LONG, 1))
            assert (trace.attempts, trace.prefill, len(trace.failures)) == (2, near, 1)
            first, second = trace.courses
            assert (first.failure, first.failure_kind) == (trace.failures[0], LOST)
            assert first.committed_s is None and first.decode is None
            assert second.decode is not None and second.decode.answered_s == trace.first_token_s
            await until(lambda: is_clean(backend) and not with_use(backend, "far0"))
            # The far node does not answer: the next request is prefilled at home at once.
            found = await answered(backend, gateway_request(prompt(LONG, 2)))
            assert (found.trace.attempts, found.trace.prefill) == (1, near)
    finally:
        far.begin_node()
        far.wait_until_ready()
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_a_dead_decode_node_is_replaced_before_the_first_token(emulated: Hosts) -> None:
    far = emulated.far[0]
    lost: list[Host] = []

    try:
        async with serving(emulated.deployment()) as backend:
            expected = alone(emulated, prompt(LONG, 3))
            far.node.popen.send_signal(signal.SIGSTOP)
            asked, trace = gateway_request(prompt(LONG, 3)), RequestTrace(0.0)
            answering = asyncio.create_task(collect(backend, asked, trace))
            await until(lambda: trace.granted_s is not None)
            first = trace.decode
            lost.append(emulated.named(first))
            lost[0].node.kill()
            far.node.popen.send_signal(signal.SIGCONT)
            assert await answering == expected
            assert trace.attempts >= 2 and trace.decode != first
            await until(lambda: is_clean(backend))
    finally:
        far.node.popen.send_signal(signal.SIGCONT)
        for host in lost:
            host.begin_node()
            host.wait_until_ready()
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_behind_the_first_token_nothing_is_tried_again(emulated: Hosts) -> None:
    lost: list[Host] = []

    try:
        async with serving(emulated.deployment()) as backend:
            trace = RequestTrace(0.0)
            with pytest.raises(StreamBroken):
                async with backend.answer(
                    gateway_request(prompt(SHORT, 4), 20_000), trace
                ) as upstream:
                    async for _ in upstream.events():
                        if not lost:
                            lost.append(emulated.named(trace.decode))
                            lost[0].node.kill()
            assert trace.attempts == 1
            await until(lambda: is_clean(backend))
    finally:
        for host in lost:
            host.begin_node()
            host.wait_until_ready()
    await asyncio.to_thread(emulated.wait_until_idle)


@pytest.mark.parametrize("moment", ["prefill", "decode"])
async def test_a_client_that_leaves_takes_everything_along(emulated: Hosts, moment: str) -> None:
    far = emulated.far[0]

    try:
        async with serving(emulated.deployment()) as backend:
            asked, trace = gateway_request(prompt(LONG, 5), 20_000), RequestTrace(0.0)
            if moment == "prefill":
                far.node.popen.send_signal(signal.SIGSTOP)
            answering = asyncio.create_task(collect(backend, asked, trace))
            reached = "granted_s" if moment == "prefill" else "first_token_s"
            await until(lambda: getattr(trace, reached) is not None)
            answering.cancel()
            await asyncio.wait([answering])
            assert answering.cancelled()
            far.node.popen.send_signal(signal.SIGCONT)
            await until(lambda: is_clean(backend))
            assert trace.attempts == 1
    finally:
        far.node.popen.send_signal(signal.SIGCONT)
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_each_choice_of_an_answer_takes_a_slot_on_the_board(emulated: Hosts) -> None:
    async with serving(emulated.deployment()) as backend:
        asked, trace = gateway_request(prompt(LONG, 6), 20_000, n=3, tenant="a"), RequestTrace(0.0)
        asked.fields.update(n=3, temperature=1.0)  # type: ignore[attr-defined]
        async with backend.answer(asked, trace):
            board = backend.fleet.board
            assert board.node(NodeId(trace.decode)).active == 3
            assert board.decoding(NodeId(trace.decode)).own == {"a": 3}
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_a_prefix_is_copied_to_where_it_is_used(emulated: Hosts) -> None:
    """The first turn was prefilled far away and its state is at a decode node; the second is short
    enough for home, where the prefill node lacks it."""
    ids = prompt(LONG + 64, 9)

    async with serving(emulated.deployment()) as backend:
        first = await answered(backend, gateway_request(ids, conversation=True))
        again = gateway_request([*ids, *first.tokens, *prompt(100, 9)], conversation=True)

        def copies() -> list[dict[str, object]]:
            found: list[dict[str, object]] = backend.explain(again)["chosen"]["copies"]
            return found

        await until(lambda: bool(copies()))
        near = emulated.named(with_role(backend, "prefill")[0])
        before = near.hit_tokens()
        second = await answered(backend, again)
        assert not second.trace.offloaded and second.trace.cached_tokens >= LONG
        assert near.hit_tokens() - before == second.trace.cached_tokens
        assert second.trace.attempts == 1
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_a_chat_that_its_engine_renders_otherwise_is_the_engines_alone(
    emulated: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway's tokenizer is not the engines' own: that costs time, and no answer."""
    messages = [{"role": "user", "content": "why? " * LONG}]
    rendered = load_tokenizer(emulated.tokenizer).encode_chat(Chat(messages))
    asked = gateway_request(prompt(LONG), stream=False, conversation=True)
    fields = {**asked.fields, "messages": messages}
    asked = replace(asked, path="/v1/chat/completions", fields=fields)

    async with serving(emulated.deployment()) as backend:
        trace = RequestTrace(0.0)
        async with backend.answer(asked, trace) as upstream:
            body = b"".join([e async for events in upstream.events() for e in events])
        usage = json.loads(body)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(rendered), 4)
        assert (trace.attempts, trace.prefill) == (2, trace.decode)
        assert "tokenised this chat differently" in trace.reason
        await until(lambda: is_clean(backend))
    assert "Check that [gateway] tokenizer" in caplog.text
    await asyncio.to_thread(emulated.wait_until_idle)
