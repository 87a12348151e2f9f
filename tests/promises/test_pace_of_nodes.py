"""A node that is slower than its like gets little, and one that is faster than its profile is used.

The backend of a gateway runs in this process, over stand-in nodes whose prefills take a given time.
Nothing here measures how fast the gateway is: what counts is which node it chose, and how much of
the time the node was busy.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from itertools import count

import pytest

from prfaas.clock import MonotonicClock
from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.gateway.request import GatewayRequest, RequestTrace
from tests.gateway.backends import (
    MODEL,
    deployment,
    problem,
    prompt,
    serving,
)
from tests.promises.paced_nodes import paced_nodes

TOKENS = 4000  # every policy here offloads them
# Local nodes are so slow that the remote ones are always the better choice.
LOCAL_S, FAST_S, SLOW_S = 2.0, 0.05, 1.0
RECOVERY_S = 60.0
ITS_SHARE = 5  # of 20 requests; two equal nodes that take turns have 10 each
POLICIES = ["adaptive", "paper", "remote"]
STREAMS, TRIES = 4, 3


async def prefill_node(backend: GatewayBackend, seed: str) -> str:
    """The node that has prefilled a new prompt."""
    trace = RequestTrace(MonotonicClock().now())
    fields = {"model": MODEL, "max_tokens": 4, "stream": True}
    asked = GatewayRequest(
        *(seed, "/v1/completions", TokenIds.of(prompt(TOKENS, seed)), fields),
        **{"salt": "", "stream": True, "conversation": False},
    )
    async with backend.answer(asked, trace) as upstream:
        async for _ in upstream.events():
            pass
    return trace.prefill


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slow", ["far-0", "far-1"])
async def test_a_node_that_is_20_times_slower_gets_little_until_it_recovers(
    policy: str, slow: str
) -> None:
    async with paced_nodes(["far-0", "far-1", "near-0", "near-1"]) as (nodes, entries):
        made = deployment(entries[2:], entries[:2], policy=policy)
        for name, node in nodes.items():
            node.prefill_s = FAST_S if name.startswith("far") else LOCAL_S
        nodes[slow].prefill_s = SLOW_S
        used, latest = Counter[str](), deque[str](maxlen=20)
        async with serving(made) as backend:
            while used.total() < 100 and used[slow] <= 10:
                used[await prefill_node(backend, f"slow {used.total()}")] += 1
            nodes[slow].prefill_s = FAST_S
            with suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_S if used[slow] <= 10 else 0.0):
                    for number in count():
                        latest.append(await prefill_node(backend, f"recovered {number}"))
                        if latest.count(slow) == ITS_SHARE:
                            break
        assert used[slow] <= 10, f"{used}"
        assert latest.count(slow) == ITS_SHARE, f"it has recovered, and gets {Counter(latest)}"


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_node_that_is_5_times_faster_than_its_profile_reaches_its_real_rate(
    policy: str,
) -> None:
    """A machine that does not run this process for a moment spoils one try, not all."""
    shares: list[float] = []
    while len(shares) < TRIES and max(shares, default=0.0) < 0.9:
        shares.append(await busy_share(policy))
    assert max(shares) >= 0.9, shares


async def busy_share(policy: str) -> float:
    """The part of the time in which the only remote node is busy, once it has prefilled ten
    prompts, while there is always a prompt for it."""
    async with paced_nodes(["far-0", "near-0", "near-1"]) as (nodes, entries):
        made = deployment(entries[1:], entries[:1], policy=policy)
        profile = problem(made).remotes[0].pool.profile
        far = nodes["far-0"]
        far.prefill_s = float(profile.seconds(TOKENS)) / 5
        nodes["near-0"].prefill_s = nodes["near-1"].prefill_s = LOCAL_S
        async with serving(made) as backend:

            async def stream(name: int) -> None:
                number = count()
                while len(far.prefills) <= 30:
                    await prefill_node(backend, f"fast {name} {next(number)}")

            async with asyncio.TaskGroup() as group:
                for name in range(STREAMS):
                    group.create_task(stream(name))
    seen = far.prefills[10:31]
    busy_s = sum(end_s - begun_s for begun_s, end_s in seen[:-1])
    return busy_s / (seen[-1][0] - seen[0][0])
