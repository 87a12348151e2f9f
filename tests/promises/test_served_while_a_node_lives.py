"""While one node that decodes is alive, every request is served: a lost remote site costs speed.

Each case is a deployment as `prfaas init` writes it, a policy, and something that happens to the
only host of the remote site. Requests are answered meanwhile, with the tokens that they would have
been answered with anyway, and prompts go there again when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

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


class Event(NamedTuple):
    """How the remote site is lost, and how it returns."""

    lose: Callable[[PromisedDeployment], None] | None  # None: it has never been there
    restore: Callable[[PromisedDeployment], None]


START = PromisedDeployment.start_remote
RESTORE = PromisedDeployment.restore
EVENTS = {
    "never_started": Event(None, START),
    "node_killed": Event(lambda one: one.kill_remote("node"), START),
    "host_killed": Event(lambda one: one.kill_remote("node", "kvd"), START),
    "cut": Event(PromisedDeployment.cut, RESTORE),
    "stalled": Event(PromisedDeployment.stall, RESTORE),
    "drained": Event(PromisedDeployment.drain, lambda one: one.drain("--return")),
}
ALWAYS = {(ONE, "adaptive", "never_started"), (ONE, "adaptive", "node_killed")}
SLOW = {
    *((ONE, "adaptive", "host_killed"), (ONE, "adaptive", "drained"), (ONE, "remote", "cut")),
    *((ONE, "paper", "node_killed"), (ONE, "local", "never_started")),
    *((THREE, "adaptive", "drained"), (THREE, "paper", "stalled")),
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
def deployment_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Shape], PromisedDeployment]]:
    """The deployment of a shape, until another one is asked for: one at a time."""
    made: list[PromisedDeployment] = []

    def get(shape: Shape) -> PromisedDeployment:
        if made and made[0].shape != shape:
            made.pop().close()
        if not made:
            made.append(PromisedDeployment(tmp_path_factory.mktemp("promise"), shape))
        return made[0]

    yield get
    for deployment in made:
        deployment.close()


@pytest.mark.parametrize(("shape", "policy", "event"), cases())
async def test_a_lost_remote_site_costs_speed_and_no_service(
    deployment_of: Callable[[Shape], PromisedDeployment], shape: Shape, policy: str, event: str
) -> None:
    deployment = await asyncio.to_thread(deployment_of, shape)
    async with deployment.client() as client:
        await lose_and_restore(deployment, client, policy, event)


async def lose_and_restore(
    deployment: PromisedDeployment, client: Client, policy: str, event: str
) -> None:
    lose, restore = EVENTS[event]
    if lose is None:
        await asyncio.to_thread(deployment.start_without_remote, policy)
        await client.until_ready()
    else:
        await asyncio.to_thread(deployment.start_with_remote, policy)
        await client.until_all_are_in_use()
        if policy != "local":
            await client.until_offloaded()
    deployment.is_whole = False
    questions = await asyncio.gather(*(deployment.question() for _ in range(10)))

    async def served(within_s: float) -> None:
        prompt, expected = questions.pop()
        answer = await client.ask(prompt, within_s)
        log = deployment.gateway_output[-3000:]
        assert (answer.status, answer.tokens) == (200, expected), f"{answer}\n{log}"
        assert await client.is_ready(), f"requests are served\n{log}"

    async with asyncio.TaskGroup() as group:
        group.create_task(served(FIRST_S))  # it is on its way when the site is lost
        if lose is not None:
            await asyncio.to_thread(lose, deployment)
        group.create_task(served(FIRST_S))
    for _ in range(4):
        await served(ANSWER_S)
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(served(ANSWER_S))

    await asyncio.to_thread(restore, deployment)
    await client.until_all_are_in_use()
    if policy != "local":
        await client.until_offloaded()
    await served(ANSWER_S)
    deployment.is_whole = True
