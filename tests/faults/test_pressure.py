"""What many clients do at once: leave, or all need another way."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.config.host import KvdTimeouts
from prfaas.gateway.dispatch.attempts import RetryBudget
from prfaas_lab.faults.clients import Clients
from prfaas_lab.faults.questions import Verdict, learn_answer, prompt
from prfaas_lab.faults.resource_usage import wait_until_idle
from tests.faults.conftest import FaultSetup
from tests.faults.test_campaign import check_sockets

MANY = 60  # more than there are retries


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("after_s", [0.2, 0.6, 1.5])  # in the queue, in the prefill, in the answer
def test_clients_that_hang_up_leave_nothing_behind(
    emulated_setup: FaultSetup, after_s: float
) -> None:
    deployment = emulated_setup.deployment

    async def main() -> None:
        questions = await emulated_setup.campaign.questions(60)
        leaving, staying = (
            Clients(deployment, f"{who}-{after_s}") for who in ("leaving", "staying")
        )
        asked = await asyncio.gather(
            *(leaving.ask(q, leaves_after_s=after_s, salt=f"leaving {after_s}") for q in questions),
            *(staying.ask(q, salt=f"staying {after_s}", gateway=1) for q in questions),
        )
        verdicts = [one.verdict for one in asked]
        half = len(questions)
        assert verdicts == [Verdict.LEFT] * half + [Verdict.RIGHT] * half
        # Given back, and not only lapsed.
        async with asyncio.timeout(KvdTimeouts().grant_s / 2):
            await wait_until_idle(deployment)

    emulated_setup.run(main())
    check_sockets(emulated_setup)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_wan_under_load_does_not_stampede_home(emulated_setup: FaultSetup) -> None:
    """As many are tried again as the budget has; the others get a clear refusal. How many were
    under way over the WAN when it was found cut, and how much of the budget earlier faults have
    used, is not the same in every run."""
    deployment = emulated_setup.deployment

    async def main() -> None:
        threshold = deployment.deployment.scheduler.threshold_tokens
        assert threshold is not None
        (decode, *_) = await deployment.with_role("decode")
        ids = prompt(threshold + 2_000, "stampede")  # offloaded, and soon done at home
        question = await learn_answer(deployment.node(decode), ids, 4)
        before = (await deployment.state())["retries"]
        clients = Clients(deployment, "stampede")
        deployment.links.order("outage")
        try:
            asked = await asyncio.gather(
                *(clients.ask(question, salt=f"stampede {n}") for n in range(MANY))
            )
        finally:
            deployment.links.order("restore")
        after = (await deployment.state())["retries"]
        verdicts = [one.verdict for one in asked]
        assert set(verdicts) <= {Verdict.RIGHT, Verdict.REFUSED}, [str(one) for one in asked]
        spent = after["spent"] - before["spent"]
        assert 0 < spent <= before["left"] + RetryBudget().per_request * MANY
        assert after["denied"] - before["denied"] == verdicts.count(Verdict.REFUSED)
        await wait_until_idle(deployment)

    emulated_setup.run(main())
