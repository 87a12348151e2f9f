"""While one node that decodes is alive, every request is served: a lost remote site costs speed.

Each case is a deployment as `prfaas init` writes it, a policy, and something that happens to the
only host of the remote site. Requests are answered meanwhile, with the tokens that they would have
been answered with anyway, and prompts go there again when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import product
from typing import Any

import pytest

from tests.promises.deployments import (
    ANSWER_S,
    FIRST_S,
    Client,
    PromisedDeployment,
    Shape,
)

POLICIES = ("adaptive", "paper", "remote", "local")
SHAPES = [Shape(hosts, is_local_first) for hosts in (1, 3) for is_local_first in (False, True)]
ONE, THREE = Shape(1, False), Shape(3, True)


class Event:
    """How the remote site is lost, and how it returns."""

    def __init__(
        self,
        lose: Callable[[PromisedDeployment], None],
        restore: Callable[[PromisedDeployment], None],
    ) -> None:
        self.lose = lose
        self.restore = restore


def start(deployment: PromisedDeployment) -> None:
    deployment.start_remote()


EVENTS = {
    "never_started": Event(lambda one: one.start_without_remote(one.policy), start),
    "node_killed": Event(lambda one: one.kill_remote("node"), start),
    "host_killed": Event(lambda one: one.kill_remote("node", "kvd"), start),
    "cut": Event(lambda one: one.cut(), lambda one: one.restore()),
    "stalled": Event(lambda one: one.stall(), lambda one: one.restore()),
    "drained": Event(lambda one: one.drain(), lambda one: one.drain("--return")),
}
ALWAYS = {
    *((ONE, "adaptive", event) for event in ("never_started", "node_killed", "drained")),
}
SLOW = {
    *((ONE, "adaptive", event) for event in ("host_killed", "cut")),
    *((ONE, "paper", event) for event in ("node_killed", "cut")),
    *((ONE, "local", "never_started"), (ONE, "remote", "node_killed")),
    *((THREE, "adaptive", event) for event in ("never_started", "node_killed", "drained")),
    *((THREE, "paper", event) for event in ("stalled", "host_killed")),
}


def cases() -> list[Any]:
    found = []
    for case in product(SHAPES, POLICIES, EVENTS):
        marks = [] if case in ALWAYS else [pytest.mark.slow if case in SLOW else pytest.mark.grid]
        shape, policy, event = case
        name = f"{shape.name}-{policy}-{event}"
        found.append(pytest.param(*case, marks=marks, id=name))
    return found


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PromisedDeployment]:
    made = PromisedDeployment(tmp_path_factory.mktemp("promise"), request.param)
    yield made
    made.close()


@pytest.fixture
async def client(deployment: PromisedDeployment) -> AsyncIterator[Client]:
    async with deployment.client() as client:
        yield client


async def served(client: Client, deployment: PromisedDeployment, within_s: float) -> None:
    prompt, expected = await deployment.question()
    answer = await client.ask(prompt, within_s)
    log = deployment.gateway_output[-3000:]
    assert (answer.status, answer.tokens) == (200, expected), f"{answer}\n{log}"
    assert await client.is_ready(), f"requests are served\n{log}"


@pytest.mark.parametrize(("deployment", "policy", "event"), cases(), indirect=["deployment"])
async def test_a_lost_remote_site_costs_speed_and_no_service(
    deployment: PromisedDeployment, client: Client, policy: str, event: str
) -> None:
    happens = EVENTS[event]
    if event == "never_started":
        await asyncio.to_thread(deployment.start_without_remote, policy)
        await client.until_ready()
    else:
        await asyncio.to_thread(deployment.start_with_remote, policy)
        await client.until_all_are_in_use()
        if policy != "local":
            await client.until_offloaded()
        deployment.is_whole = False
        await asyncio.to_thread(happens.lose, deployment)

    await served(client, deployment, FIRST_S)
    for _ in range(4):
        await served(client, deployment, ANSWER_S)
    await asyncio.gather(*(served(client, deployment, ANSWER_S) for _ in range(3)))

    await asyncio.to_thread(happens.restore, deployment)
    await client.until_all_are_in_use()
    if policy != "local":
        await client.until_offloaded()
    await served(client, deployment, ANSWER_S)
    deployment.is_whole = True
