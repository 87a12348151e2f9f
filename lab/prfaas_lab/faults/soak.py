"""A soak: mixed traffic for a long time while a fault strikes every few seconds.

Clients of three tenants hold conversations with known answers through all gateways: prompts of all
lengths, streamed or not, and some clients hang up. At the end every request must be accounted for,
and no process may have grown. Hostile actors may run beside the ordinary tenants (`actors`): they
must not be able to harm them.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec
import numpy as np

from prfaas.config import Deployment
from prfaas.config.gateway import TenantSection
from prfaas.errors import PeerError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import ChildDied
from prfaas.launch.request_outcomes import RequestOutcome
from prfaas.measure.client import Target
from prfaas_lab.faults.actors.situation import ActorName, ActorsReport
from prfaas_lab.faults.actors_process import ActorsProcess, running_actors
from prfaas_lab.faults.catalogue import Fault, Part, strike_when_possible
from prfaas_lab.faults.clients import ClientResult, Clients, is_explained
from prfaas_lab.faults.clusters.catalogue import choose_faults, draw_from, is_cluster_wide
from prfaas_lab.faults.credentials import ORDINARY_TENANTS
from prfaas_lab.faults.deployment import FaultDeployment
from prfaas_lab.faults.episode import Lengths
from prfaas_lab.faults.growth import Growth, Sample
from prfaas_lab.faults.questions import Question, Verdict, learn_answer, prompt
from prfaas_lab.faults.resource_usage import ResourceUsage, measure_usage, wait_until_idle
from prfaas_lab.faults.worker_processes import name_workers, send_signal

TURNS = 3
OUTPUT_TOKENS = (4, 8, 24)  # the longest answers stream for seconds
MOMENT_S = 5.0  # a fault is skipped when no process is in the right state within this
SAMPLE_S = 5.0  # between two samples of memory
STORY_S = 20.0  # limit of the wait for a gateway's log line about a request that has ended
LEAVES_S = 2.0  # a client that hangs up does so within this
REST_S = 60.0  # idle connections close within this; clients close theirs after 30 s
# Of each tenant, at each gateway: about twice what an ordinary tenant sends.
TOKENS_PER_MINUTE = 900_000
MOST_CPU_SHARE = 0.3  # of a core for the hostile actors, whose limit is 0.25
_UNHARMED = frozenset({str(Verdict.RIGHT), str(Verdict.LEFT)})
CLUSTER_FAULT_S = 60.0  # a shorter soak may end before a cluster-wide fault has struck
REST_SOCKETS = 8  # allowed excess at rest over the start: polls open a few at any moment


def limit_tenants(deployment: Deployment) -> Deployment:
    """Every tenant, ordinary or hostile, may send so many tokens, as an operator would decide."""
    limits = TenantSection(max_tokens_per_minute=TOKENS_PER_MINUTE)
    section = msgspec.structs.replace(deployment.gateway, tenant_default=limits)
    return msgspec.structs.replace(deployment, gateway=section)


@dataclass(frozen=True, slots=True)
class SoakOptions:
    seconds: float = 1800.0
    fault_every_s: float = 10.0
    requests_per_s: float = 1.5
    at_once: int = 12  # parallel conversations; a small machine would only queue more
    leaving: float = 0.1  # share of requests whose client hangs up
    shared: float = 0.3  # share of conversations that share their salt, so that they find caches
    seed: int = 0
    faults: bool = True
    kill_workers_s: float | None = None  # between two kills of all workers of all kvds
    actors: Sequence[ActorName] = ()  # hostile actors that run beside the ordinary tenants
    conversations: int = 12  # different ones; a single node computes their answers first
    only: Sequence[str] = ()  # names of the faults that strike; none: all


@dataclass(slots=True)
class SoakCounts:
    """Running totals of requests and faults."""

    asked: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unexcused: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)  # no gateway has logged the end
    unmended: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    killed_workers: int = 0  # beside those of faults
    ttfts_s: list[float] = field(default_factory=list)  # of streamed answers


@dataclass(frozen=True, slots=True)
class Ttft:
    """Time to first token of streamed answers to ordinary tenants, as clients saw it."""

    answers: int
    p50_s: float
    p90_s: float
    p99_s: float

    @staticmethod
    def of(values_s: Sequence[float]) -> Ttft | None:
        if not values_s:
            return None
        p50, p90, p99 = (round(float(q), 4) for q in np.quantile(values_s, (0.5, 0.9, 0.99)))
        return Ttft(len(values_s), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class SoakReport:
    seconds: float
    requests: int
    verdicts: dict[str, int]
    routes: dict[str, int]
    errors: dict[str, int]  # as clients saw them
    wrong: list[str]
    untold: list[str]
    unmended: list[str]  # faults whose node was not in use again in time; no idle end
    faults: dict[str, int]
    skipped: dict[str, int]  # no process was in the right state in time
    growth: dict[str, Growth]  # of the longest run of each process
    grown: list[str]  # processes that grow
    short_lived: list[str]  # processes that never ran long enough to be judged
    sockets: dict[str, tuple[int, int]]  # of each process at rest, before and after the traffic
    checked: list[str]  # kvds whose pools are consistent and hold no lease
    with_faults: bool = True
    ttft: Ttft | None = None
    actors: ActorsReport | None = None  # of a soak with hostile actors
    killed_workers: int | None = None  # of a soak that kills workers beside the faults
    # Failed requests whose gateway and decode node were not down meanwhile, and requests whose
    # gateway did not listen although it was not down.
    unexcused: list[str] = field(default_factory=list)
    with_cluster_faults: bool = False  # cluster-wide faults were among those that could strike

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """Why the soak has failed; empty: it has not."""
        found = {
            "requests are not accounted for": sum(self.verdicts.values()) != self.requests,
            "answers are wrong": self.wrong,
            "requests failed that no fault excuses": self.unexcused,
            "gateways have not logged the end of requests": self.untold,
            "faults are not mended": self.unmended,
            "processes grow": self.grown,
            "sockets are left": [
                name for name, (then, now) in self.sockets.items() if now - then > REST_SOCKETS
            ],
            "no fault has struck": self.with_faults and not self.faults,
            "no cluster-wide fault has struck": self.with_cluster_faults
            and self.seconds >= CLUSTER_FAULT_S
            and not any(map(is_cluster_wide, self.faults)),
            "no worker was killed": self.killed_workers == 0,
            # Without faults, nothing excuses a request that was not answered.
            "requests are lost": not self.with_faults and self.verdicts.keys() - _UNHARMED,
        }
        if self.actors is not None:
            found |= {
                "connections of hostile actors stay open": self.actors.overdue,
                "services met what they do not handle": self.actors.internal_errors,
                "the actors failed": self.actors.failures,
                "the actors took more than their share": self.actors.cpu_share > MOST_CPU_SHARE,
            }
        return [what for what, is_so in found.items() if is_so]


class Soak:
    def __init__(
        self,
        deployment: FaultDeployment,
        lengths: Lengths,
        options: SoakOptions,
        say: Callable[[str], None],
    ) -> None:
        self._deployment = deployment
        self._lengths = lengths
        self._options = options
        self._say = say
        self._random = random.Random(options.seed)  # of the traffic: the same with other faults
        self._fault_draw = random.Random(f"{options.seed} faults")
        self._numbers = count()
        self._clients = Clients(deployment, "soak")
        self._counts = SoakCounts()
        self._mending: Counter[Part] = Counter()
        self._samples: list[Sample] = []
        self._drawn = choose_faults(options.only, len(deployment.layout.homes))

    async def run(self) -> SoakReport:
        options, deployment = self._options, self._deployment
        self._say("computing the expected answers on a single node")
        conversations = await self._conversations()
        await wait_until_idle(deployment)
        before = measure_usage(deployment.processes)
        async with AsyncExitStack() as stack:
            actors: ActorsProcess | None = None
            if options.actors:
                self._say("hostile actors")
                running = running_actors(
                    deployment,
                    attached_prefix(),
                    options.actors,
                    seed=options.seed,
                    with_faults=options.faults,
                )
                actors = await stack.enter_async_context(running)
            began_s = deployment.clock.now()
            until_s = began_s + options.seconds
            every = f"a fault every {options.fault_every_s:g} s" if options.faults else "no faults"
            if options.kill_workers_s is not None:
                every += f", all workers of kvds killed every {options.kill_workers_s:g} s"
            self._say(f"{options.seconds:.0f} s of traffic, {every}")
            async with asyncio.TaskGroup() as group:
                group.create_task(self._traffic(conversations, until_s))
                if options.faults:
                    group.create_task(self._faults(until_s))
                if options.kill_workers_s is not None:
                    group.create_task(self._kill_workers(options.kill_workers_s, until_s))
                group.create_task(self._watch(until_s))
            seconds = deployment.clock.now() - began_s
            seen = await self._seen(actors)
        self._say("waiting until every gateway and kvd is idle")
        counts = self._counts
        checked = []
        try:
            await deployment.until(deployment.in_use)
            await wait_until_idle(deployment)
            checked = deployment.names
        except TimeoutError:
            counts.unmended.append("end of the run: a node is not in use, or a process is not idle")
        sockets = await self._rest(before)
        growth = Growth.of(self._samples)
        return SoakReport(
            round(seconds, 1),
            counts.asked,
            dict(counts.verdicts),
            dict(counts.routes),
            dict(counts.errors),
            counts.wrong,
            counts.untold,
            counts.unmended,
            dict(counts.struck),
            dict(counts.skipped),
            growth,
            [name for name, one in growth.items() if one.grows],
            [name for name, one in growth.items() if not one.judged],
            sockets,
            checked,
            options.faults,
            Ttft.of(counts.ttfts_s),
            seen,
            None if options.kill_workers_s is None else counts.killed_workers,
            counts.unexcused,
            options.faults and any(is_cluster_wide(fault.name) for fault in self._drawn),
        )

    async def _seen(self, actors: ActorsProcess | None) -> ActorsReport | None:
        """The report of the actors. They have ended then."""
        if actors is None:
            return None
        try:
            return await actors.finish()
        except PeerError as error:
            self._counts.unmended.append(str(error))
            return None

    # Traffic --------------------------------------------------------------------------------------

    async def _conversations(self) -> list[list[Question]]:
        """Makes all conversations. Every prompt begins with the previous prompt and its answer."""
        single_node = self._deployment.node((await self._deployment.with_role("decode"))[0])
        return await asyncio.gather(
            *(
                self._conversation(single_node, number)
                for number in range(self._options.conversations)
            )
        )

    async def _conversation(self, single_node: Target, number: int) -> list[Question]:
        draw = random.Random(f"{self._options.seed} {number}")
        short, long = self._lengths.short, self._lengths.long
        turns: list[Question] = []
        for turn in range(TURNS):
            tokens = round(short * (long / 2 / short) ** draw.random())  # log-uniform
            ids = prompt(tokens, f"{self._options.seed} {number} {turn}")
            before = (*turns[-1].ids, *turns[-1].expected) if turns else ()
            whole = (*before, *ids)[:long]
            turns.append(await learn_answer(single_node, whole, draw.choice(OUTPUT_TOKENS)))
        return turns

    async def _traffic(self, conversations: list[list[Question]], until_s: float) -> None:
        draw, options, clock = self._random, self._options, self._deployment.clock
        room = asyncio.Semaphore(options.at_once)
        async with asyncio.TaskGroup() as group:
            while clock.now() < until_s:
                await asyncio.sleep(draw.expovariate(options.requests_per_s / TURNS))
                await room.acquire()
                turns = draw.choice(conversations)
                talking = group.create_task(self._talk(turns, draw.random()))
                talking.add_done_callback(lambda _: room.release())

    async def _talk(self, turns: list[Question], seed: float) -> None:
        draw, options = random.Random(seed), self._options
        shared = draw.random() < options.shared
        salt = "soak" if shared else f"soak {next(self._numbers)}"
        tenant = draw.choice(ORDINARY_TENANTS)
        for question in turns:
            leaves = draw.random() < options.leaving
            stream = draw.random() < 0.5
            asked = await self._clients.ask(
                question,
                gateway=draw.randrange(len(self._deployment.gateways)),
                tenant=tenant,
                stream=stream,
                salt=salt,
                leaves_after_s=draw.uniform(0.0, LEAVES_S) if leaves else None,
            )
            if stream and not leaves and asked.ttft_s is not None:
                self._counts.ttfts_s.append(asked.ttft_s)
            await self._count(asked)
            if asked.verdict is not Verdict.RIGHT:
                return  # the next prompt would need this answer

    async def _count(self, asked: ClientResult) -> None:
        counts = self._counts
        counts.asked += 1
        counts.verdicts[asked.verdict] += 1
        if asked.answer.error is not None:
            counts.errors[asked.answer.error] += 1
        if asked.verdict is Verdict.WRONG:
            counts.wrong.append(str(asked))
        outcome = await self._outcome(asked)
        decode_node = None if outcome is None else outcome.decode
        if not is_explained(asked, decode_node, self._deployment.downtimes):
            counts.unexcused.append(f"{asked}; the gateway logged {outcome}")

    async def _outcome(self, asked: ClientResult) -> RequestOutcome | None:
        """What the gateway has logged about the request."""
        if asked.verdict in (Verdict.LEFT, Verdict.LOST):
            return None  # its gateway may not have received it, or was killed before it logged
        deployment, counts = self._deployment, self._counts
        try:
            async with asyncio.timeout(STORY_S):
                outcome = await deployment.outcomes.of(asked.id)
        except TimeoutError:
            until_s = deployment.clock.now()
            if not deployment.downtimes.include(asked.gateway, asked.answer.sent_s, until_s):
                counts.untold.append(str(asked))
            return None
        counts.routes[outcome.route] += 1
        return outcome

    # Faults ---------------------------------------------------------------------------------------

    async def _faults(self, until_s: float) -> None:
        """Returns after the last fault is repaired."""
        clock, every_s = self._deployment.clock, self._options.fault_every_s
        next_s = clock.now() + every_s
        async with asyncio.TaskGroup() as group:
            while next_s < until_s:
                await asyncio.sleep(max(0.0, next_s - clock.now()))
                next_s += every_s
                # A part that is being repaired is spared, so that requests always have a way.
                possible = [fault for fault in self._drawn if not self._mending[fault.part]]
                if possible:
                    fault = self._fault_draw.choice(draw_from(possible, self._counts.struck))
                    self._mending[fault.part] += 1
                    group.create_task(self._strike(fault))

    async def _strike(self, fault: Fault) -> None:
        deployment, counts = self._deployment, self._counts
        try:
            mend = await strike_when_possible(deployment, fault, MOMENT_S)
        except TimeoutError:
            counts.skipped[fault.name] += 1
        else:
            counts.struck[fault.name] += 1
            self._say(fault.what)
            await asyncio.sleep(fault.lasts_s)
            try:
                await mend()
                await deployment.until(partial(deployment.in_use, self._nodes(fault.part)))
            except (TimeoutError, ChildDied) as error:
                counts.unmended.append(f"{fault.name}: {str(error) or 'not in use again in time'}")
        finally:
            self._mending[fault.part] -= 1

    async def _kill_workers(self, every_s: float, until_s: float) -> None:
        """Costs no request: the link sends again what was not acknowledged. So this is not a fault
        that excuses one, and it does not wait until another fault is repaired."""
        deployment = self._deployment
        next_s = deployment.clock.now() + every_s
        while next_s < until_s:
            await asyncio.sleep(max(0.0, next_s - deployment.clock.now()))
            next_s += every_s
            pids = list(name_workers(deployment.processes).values())
            send_signal(pids, signal.SIGKILL)
            self._counts.killed_workers += len(pids)

    def _nodes(self, part: Part) -> list[str]:
        """Nodes that a fault of this part puts out of use. Other nodes may be out of use for
        another reason."""
        match part:
            case "far":
                return self._deployment.layout.remotes
            case "decode":
                return self._deployment.layout.locals
            case _:
                return []

    # Growth ---------------------------------------------------------------------------------------

    async def _watch(self, until_s: float) -> None:
        while self._deployment.clock.now() < until_s:
            self._samples.append(self._sample())
            await asyncio.sleep(SAMPLE_S)

    async def _rest(self, before: Mapping[str, ResourceUsage]) -> dict[str, tuple[int, int]]:
        """Sockets of every process before and after the traffic. Waits up to `REST_S` until all
        processes run again, and none of them has more sockets than before."""
        now: dict[str, tuple[int, int]] = {}

        async def rested() -> bool:
            now.clear()
            for name, one in measure_usage(self._deployment.processes).items():
                now[name] = (before[name].sockets if name in before else 0, one.sockets)
            return before.keys() <= now.keys() and all(last <= then for then, last in now.values())

        with suppress(TimeoutError):
            await self._deployment.until(rested, REST_S)
        self._counts.unmended += [
            f"end of the run: {name} does not run" for name in before.keys() - now.keys()
        ]
        return now

    def _sample(self) -> Sample:
        return Sample(self._deployment.clock.now(), measure_usage(self._deployment.processes))
