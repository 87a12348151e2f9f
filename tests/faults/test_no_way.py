"""No node is left that could answer: clients get an error with Retry-After."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import pytest

from prfaas_lab.faults.clients import Clients
from prfaas_lab.faults.credentials import ORDINARY_TENANTS
from prfaas_lab.faults.deployment import FaultDeployment
from prfaas_lab.faults.questions import Question, Verdict, body
from prfaas_lab.faults.resource_usage import wait_until_idle
from tests.faults.conftest import FaultSetup
from tests.faults.test_campaign import check_sockets


class Told(NamedTuple):
    status: int
    retry_after: str | None
    content_type: str
    code: str
    message: str


async def told(
    deployment: FaultDeployment, gateway: int, question: Question, *, stream: bool
) -> Told:
    target = deployment.targets[gateway]
    async with deployment.access.tenants[ORDINARY_TENANTS[0]].post(
        f"{target.url}/v1/completions",
        data=body(target.model, question, stream=stream, salt=f"no way {gateway} {stream}"),
        headers={"Content-Type": "application/json"},
    ) as answer:
        error = (await answer.json())["error"]
        retry_after = answer.headers.get("Retry-After")
        return Told(
            answer.status, retry_after, answer.content_type, error["code"], error["message"]
        )


async def gone(deployment: FaultDeployment, names: Collection[str]) -> bool:
    """And known to be, at every gateway."""
    used = [await deployment.used_by(gateway) for gateway in range(len(deployment.gateways))]
    return not any(used_by.intersection(names) for used_by in used)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_no_way_left_clients_hear_when_to_come_again(emulated_setup: FaultSetup) -> None:
    deployment = emulated_setup.deployment

    async def main() -> None:
        long, *_, short = await emulated_setup.campaign.questions(4)
        home = deployment.layout.locals
        for name in home:
            await deployment.kill(name)
        try:
            await deployment.until(partial(gone, deployment, home))
            refusals = await asyncio.gather(
                *(
                    told(deployment, gateway, question, stream=stream)
                    for gateway in range(len(deployment.gateways))
                    for question in (long, short)
                    for stream in (False, True)
                )
            )
        finally:
            for name in home:
                await deployment.restart(name)
        for refusal in refusals:
            assert refusal.status == 503 and refusal.code == "overloaded", refusal
            assert refusal.content_type == "application/json", "no stream has begun"
            assert refusal.retry_after is not None and int(refusal.retry_after) >= 1
            assert re.search(r": no node of \S+ is in use: .+ lost$", refusal.message), refusal
        await deployment.until(deployment.in_use)
        asked = await Clients(deployment, "again").ask(long, salt="again")
        assert asked.verdict is Verdict.RIGHT, str(asked)
        await wait_until_idle(deployment)

    emulated_setup.run(main())
    check_sockets(emulated_setup)
