"""What many clients do at once: leave, or all need another way."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.faults.asking import Verdict
from prfaas.faults.clients import Clients
from prfaas.faults.traces import settled
from prfaas.gateway.budget import RetryBudget
from tests.faults.conftest import Fire
from tests.faults.test_campaign import check_sockets

MANY = 60  # more than there are retries


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("after_s", [0.2, 0.6, 1.5])  # in the queue, in the prefill, in the answer
def test_clients_that_hang_up_leave_nothing_behind(emulated_fire: Fire, after_s: float) -> None:
    stage = emulated_fire.stage

    async def main() -> None:
        questions = await emulated_fire.campaign.questions(60)
        leaving, staying = (Clients(stage, f"{who}-{after_s}") for who in ("leaving", "staying"))
        asked = await asyncio.gather(
            *(leaving.ask(q, leaves_after_s=after_s, salt=f"leaving {after_s}") for q in questions),
            *(staying.ask(q, salt=f"staying {after_s}", gateway=1) for q in questions),
        )
        verdicts = [one.verdict for one in asked]
        half = len(questions)
        assert verdicts == [Verdict.LEFT] * half + [Verdict.RIGHT] * half
        await settled(stage)

    emulated_fire.run(main())
    check_sockets(emulated_fire)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_wan_under_load_does_not_stampede_home(emulated_fire: Fire) -> None:
    """As many are tried again as the budget has; the others get a clear refusal."""
    stage = emulated_fire.stage

    async def main() -> None:
        (question, *_) = await emulated_fire.campaign.questions(8)
        before = (await stage.state())["retries"]
        budget = RetryBudget()
        clients = Clients(stage, "stampede")
        try:
            async with asyncio.TaskGroup() as group:
                asking = [
                    group.create_task(clients.ask(question, salt=f"stampede {n}"))
                    for n in range(MANY)
                ]
                await stage.until(lambda: in_flight(MANY))
                stage.wan("outage")
        finally:
            stage.wan("restore")
        asked = [task.result() for task in asking]
        after = (await stage.state())["retries"]
        spent = after["spent"] - before["spent"]
        verdicts = [one.verdict for one in asked]
        assert set(verdicts) <= {Verdict.RIGHT, Verdict.REFUSED}, [str(one) for one in asked]
        assert 0 < spent <= before["left"] + budget.per_request * MANY
        assert after["denied"] - before["denied"] == verdicts.count(Verdict.REFUSED)
        await settled(stage)

    async def in_flight(number: int) -> bool:
        return bool((await stage.state())["requests"]["in_flight"] >= number)

    emulated_fire.run(main())
