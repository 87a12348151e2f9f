"""A soak: mixed traffic for a long time while a fault strikes every few seconds.

Conversations of known answers, of all lengths, streamed or not, some hung up on, by way of both
gateways. Afterwards every request is accounted for, and nothing has grown.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from prfaas.faults.catalogue import FAULTS, Fault, Part, struck
from prfaas.faults.clients import Asked, Clients
from prfaas.faults.deployment import GATEWAYS, FaultDeployment
from prfaas.faults.episode import Lengths
from prfaas.faults.growth import Growth, Sample, grown
from prfaas.faults.questions import Question, Verdict, learnt, prompt
from prfaas.faults.resource_usage import Held, held, settled
from prfaas.launch.children import ChildDied
from prfaas.measure.client import Target

TURNS = 3
CONVERSATIONS = 12
OUTPUT_TOKENS = (4, 8, 24)  # the longest stream for seconds
MOMENT_S = 5.0  # no victim within this: the fault is skipped
SAMPLE_S = 5.0  # between two looks at memory
STORY_S = 20.0  # for a gateway to have told of a request that has ended
LEAVES_S = 2.0  # clients that hang up do so within this
REST_S = 60.0  # idle connections end within this: clients' after 30 s
REST_SOCKETS = 8  # more than before, at rest: who looks at whom has its moment


@dataclass(frozen=True, slots=True)
class SoakOptions:
    seconds: float = 1800.0
    fault_every_s: float = 10.0
    requests_per_s: float = 1.5
    at_once: int = 12  # conversations; more would only wait on a small machine
    leaving: float = 0.1  # share of requests whose client hangs up
    shared: float = 0.3  # share of conversations that others have had before: cached
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """What became of everything."""

    asked: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)  # no gateway has said how it ended
    unmended: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class SoakReport:
    seconds: float
    requests: int
    verdicts: dict[str, int]
    routes: dict[str, int]
    errors: dict[str, int]  # as clients saw them
    wrong: list[str]
    untold: list[str]
    unmended: list[str]  # what was not in use again, or not at rest in the end, in time
    faults: dict[str, int]
    skipped: dict[str, int]  # nobody was in the right moment
    growth: dict[str, Growth]  # of the longest life of each process
    grown: list[str]  # that may go on with it
    short_lived: list[str]  # no life of theirs was long enough to judge
    sockets: dict[str, tuple[int, int]]  # of each process at rest, before and behind
    checked: list[str]  # kvds whose pools are whole, with nothing held

    @property
    def ok(self) -> bool:
        accounted = sum(self.verdicts.values()) == self.requests
        leaks = any(now - then > REST_SOCKETS for then, now in self.sockets.values())
        amiss = self.wrong or self.untold or self.unmended or self.grown or leaks
        return accounted and bool(self.faults) and not amiss


class Soak:
    def __init__(
        self,
        stage: FaultDeployment,
        lengths: Lengths,
        options: SoakOptions,
        say: Callable[[str], None],
    ) -> None:
        self._stage = stage
        self._lengths = lengths
        self._options = options
        self._say = say
        self._random = random.Random(options.seed)
        self._numbers = count()
        self._clients = Clients(stage, "soak")
        self._tally = Tally()
        self._mending: Counter[Part] = Counter()
        self._samples: list[Sample] = []

    async def run(self) -> SoakReport:
        options, stage = self._options, self._stage
        self._say("learning the answers from one process")
        book = await self._book()
        await settled(stage)
        before = held(stage.processes)
        began_s = stage.clock.now()
        until_s = began_s + options.seconds
        self._say(f"{options.seconds:.0f} s of traffic, a fault every {options.fault_every_s:g} s")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._traffic(book, until_s))
            group.create_task(self._faults(until_s))
            group.create_task(self._watch(until_s))
        seconds = stage.clock.now() - began_s
        self._say("waiting until nothing is left under way")
        tally = self._tally
        checked = []
        try:
            await stage.until(stage.all_in_use)
            await settled(stage)
            checked = stage.names
        except TimeoutError:
            tally.unmended.append("the end: somebody is not in use, or not idle")
        sockets = await self._rest(before)
        growth = Growth.of(self._samples)
        return SoakReport(
            round(seconds, 1),
            tally.asked,
            dict(tally.verdicts),
            dict(tally.routes),
            dict(tally.errors),
            tally.wrong,
            tally.untold,
            tally.unmended,
            dict(tally.struck),
            dict(tally.skipped),
            growth,
            grown(growth),
            [name for name, one in growth.items() if not one.judged],
            sockets,
            checked,
        )

    # Traffic --------------------------------------------------------------------------------------

    async def _book(self) -> list[list[Question]]:
        """Conversations: every turn has the one before it in front, with its answer."""
        alone = self._stage.node((await self._stage.with_role("decode"))[0])
        return await asyncio.gather(
            *(self._conversation(alone, number) for number in range(CONVERSATIONS))
        )

    async def _conversation(self, alone: Target, number: int) -> list[Question]:
        draw = random.Random(f"{self._options.seed} {number}")
        short, long = self._lengths.short, self._lengths.long
        turns: list[Question] = []
        for turn in range(TURNS):
            tokens = round(short * (long / 2 / short) ** draw.random())  # as many of each scale
            ids = prompt(tokens, f"{self._options.seed} {number} {turn}")
            before = (*turns[-1].ids, *turns[-1].expected) if turns else ()
            whole = (*before, *ids)[:long]
            turns.append(await learnt(alone, whole, draw.choice(OUTPUT_TOKENS)))
        return turns

    async def _traffic(self, book: list[list[Question]], until_s: float) -> None:
        draw, options, clock = self._random, self._options, self._stage.clock
        room = asyncio.Semaphore(options.at_once)
        async with asyncio.TaskGroup() as group:
            while clock.now() < until_s:
                await asyncio.sleep(draw.expovariate(options.requests_per_s / TURNS))
                await room.acquire()
                talking = group.create_task(self._talk(draw.choice(book), draw.random()))
                talking.add_done_callback(lambda _: room.release())

    async def _talk(self, turns: list[Question], seed: float) -> None:
        draw, options = random.Random(seed), self._options
        shared = draw.random() < options.shared
        salt = "soak" if shared else f"soak {next(self._numbers)}"
        for question in turns:
            leaves = draw.random() < options.leaving
            asked = await self._clients.ask(
                question,
                gateway=draw.randrange(len(GATEWAYS)),
                stream=draw.random() < 0.5,
                salt=salt,
                leaves_after_s=draw.uniform(0.0, LEAVES_S) if leaves else None,
            )
            await self._count(asked)
            if asked.verdict is not Verdict.RIGHT:
                return  # who was disappointed does not go on

    async def _count(self, asked: Asked) -> None:
        tally = self._tally
        tally.asked += 1
        tally.verdicts[asked.verdict] += 1
        if asked.answer.error is not None:
            tally.errors[asked.answer.error] += 1
        if asked.verdict is Verdict.WRONG:
            tally.wrong.append(str(asked))
        if asked.verdict in (Verdict.LEFT, Verdict.LOST):
            return  # its gateway may not have heard of it, or not be there to tell
        killed = self._stage.killed[asked.gateway]
        try:
            async with asyncio.timeout(STORY_S):
                tally.routes[(await self._stage.outcomes.of(asked.id)).route] += 1
        except TimeoutError:
            if self._stage.killed[asked.gateway] == killed:
                tally.untold.append(str(asked))

    # Faults ---------------------------------------------------------------------------------------

    async def _faults(self, until_s: float) -> None:
        """The last one is mended before this ends."""
        clock, every_s = self._stage.clock, self._options.fault_every_s
        next_s = clock.now() + every_s
        async with asyncio.TaskGroup() as group:
            while next_s < until_s:
                await asyncio.sleep(max(0.0, next_s - clock.now()))
                next_s += every_s
                spared = [fault for fault in FAULTS if not self._mending[fault.part]]
                if spared:
                    fault = self._random.choice(spared)
                    self._mending[fault.part] += 1
                    group.create_task(self._strike(fault))

    async def _strike(self, fault: Fault) -> None:
        stage, tally = self._stage, self._tally
        try:
            mend = await struck(stage, fault, MOMENT_S)
        except TimeoutError:
            tally.skipped[fault.name] += 1
        else:
            tally.struck[fault.name] += 1
            self._say(fault.what)
            await asyncio.sleep(fault.lasts_s)
            try:
                await mend()
                await stage.until(partial(stage.in_use, self._nodes(fault.part)))
            except (TimeoutError, ChildDied) as error:
                tally.unmended.append(f"{fault.name}: {error or 'not in time'}")
        finally:
            self._mending[fault.part] -= 1

    def _nodes(self, part: Part) -> list[str]:
        """Those that a fault of that part puts out of use; others may be so for another reason."""
        far = self._stage.far
        match part:
            case "far":
                return [far]
            case "decode":
                return [name for name in self._stage.names if name != far]
            case _:
                return []

    # Growth ---------------------------------------------------------------------------------------

    async def _watch(self, until_s: float) -> None:
        while self._stage.clock.now() < until_s:
            self._samples.append(self._sample())
            await asyncio.sleep(SAMPLE_S)

    async def _rest(self, before: Mapping[str, Held]) -> dict[str, tuple[int, int]]:
        """When nobody has more sockets than before, or has had the time for it."""
        now: dict[str, tuple[int, int]] = {}

        async def rested() -> bool:
            for name, one in held(self._stage.processes).items():
                now[name] = (before[name].sockets, one.sockets)
            return all(last <= first for first, last in now.values())

        with suppress(TimeoutError):
            await self._stage.until(rested, REST_S)
        return now

    def _sample(self) -> Sample:
        return Sample(self._stage.clock.now(), held(self._stage.processes))
