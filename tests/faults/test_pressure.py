"""What many clients do at once: leave, or all need another way."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.config.host import KvdTimeouts
from prfaas.faults.clients import Clients
from prfaas.faults.questions import Verdict, learnt, prompt
from prfaas.faults.resource_usage import settled
from prfaas.gateway.dispatch.attempts import RetryBudget
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
        # Given back, and not only lapsed.
        async with asyncio.timeout(KvdTimeouts().grant_s / 2):
            await settled(stage)

    emulated_fire.run(main())
    check_sockets(emulated_fire)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_wan_under_load_does_not_stampede_home(emulated_fire: Fire) -> None:
    """As many are tried again as the budget has; the others get a clear refusal."""
    stage = emulated_fire.stage

    async def main() -> None:
        threshold = stage.deployment.scheduler.threshold_tokens
        assert threshold is not None
        (decode, *_) = await stage.with_role("decode")
        ids = prompt(threshold + 2_000, "stampede")  # offloaded, and soon done at home
        question = await learnt(stage.node(decode), ids, 4)
        before = (await stage.state())["retries"]
        clients = Clients(stage, "stampede")
        stage.wan("outage")
        try:
            asked = await asyncio.gather(
                *(clients.ask(question, salt=f"stampede {n}") for n in range(MANY))
            )
        finally:
            stage.wan("restore")
        after = (await stage.state())["retries"]
        verdicts = [one.verdict for one in asked]
        assert set(verdicts) == {Verdict.RIGHT, Verdict.REFUSED}, [str(one) for one in asked]
        spent = after["spent"] - before["spent"]
        assert 0 < spent <= before["left"] + RetryBudget().per_request * MANY
        assert after["denied"] - before["denied"] == verdicts.count(Verdict.REFUSED)
        await settled(stage)

    emulated_fire.run(main())
