"""`bench lost_clusters`: its requests, and the judgement of each of them.

Every request has an id of its own. The gateways log the node that has decoded it under this id, so
that a request which fails is excused only where its gateway or its decode node was killed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from prfaas.clock import Clock
from prfaas.launch.request_outcomes import RequestOutcome, parse_outcome
from prfaas.measure.client import Target
from prfaas.measure.open_loop import RequestTemplate, prompt_parts
from prfaas.measure.prompts import PromptGenerator
from prfaas.planner.workload import Workload
from prfaas.sim.arrivals import Arrivals, poisson

DETECTION_S = 5.0  # after which gateways send no request to a killed node
LIMIT_S = 180.0  # for one request; one that takes longer has no outcome
LINES_EVERY_S = 0.1
LINES_S = 10.0  # for the gateways' lines of requests that have ended
CHANCE = 2.0  # standard deviations of the number of requests in a window
ID = "lost-"  # ids of requests begin with it

Verdict: TypeAlias = Literal["completed", "excused", "unclear", "failed"]


@dataclass(slots=True)
class Asked:
    """One request, as its client sees it. Times are on the benchmark's clock."""

    id: str
    home: str
    sent_s: float
    tokens: int  # that the answer has to have
    first_s: float | None = None
    ended_s: float | None = None  # None: it has no outcome
    got_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s


class Loss(NamedTuple):
    """Processes that were killed: the nodes of a cluster, or a gateway."""

    cluster: str
    what: Literal["nodes", "gateway"]
    from_s: float
    until_s: float  # when all of them accepted requests again

    def touches(self, asked: Asked) -> bool:
        """Whether the loss may be why the request has failed: the request was under way at the
        kill, or was sent to a killed gateway, or so soon after the kill of nodes that its gateway
        could not know of it."""
        ended_s = float("inf") if asked.ended_s is None else asked.ended_s
        last_s = self.until_s
        if self.what == "nodes":
            last_s = min(last_s, self.from_s + DETECTION_S)
        return asked.sent_s <= last_s and ended_s >= self.from_s


# Judgement ----------------------------------------------------------------------------------------


def has_clear_error(asked: Asked, *, gateway_killed: bool) -> bool:
    """Whether the client was told that its request failed: by an OpenAI error body or event, or by
    a connection that its killed gateway has refused or closed."""
    error = asked.error or ""
    if gateway_killed and error.startswith(("cannot connect", "connection lost", "stream cut")):
        return True
    # "HTTP 503" or "stream failed", followed by the code of an OpenAI error.
    return len(error.split()) > 2 and error.startswith(("HTTP ", "stream failed "))


def judge(
    asked: Asked,
    line: RequestOutcome | None,
    losses: Iterable[Loss],
    cluster_of: Mapping[str, str],
) -> Verdict:
    """`line`: what its gateway has logged. `cluster_of`: the clusters of the nodes, by name."""
    whole = asked.error is None and asked.ended_s is not None
    if whole and asked.first_s is not None and asked.got_tokens == asked.tokens:
        return "completed"
    touching = [loss for loss in losses if loss.touches(asked)]
    at_gateway = any(loss.what == "gateway" and loss.cluster == asked.home for loss in touching)
    decoded = None if line is None else cluster_of.get(line.decode)
    at_node = any(loss.what == "nodes" and loss.cluster == decoded for loss in touching)
    if not at_gateway and not at_node:
        return "failed"
    clear = asked.ended_s is not None and has_clear_error(asked, gateway_killed=at_gateway)
    return "excused" if clear else "unclear"


@dataclass(frozen=True, slots=True)
class Tally:
    """The verdicts on the requests of one load."""

    requests: int
    completed: int
    excused: int
    excused_before_tokens: int  # of the excused: those without a first token
    unclear: list[str]  # excused by a loss, but without a clear error
    failed: list[str]
    errors: dict[str, int]  # of the excused


def tally(
    asked: Sequence[Asked],
    lines: Mapping[str, RequestOutcome],
    losses: Collection[Loss],
    cluster_of: Mapping[str, str],
) -> Tally:
    found: dict[Verdict, list[Asked]] = {
        "completed": [],
        "excused": [],
        "unclear": [],
        "failed": [],
    }
    for one in asked:
        found[judge(one, lines.get(one.id), losses, cluster_of)].append(one)
    excused = found["excused"]
    return Tally(
        requests=len(asked),
        completed=len(found["completed"]),
        excused=len(excused),
        excused_before_tokens=sum(one.first_s is None for one in excused),
        unclear=[described(one, lines.get(one.id)) for one in found["unclear"]],
        failed=[described(one, lines.get(one.id)) for one in found["failed"]],
        errors=dict(Counter(str(one.error) for one in excused)),
    )


def described(asked: Asked, line: RequestOutcome | None) -> str:
    """One request that has failed, for a reader who looks for the cause."""
    error = asked.error
    if error is None:
        error = "no outcome" if asked.ended_s is None else f"{asked.got_tokens} tokens"
    text = f"{asked.id} of {asked.home}: {error} (of {asked.tokens} tokens)"
    if line is None:
        return f"{text}; its gateway has logged nothing"
    why = "; ".join([line.error, *line.failures][:3])
    return f"{text}; decoded at {line.decode or 'no node'}, {line.attempts} attempts: {why}"


# Rates --------------------------------------------------------------------------------------------


def keeps_up(asked: Iterable[Asked], from_s: float, until_s: float, least: float) -> bool:
    """Whether the first tokens of some seconds are at least `least` of the requests of the same
    seconds, but for chance: both are counts of independent events, which differ by about the square
    root of their number. Seconds without a request show nothing, and do not keep up."""
    sent = first = 0
    for one in asked:
        sent += from_s < one.sent_s <= until_s
        first += one.first_s is not None and from_s < one.first_s <= until_s
    return sent > 0 and first >= least * sent - CHANCE * math.sqrt(sent)


def rate_back_at(
    asked: Sequence[Asked], from_s: float, until_s: float, window_s: float, least: float
) -> float | None:
    """The first time from `from_s` on at which the first tokens of the last `window_s` keep up with
    the requests, and do so until `until_s`. None: there is no such time."""
    back_s: float | None = None
    for at_s in reversed(np.arange(from_s, until_s, 0.5).tolist()):
        if not keeps_up(asked, at_s - window_s, at_s, least):
            break
        back_s = at_s
    return back_s


def ttft_quantile(asked: Iterable[Asked], share: float) -> float:
    waits = [one.ttft_s for one in asked if one.ttft_s is not None]
    return float(np.quantile(waits, share)) if waits else float("nan")


# Sending ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GatewayLines:
    """What the gateways have logged about requests, by id."""

    found: dict[str, RequestOutcome] = field(default_factory=dict)

    def read_line(self, line: str) -> None:
        outcome = parse_outcome(line)
        if outcome is not None and outcome.id.startswith(ID):
            self.found[outcome.id] = outcome

    async def wait_for(self, ids: Collection[str]) -> None:
        """Returns when there is a line for each, or after `LINES_S`: a killed gateway has written
        none for the requests that it had."""
        try:
            async with asyncio.timeout(LINES_S):
                while True:
                    if all(one in self.found for one in ids):
                        return
                    await asyncio.sleep(LINES_EVERY_S)
        except TimeoutError:
            pass


@dataclass(slots=True)
class Load:
    """Poisson requests to the gateways of all homes, from `start` to `stop`. Loads with the same
    seed and rates have the same arrival times and prompts, and share no cached prefix."""

    targets: Mapping[str, Target]
    workloads: Mapping[str, Workload]
    model: str
    clock: Clock
    seed: int
    asked: list[Asked] = field(default_factory=list)
    _senders: list[asyncio.Task[None]] = field(default_factory=list)
    _under_way: set[asyncio.Task[None]] = field(default_factory=set)
    _prompts: PromptGenerator = field(default_factory=PromptGenerator)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    # Part of the ids, so that the gateways' lines about an earlier load are not taken for this one.
    _name: str = field(default_factory=lambda: secrets.token_hex(4))

    def start(self, rates_rps: Mapping[str, float], most_s: float) -> None:
        """Begins to send. No request is sent after `most_s`."""
        template = RequestTemplate(self.model, salt=secrets.token_hex(8))
        for home, rps in sorted(rates_rps.items()):
            number = sorted(self.workloads).index(home)
            count = int(rps * most_s * 1.5) + 20  # more than arrive in that time
            arrivals = poisson(self.workloads[home], rps, count, self.seed + number)
            self._senders.append(
                asyncio.create_task(self._send_all(home, arrivals, template, most_s, number))
            )

    async def sent(self) -> None:
        """Returns when every request has been sent. Raises the error of a sender."""
        await asyncio.gather(*self._senders)

    async def _send_all(
        self, home: str, arrivals: Arrivals, template: RequestTemplate, most_s: float, seed: int
    ) -> None:
        began_s = self.clock.now()
        for number, at_s in enumerate(arrivals.at_s.tolist()):
            if at_s > most_s:
                return
            prompt = self._prompts.text(prompt_parts(arrivals, number, seed=seed))
            tokens = int(arrivals.output_tokens[number])
            await asyncio.sleep(max(0.0, began_s + at_s - self.clock.now()))
            request_id = f"{ID}{self._name}-{next(self._numbers)}"
            one = Asked(request_id, home, self.clock.now(), max(1, tokens))
            self.asked.append(one)
            task = asyncio.create_task(self._send(one, template.body(prompt, tokens)))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _send(self, one: Asked, body: bytes) -> None:
        def received() -> None:
            if one.first_s is None:
                one.first_s = self.clock.now()

        found = await self.targets[one.home].complete(body, LIMIT_S, one.id, on_tokens=received)
        one.error = found.error
        one.got_tokens = found.output_tokens or len(found.token_ids)
        one.ended_s = found.ended_s

    async def stop(self, *, give_up: Collection[str] = ()) -> None:
        """Sends no more, and waits until every request has ended. Requests of the homes `give_up`
        that are under way are cancelled: they have no outcome. Raises the error of a sender.
        """
        for sender in self._senders:
            sender.cancel()
        ended = await asyncio.gather(*self._senders, return_exceptions=True)
        self._senders.clear()
        for error in ended:
            if isinstance(error, Exception):  # which a cancelled task has not
                raise error
        waiting = [one for one in self.asked if one.ended_s is None and one.home not in give_up]
        while any(one.ended_s is None for one in waiting) and self._under_way:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        for task in list(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
