"""The gateway's back, put together: membership, watching, routing, planning, lives of requests.

`running` owns every task and connection of it; the front talks to the `GatewayBackend` it yields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import Clock, MonotonicClock
from prfaas.config import Deployment
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.errors import InputError, RequestError
from prfaas.gateway.decision_log import DecisionLog
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.dispatch.dispatcher import Dispatcher, request_of
from prfaas.gateway.dispatch.handoff import ABORT_S, OPEN_S
from prfaas.gateway.dispatch.retry_budget import RetryBudget
from prfaas.gateway.fleet.polling import Poller
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.long_term_loop import LongTermLoop
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.planning.replication import Replication
from prfaas.gateway.request import GatewayRequest, RequestTrace, Upstream
from prfaas.gateway.router import Router
from prfaas.gateway.status import pace_metric, shown_explanation, shown_plan, shown_state
from prfaas.http_client.client import open_client
from prfaas.planner.problem import Problem
from prfaas.types import ClusterId

CUT_S = 5.0  # for requests that are cut off when the gateway stops to give back what they hold
# For background calls when the gateway stops: a transfer that is being opened, and then its abort.
END_S = OPEN_S + ABORT_S


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What is not in the deployment file."""

    record: Path | None = None  # routing decisions, one JSON line each
    node_key: str | None = None  # sent to nodes and kvds as a bearer token


class GatewayBackend:
    """A `Backend`."""

    def __init__(
        self,
        router: Router,
        lives: Dispatcher,
        moves: PrefixCopies,
        watching: Poller,
        planning: LongTermLoop,
        budget: RetryBudget,
        clock: Clock,
    ) -> None:
        self.router = router
        self._lives = lives
        self._moves = moves
        self._watching = watching
        self._book = planning.book
        self._budget = budget
        self._clock = clock

    def answer(
        self, ask: GatewayRequest, story: RequestTrace
    ) -> AbstractAsyncContextManager[Upstream]:
        return self._lives.answer(ask, story)

    def explain(self, ask: GatewayRequest) -> dict[str, Any]:
        prompt = PromptHashes(ask.token_ids.array, salt=ask.salt, adapter=ask.adapter)
        request = request_of(ask, 0, self._clock.now())
        return shown_explanation(self.router.explain(request, prompt))

    def state(self) -> dict[str, Any]:
        in_flight, now = self._lives.in_flight, self._clock.now()
        return shown_state(self.router, self._book, self._budget, self._moves, in_flight, now)

    def metrics(self) -> Iterator[Metric]:
        yield from self._moves.metrics()
        yield from self._book.metrics(self.router.plan)
        yield pace_metric(self.router)
        yield from self.router.loop_log.metrics()

    def plan(self) -> dict[str, Any]:
        return shown_plan(self.router.plan, self._clock.now())

    def register(self, beat: Heartbeat) -> None:
        known = self.router.members.clusters
        if beat.cluster not in known:
            raise RequestError(
                400,
                "unknown_cluster",
                f"no cluster is named {beat.cluster!r}; there are: {', '.join(known)}",
                param="cluster",
            )
        now = self._clock.now()
        member = self.router.members.registered(beat.kvd_url, ClusterId(beat.cluster), now)
        if member is not None:
            self._watching.watch(member)


@asynccontextmanager
async def running(
    deployment: Deployment,
    problem: Problem,
    options: BackendOptions | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[GatewayBackend]:
    """`problem` is the deployment's, as `cli.wiring.Study.problem` builds it; the policy is
    `deployment.scheduler`'s."""
    options, clock = options or BackendOptions(), clock or MonotonicClock()
    async with AsyncExitStack() as stack:
        recorder = None
        if options.record is not None:
            try:
                recorder = DecisionLog(stack.enter_context(options.record.open("ab")))
            except OSError as error:
                raise InputError(
                    f"cannot write: {error.strerror}", file=options.record, where="--record"
                ) from None
        calls = await stack.enter_async_context(open_client(options.node_key))
        # Ended last, before the connections close: what is ended earlier still starts calls.
        errands = await stack.enter_async_context(BackgroundCalls(END_S))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        router = Router(deployment, problem, clock, recorder)
        budget = RetryBudget()
        watching = Poller(router, calls, clock, tasks)
        moves = PrefixCopies(router, calls, errands, clock)
        rules = deployment.scheduler.moves
        evacuations = Evacuations(router, moves, errands, clock, rules)
        planning = LongTermLoop(router, evacuations, deployment, problem, calls, clock)
        for member in router.members:
            watching.watch(member)
        loops = [tasks.create_task(watching.tick()), tasks.create_task(planning.run())]
        if deployment.gateway.plans:
            replicating = Replication(router, moves, evacuations, clock, rules)
            loops.append(tasks.create_task(replicating.run()))
        lives = Dispatcher(router, calls, errands, moves, budget, clock)
        try:
            yield GatewayBackend(router, lives, moves, watching, planning, budget, clock)
        finally:
            await lives.end(CUT_S)
            for loop in loops:
                loop.cancel()
            watching.end()
