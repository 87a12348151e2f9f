"""A node that is slower than its like gets little, and one that is faster than its profile is used.

The backend of a gateway runs in this process, over stand-in nodes whose prefills take a given time,
in virtual time: what counts is what the gateway decides, not how fast this machine is.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count

import pytest

from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.gateway.backend import BackendOptions, GatewayBackend, running
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.gateway.request import GatewayRequest, RequestTrace
from tests.gateway.backends import MODEL, deployment, in_use, problem, prompt, until
from tests.promises.paced_nodes import PacedHost, paced_nodes
from tests.promises.virtual_time import run_virtual

TOKENS = 1500  # every policy here offloads them
POLICIES = ["adaptive", "paper", "remote"]
RECOVERY_S = 60.0
ITS_SHARE = 5  # of 20 requests; two equal nodes that take turns have 10 each


@asynccontextmanager
async def served(
    policy: str, far: Sequence[float], clock: Clock
) -> AsyncIterator[tuple[GatewayBackend, list[PacedHost], float]]:
    """A backend, its remote nodes, of which each takes so many times as long as its profile states,
    and the time that the profile states."""
    names = [f"far-{number}" for number in range(len(far))]
    async with paced_nodes([*names, "near-0", "near-1"]) as (nodes, entries):
        made: Deployment = deployment(entries[-2:], entries[:-2], policy=policy)
        stated_s = float(problem(made).remotes[0].pool.profile.seconds(TOKENS))
        for name, times in zip(names, far, strict=True):
            nodes[name].prefill_s = times * stated_s
        for name in ("near-0", "near-1"):
            nodes[name].prefill_s = float(problem(made).local.pool.profile.seconds(TOKENS))
        async with running(made, problem(made), BackendOptions(), clock) as backend:
            await until(lambda: len(in_use(backend)) == len(nodes))
            yield backend, [nodes[name] for name in names], stated_s


async def prefill_node(backend: GatewayBackend, seed: str, clock: Clock) -> str:
    """The node that has prefilled a new prompt."""
    trace = RequestTrace(clock.now())
    fields = {"model": MODEL, "max_tokens": 4, "stream": True}
    asked = GatewayRequest(
        *(seed, "/v1/completions", TokenIds.of(prompt(TOKENS, seed)), fields),
        **{"salt": "", "stream": True, "conversation": False},
    )
    async with backend.answer(asked, trace) as upstream:
        async for _ in upstream.events():
            pass
    return trace.prefill


@pytest.mark.parametrize(
    ("policy", "slow"),
    [
        *(("adaptive", 0), ("adaptive", 1)),
        *(pytest.param("paper", each, marks=pytest.mark.slow) for each in (0, 1)),
        *(pytest.param("remote", each, marks=pytest.mark.slow) for each in (0, 1)),
    ],
)
def test_a_node_that_is_20_times_slower_gets_little_until_it_recovers(
    policy: str, slow: int
) -> None:
    async def requests(clock: Clock) -> tuple[Counter[str], int]:
        """Who got the first hundred, and how many of twenty it got once it had recovered."""
        far = [1.0, 1.0]
        far[slow] = 20.0
        name, used, latest = f"far-{slow}", Counter[str](), deque[str](maxlen=20)
        async with served(policy, far, clock) as (backend, nodes, stated_s):
            for number in range(100):
                used[await prefill_node(backend, f"slow {number}", clock)] += 1
                if used[name] > 10:
                    return used, 0
            nodes[slow].prefill_s = stated_s
            with suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_S):
                    for number in count():
                        latest.append(await prefill_node(backend, f"recovered {number}", clock))
                        if latest.count(name) == ITS_SHARE:
                            break
        return used, latest.count(name)

    used, after = run_virtual(requests)
    assert used[f"far-{slow}"] <= 10, used
    assert used[f"far-{1 - slow}"] >= 80, f"its like is as fast as stated: {used}"
    assert after == ITS_SHARE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("streams", [1, 32])
def test_a_node_that_is_5_times_faster_than_its_profile_reaches_its_real_rate(
    policy: str, streams: int
) -> None:
    async def busy_share(clock: Clock) -> float:
        """The part of the time in which the node is busy with the first 20 prompts, while there is
        always one for it. That a prefill has ended needs no experience with the node."""
        async with served(policy, [1 / 5], clock) as (backend, (node,), _):

            async def stream(name: int) -> None:
                number = count()
                while len(node.prefills) <= 20:
                    await prefill_node(backend, f"fast {name} {next(number)}", clock)

            async with asyncio.TaskGroup() as group:
                for name in range(streams):
                    group.create_task(stream(name))
        seen = node.prefills[:21]
        busy_s = sum(end_s - begun_s for begun_s, end_s in seen[:-1])
        return busy_s / (seen[-1][0] - seen[0][0])

    assert run_virtual(busy_share) >= 0.9
