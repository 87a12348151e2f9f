"""The campaign: one fault at a time, from a healthy deployment to a healthy one.

For each fault: requests are in flight, the fault strikes, every request gets a verdict, and the
time is measured until the PrfaaS node prefills long prompts again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas_lab.faults.catalogue import TOKENS, Fault, strike_when_possible
from prfaas_lab.faults.clients import ClientResult, Clients, is_explained
from prfaas_lab.faults.deployment import LOOK_S, PATIENCE_S, FaultDeployment
from prfaas_lab.faults.downtimes import Downtimes
from prfaas_lab.faults.questions import Question, Verdict, learn_answer, prompt
from prfaas_lab.faults.resource_usage import wait_until_idle

MOMENT_S = 60.0  # limit of the wait for a process in the right state
RETRIES = 10.0  # retry budget of a gateway before a fault: more than the requests in flight need
EARNING = 16  # parallel requests while the budget fills
STORY_S = 60.0  # limit of the wait for a line of a gateway's log


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts in tokens; the threshold lies between them."""

    short: int
    long: int


@dataclass(frozen=True, slots=True)
class FaultResult:
    fault: str
    what: str
    verdicts: dict[str, int]
    retries: int
    lasted_s: float  # from the strike to the start of the repair
    recovered_s: float  # from there until the PrfaaS node prefilled a long prompt again
    # Requests that ended as no fault of this kind allows, or whose own gateway and decode node were
    # not down at that time.
    unexcused: list[str] = field(default_factory=list)


class CampaignFailed(Exception):
    """A request was not answered right before a fault or after its repair."""


async def find_unexcused(
    may: Collection[Verdict],
    ended: Sequence[ClientResult],
    outcomes: RequestOutcomes,
    down: Downtimes,
) -> list[str]:
    """The requests that no fault of the kind may end so (`may`), and those whose own gateway and
    decode node were not down."""
    found = []
    for one in ended:
        decode_node = None
        if one.verdict is Verdict.BROKEN:
            with suppress(TimeoutError):
                async with asyncio.timeout(STORY_S):
                    decode_node = (await outcomes.of(one.id)).decode
        allowed = one.verdict is Verdict.RIGHT or one.verdict in may
        if not allowed or not is_explained(one, decode_node, down):
            found.append(f"{one}; decoded by {decode_node or 'an unknown node'}")
    return found


class Campaign:
    """Runs faults one after another on one deployment."""

    def __init__(self, deployment: FaultDeployment, lengths: Lengths, each: int) -> None:
        """`each`: number of long, and of short, requests in flight when a fault strikes."""
        self._deployment = deployment
        self.lengths = lengths
        self._each = each
        self._known: dict[tuple[int, int], list[Question]] = {}
        self._shortest: Question | None = None
        self._numbers = count()

    async def questions(self, output_tokens: int) -> list[Question]:
        """Questions, half of them long, with the answers of a single node."""
        found = []
        for length in (self.lengths.long, self.lengths.short):
            key = (length, output_tokens)
            if key not in self._known:
                single_node = self._deployment.node((await self._deployment.with_role("decode"))[0])
                prompts = (prompt(length, f"{length} {n}") for n in range(self._each))
                self._known[key] = await asyncio.gather(
                    *(learn_answer(single_node, ids, output_tokens) for ids in prompts)
                )
            found += self._known[key]
        return found

    async def warm_up(self) -> None:
        """Uses every path once, so that later counts of sockets include kept connections."""
        clients = Clients(self._deployment, "warming")
        questions = await self.questions(TOKENS)
        asking = (
            clients.ask(question, gateway=gateway, salt="warm")
            for question in questions
            for gateway in range(len(self._deployment.gateways))
        )
        for asked in await asyncio.gather(*asking):
            if asked.verdict is not Verdict.RIGHT:
                raise CampaignFailed(f"before the first fault: {asked}")

    async def run(self, fault: Fault) -> FaultResult:
        """Raises `CampaignFailed` for an answer after the repair that is not right. Requests that
        were in flight and failed without an excuse are in the result."""
        deployment = self._deployment
        questions = await self.questions(fault.tokens)
        await self._earn()
        clients = Clients(deployment, f"{fault.name}-{next(self._numbers)}")
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(
                    clients.ask(
                        question,
                        gateway=number % len(deployment.gateways),
                        stream=number // len(deployment.gateways) % 2 == 0,
                        salt=f"{fault.name} {next(self._numbers)}",
                    )
                )
                for number, question in enumerate(questions)
            ]
            mend = await strike_when_possible(deployment, fault, MOMENT_S)
            struck_s = deployment.clock.now()
            await asyncio.sleep(fault.lasts_s)
            mending_s = deployment.clock.now()
            await mend()
        await self._recovered(fault)
        recovered_s = deployment.clock.now()
        await wait_until_idle(deployment)
        ended = [task.result() for task in asked]
        return FaultResult(
            fault.name,
            fault.what,
            dict(Counter(str(one.verdict) for one in ended)),
            self._retries([one.id for one in ended]),
            round(mending_s - struck_s, 2),
            round(recovered_s - mending_s, 2),
            await find_unexcused(fault.may, ended, deployment.outcomes, deployment.downtimes),
        )

    async def _recovered(self, fault: Fault) -> None:
        """Waits until every gateway offloads long prompts again."""
        clients = Clients(self._deployment, f"after-{fault.name}-{next(self._numbers)}")
        (question, *_) = await self.questions(TOKENS)
        for gateway, name in enumerate(self._deployment.gateways):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    salt = f"after {fault.name} {next(self._numbers)}"
                    asked = await clients.ask(question, gateway=gateway, salt=salt)
                    if asked.gateway != name:
                        await asyncio.sleep(LOOK_S)
                        continue
                    if asked.verdict is not Verdict.RIGHT:
                        raise CampaignFailed(f"after {fault.name}: {asked}")
                    async with asyncio.timeout(STORY_S):
                        if (await self._deployment.outcomes.of(asked.id)).route == "remote":
                            break

    # The retry budget -----------------------------------------------------------------------------

    async def _earn(self) -> None:
        """Fills the retry budget. Every request earns a part of a retry, so this sends the shortest
        requests until the budget is full."""
        deployment = self._deployment
        clients = Clients(deployment, f"earning-{next(self._numbers)}")
        if self._shortest is None:
            single_node = deployment.node((await deployment.with_role("decode"))[0])
            self._shortest = await learn_answer(single_node, prompt(1, "shortest"), 1)
        for gateway in range(len(self._deployment.gateways)):
            while (await deployment.state(gateway))["retries"]["left"] < RETRIES:
                asking = (clients.ask(self._shortest, gateway=gateway) for _ in range(EARNING))
                await asyncio.gather(*asking)

    def _retries(self, requests: Collection[str]) -> int:
        """Retries according to the gateways' logs. A gateway that was killed has logged nothing."""
        logged = [one for one in self._deployment.outcomes.latest if one.id in requests]
        return sum(one.attempts - 1 for one in logged)
