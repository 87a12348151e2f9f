"""Decode nodes that prefill for themselves: real kvds and nodes, engines that check every byte they
resume."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prfaas.cache.hashing import PromptHashes
from prfaas.contracts.kv_transfer_params import Remainder, encode
from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.types import NodeId
from tests.gateway.backends import (
    answered,
    gateway_request,
    is_clean,
    prompt,
    serving,
    until,
    until_it_would_resume,
    with_role,
)
from tests.gateway.conftest import Hosts
from tests.node.hosts import Host, cached_of, tokens_of

BLOCK = 64
FIRST, NEW, ANSWER = 1500, 100, 80
KEPT = (FIRST + ANSWER - 1) // BLOCK * BLOCK  # the last token of an answer is not computed
# Slow enough that a copy of the prefix to the prefill node takes longer than a few decode steps.
FABRIC = [{"from": "pd", "to": "pd", "gbps": 1}]


def adaptive(hosts: Hosts) -> Any:
    return hosts.deployment(policy="adaptive", links=FABRIC, alone={"margin_s": 0.0})


def is_alone(backend: GatewayBackend, asked: GatewayRequest, cached: int = KEPT) -> bool:
    chosen = backend.explain(asked)["chosen"]
    return chosen.get("alone", False) and chosen["cached_tokens"] == cached


async def turns(
    backend: GatewayBackend, seed: int, salt: str
) -> tuple[GatewayRequest, list[int], str]:
    """The second turn of a conversation, once the gateway would give it to the decode node that
    has kept the first; its prompt; and that node."""
    ids = prompt(FIRST, seed)
    first = await answered(
        backend, gateway_request(ids, ANSWER, conversation=True, salt=salt, stream=False)
    )
    ids = [*ids, *first.tokens, *prompt(NEW, seed)]
    asked = gateway_request(ids, conversation=True, salt=salt)
    await until(lambda: is_alone(backend, asked))
    return asked, ids, first.trace.decode


def alone(host: Host, ids: list[int]) -> list[int]:
    answer = host.complete(ids, max_tokens=4, cache_salt="never cached", kv_transfer_params=None)
    return tokens_of(answer)


async def test_the_second_turn_runs_where_the_answer_was_kept(emulated: Hosts) -> None:
    async with serving(adaptive(emulated)) as backend:
        asked, ids, node = await turns(backend, 1, "alone")
        trace = RequestTrace(0.0)
        async with backend.answer(asked, trace) as upstream:
            events = [json.loads(e[6:]) async for es in upstream.events() for e in es if b"{" in e]
        tokens = [t for event in events for c in event["choices"] for t in c["token_ids"]]
        assert tokens == alone(emulated.home[0], ids)
        assert (trace.prefill, trace.decode, trace.attempts) == (node, node, 1)
        assert trace.alone and trace.granted_s is None and trace.form == ""
        # As the engine reports it: all blocks up to where the answer ended.
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == KEPT
        assert trace.cached_tokens == KEPT
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_what_the_node_has_lost_is_prefilled_the_ordinary_way(emulated: Hosts) -> None:
    """The index claims a prefix that is not there, as between an eviction and its event."""
    ids = prompt(FIRST, 3)
    chain = PromptHashes(ids).at(BLOCK)[: FIRST // BLOCK]
    asked = gateway_request(ids, conversation=True)
    async with serving(adaptive(emulated)) as backend:
        node = with_role(backend, "decode")[0]
        groups = [group.name for group in emulated.named(node).spec().groups]
        assert backend.fleet.manager.snapshot(NodeId(node), dict.fromkeys(groups, chain), 10**6)
        assert is_alone(backend, asked, FIRST // BLOCK * BLOCK)
        found = await answered(backend, asked)
        assert found.tokens == alone(emulated.home[0], ids)
        assert found.trace.prefill != found.trace.decode and not found.trace.alone
        (refused,) = found.trace.failures
        assert "0 of 1500 tokens cached" in refused
        # The node has computed nothing, so that the refusal costs no retry.
        assert found.trace.attempts == 1 and backend.state()["retries"]["spent"] == 0
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


@pytest.mark.parametrize(("threshold", "where"), [(1000, "pd"), (1, "far")])
async def test_a_kept_answer_follows_to_another_prefill_node(
    emulated: Hosts, threshold: int, where: str
) -> None:
    """Under policy `paper` the answer is copied within the cluster, or to the remote
    node, which gets what it lacks."""
    links = [{"from": "pd", "to": "far", "gbps": 1e5}]
    async with serving(emulated.deployment(threshold_tokens=threshold, links=links)) as backend:
        salt = f"copied {where}"
        ids = prompt(FIRST, 6)
        first = await answered(backend, gateway_request(ids, ANSWER, conversation=True, salt=salt))
        ids = [*ids, *first.tokens, *prompt(NEW, 6)]
        asked = gateway_request(ids, conversation=True, salt=salt)
        await until_it_would_resume(backend, asked, KEPT)
        (copy,) = backend.explain(asked)["chosen"]["copies"]
        assert (copy["source"], copy["tokens"]) == (first.trace.decode, KEPT)
        second = await answered(backend, asked)
        assert second.trace.cluster == where and not second.trace.alone
        await until(lambda: second.trace.cached_tokens == KEPT)  # as its node reports
        assert second.tokens == alone(emulated.home[0], ids)
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


@pytest.mark.parametrize("bound", [1, 10_000])
async def test_a_node_refuses_a_long_remainder(emulated: Hosts, bound: int) -> None:
    host = emulated.home[0]
    ids, salt = prompt(300, 4), f"bound {bound}"
    await asyncio.to_thread(host.complete, ids[:200], max_tokens=1, cache_salt=salt)
    params = encode(Remainder(bound, 32))
    status, answer = await asyncio.to_thread(
        host.ask, ids, max_tokens=4, cache_salt=salt, kv_transfer_params=params
    )
    if bound == 1:
        assert status == 424 and "192 of 300 tokens" in answer["error"]["message"]
    else:
        assert status == 200 and cached_of(answer) == 192
        assert tokens_of(answer) == alone(host, ids)
    await asyncio.to_thread(emulated.wait_until_idle)


@pytest.mark.slow  # a node starts again
async def test_a_lost_holder_is_replaced(emulated: Hosts) -> None:
    async with serving(adaptive(emulated)) as backend:
        asked, ids, node = await turns(backend, 5, "dies")
        lost = emulated.named(node)
        expected = alone(next(h for h in emulated.home if h is not lost), ids)
        try:
            lost.node.kill()
            found = await answered(backend, asked)
            assert found.tokens == expected
            assert found.trace.decode != node and found.trace.prefill not in (node, "")
            assert found.trace.decode in with_role(backend, "decode")
            assert not found.trace.alone
            await until(lambda: is_clean(backend))
        finally:
            lost.begin_node()
            lost.wait_until_ready()
    await asyncio.to_thread(emulated.wait_until_idle)
