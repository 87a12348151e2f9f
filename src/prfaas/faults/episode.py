"""One fault, from a healthy deployment to a healthy one: requests under way, the strike, what
became of every request, and how long it took until long prompts were prefilled far away again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from prfaas.faults.catalogue import TOKENS, Fault, struck
from prfaas.faults.clients import Asked, Clients
from prfaas.faults.deployment import GATEWAYS, LOOK_S, PATIENCE_S, FaultDeployment
from prfaas.faults.questions import Question, Verdict, learnt, prompt
from prfaas.faults.resource_usage import settled

MOMENT_S = 60.0  # the right moment comes within this, or never
RETRIES = 10.0  # what gateways have in store before a fault: more than those under way can cost
EARNING = 16  # requests at once
STORY_S = 60.0  # for a line of a gateway's log to arrive


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts, in tokens; the threshold lies between them."""

    short: int
    long: int


@dataclass(frozen=True, slots=True)
class Seen:
    fault: str
    what: str
    verdicts: dict[str, int]
    retries: int
    lasted_s: float  # from the strike until its mending began
    recovered_s: float  # from there until a long prompt was prefilled far away again


class Unmet(Exception):
    """Something that must hold did not."""


class Campaign:
    """Goes through faults, one after another, on one deployment."""

    def __init__(self, stage: FaultDeployment, lengths: Lengths, each: int) -> None:
        """`each`: how many long and how many short requests are under way when a fault strikes."""
        self._stage = stage
        self._lengths = lengths
        self._each = each
        self._known: dict[tuple[int, int], list[Question]] = {}
        self._shortest: Question | None = None
        self._numbers = count()

    async def questions(self, output_tokens: int) -> list[Question]:
        """Half of them long. Learnt from one process that computes everything itself."""
        found = []
        for length in (self._lengths.long, self._lengths.short):
            key = (length, output_tokens)
            if key not in self._known:
                alone = self._stage.node((await self._stage.with_role("decode"))[0])
                prompts = (prompt(length, f"{length} {n}") for n in range(self._each))
                self._known[key] = await asyncio.gather(
                    *(learnt(alone, ids, output_tokens) for ids in prompts)
                )
            found += self._known[key]
        return found

    async def warm_up(self) -> None:
        """Every way has been used once: what is kept open from then on is not news."""
        clients = Clients(self._stage, "warming")
        questions = await self.questions(TOKENS)
        asking = (
            clients.ask(question, gateway=gateway, salt="warm")
            for question in questions
            for gateway in range(len(GATEWAYS))
        )
        for asked in await asyncio.gather(*asking):
            if asked.verdict is not Verdict.RIGHT:
                raise Unmet(f"before any fault: {asked}")

    async def run(self, fault: Fault) -> Seen:
        """Raises `Unmet`."""
        stage = self._stage
        questions = await self.questions(fault.tokens)
        await self._earn()
        clients = Clients(stage, f"{fault.name}-{next(self._numbers)}")
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(
                    clients.ask(
                        question,
                        gateway=number % len(GATEWAYS),
                        stream=number // len(GATEWAYS) % 2 == 0,
                        salt=f"{fault.name} {next(self._numbers)}",
                    )
                )
                for number, question in enumerate(questions)
            ]
            mend = await struck(stage, fault, MOMENT_S)
            struck_s = stage.clock.now()
            await asyncio.sleep(fault.lasts_s)
            mending_s = stage.clock.now()
            await mend()
        await self._recovered(fault)
        recovered_s = stage.clock.now()
        await settled(stage)
        ended = [task.result() for task in asked]
        self._check(fault, ended)
        return Seen(
            fault.name,
            fault.what,
            dict(Counter(str(one.verdict) for one in ended)),
            self._retries([one.id for one in ended]),
            round(mending_s - struck_s, 2),
            round(recovered_s - mending_s, 2),
        )

    async def _recovered(self, fault: Fault) -> None:
        """Until every gateway offloads."""
        clients = Clients(self._stage, f"after-{fault.name}-{next(self._numbers)}")
        (question, *_) = await self.questions(TOKENS)
        for gateway, name in enumerate(GATEWAYS):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    salt = f"after {fault.name} {next(self._numbers)}"
                    asked = await clients.ask(question, gateway=gateway, salt=salt)
                    if asked.gateway != name:
                        await asyncio.sleep(LOOK_S)
                        continue
                    if asked.verdict is not Verdict.RIGHT:
                        raise Unmet(f"behind {fault.name}: {asked}")
                    async with asyncio.timeout(STORY_S):
                        if (await self._stage.outcomes.of(asked.id)).route == "remote":
                            break

    def _check(self, fault: Fault, ended: Sequence[Asked]) -> None:
        wrong = [f"{one}" for one in ended if one.verdict not in {Verdict.RIGHT, *fault.may}]
        if wrong:
            raise Unmet(f"{fault.name}: " + "; ".join(wrong))

    # The retry budget -----------------------------------------------------------------------------

    async def _earn(self) -> None:
        """Every request earns a part of a retry: the shortest are asked until there are enough."""
        stage = self._stage
        clients = Clients(stage, f"earning-{next(self._numbers)}")
        if self._shortest is None:
            alone = stage.node((await stage.with_role("decode"))[0])
            self._shortest = await learnt(alone, prompt(1, "shortest"), 1)
        for gateway in range(len(GATEWAYS)):
            while (await stage.state(gateway))["retries"]["left"] < RETRIES:
                asking = (clients.ask(self._shortest, gateway=gateway) for _ in range(EARNING))
                await asyncio.gather(*asking)

    def _retries(self, requests: Collection[str]) -> int:
        """As the gateways tell it; one that was killed tells nothing."""
        told = [one for one in self._stage.outcomes.latest if one.id in requests]
        return sum(one.attempts - 1 for one in told)
