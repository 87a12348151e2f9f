"""The gateway's backend, wired together: fleet, polling, routing, planning, dispatch.

`running` owns all its tasks and connections; `api` calls the `GatewayBackend` that it yields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from prfaas.cache.hashing import PromptHashes
from prfaas.clock import Clock, MonotonicClock
from prfaas.config import Deployment
from prfaas.config.address import parse_peer_url
from prfaas.contracts.gateway_api import GatewayReport
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.errors import InputError, RequestError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.console.scenes import GatewayScenes
from prfaas.gateway.dispatch.attempts import RetryBudget
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.dispatch.dispatcher import Dispatcher, routed_request
from prfaas.gateway.dispatch.handoff import HandOffs
from prfaas.gateway.fleet.admission import Admission
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.membership import TooManyMembers
from prfaas.gateway.fleet.polling import Poller
from prfaas.gateway.following.collection import SpanCollector
from prfaas.gateway.home_services import HomeServices
from prfaas.gateway.homes.fair_access import FairAccess
from prfaas.gateway.homes.request_homes import RequestHomes
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.peers.federation import Federation
from prfaas.gateway.planning.coordination import Alone, Coordination
from prfaas.gateway.planning.drains import Drains, record_name
from prfaas.gateway.planning.electors import Electors
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.kept_plans import PLAN, KeptPlans
from prfaas.gateway.planning.long_term_loop import LongTermLoop
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.planning.record_keeping import RecordKeeping
from prfaas.gateway.planning.replication import Replication
from prfaas.gateway.planning.role_changes import RoleChanges
from prfaas.gateway.request import CollectedSpans, GatewayRequest, RequestTrace, Upstream
from prfaas.gateway.router import Router
from prfaas.gateway.short_term_loop import run_short_term_loop
from prfaas.gateway.status import GatewayStatus
from prfaas.gateway.tenants import Tenants
from prfaas.http_client.client import open_client
from prfaas.lateness import BEAT_S, Lateness
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.homes.plans import as_network, home_name
from prfaas.scheduler.homes.round_trips import round_trips
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import TlsIdentity
from prfaas.supervision import repeat
from prfaas.types import ClusterId

RECORDS_S = 0.25  # between two steps of the planning records


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options that are not in the deployment file."""

    member_key: SharedKey | None = None  # sent to nodes and kvds as a bearer token
    tls: TlsIdentity | None = None  # for calls to nodes and kvds
    # The PD cluster whose requests this gateway receives; None: those of all PD clusters.
    cluster: ClusterId | None = None


class GatewayBackend:
    """The `Backend` of a running gateway."""

    # limits: the parts of the gateway that its API serves
    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        dispatcher: Dispatcher,
        poller: Poller,
        admission: Admission,
        status: GatewayStatus,
        clock: Clock,
        drains: Drains,
        report: Callable[[int], GatewayReport] | None,
        scenes: GatewayScenes,
        collector: SpanCollector,
    ) -> None:
        """`report`: what the other gateways are told; None: there are none."""
        self.scenes = scenes
        self.fleet = fleet
        self.router = router
        self.dispatcher = dispatcher
        self._homes = dispatcher.homes
        self._drains = drains
        self._report = report
        self._poller = poller
        self._admission = admission
        self._status = status
        self._clock = clock
        self._collector = collector

    def answer(
        self, request: GatewayRequest, trace: RequestTrace
    ) -> AbstractAsyncContextManager[Upstream]:
        return self.dispatcher.answer(request, trace)

    def explain(self, request: GatewayRequest) -> dict[str, Any]:
        prompt = PromptHashes(request.token_ids.array, salt=request.salt, adapter=request.adapter)
        routed = routed_request(request, 0, self._clock.now())
        home = self._homes.of(request, prompt, take=False)
        return self._status.describe_route(self.router.explain(routed, prompt, home))

    def unready_reason(self) -> str:
        return self._status.unready_reason()

    def state(self) -> dict[str, Any]:
        found = self._status.state(self.dispatcher.in_flight)
        for cluster in found["clusters"]:
            cluster["order_kept"] = self._drains.is_kept(cluster["cluster"])
        return found

    def metrics(self) -> Iterator[Metric]:
        return self._status.metrics()

    def plan(self) -> dict[str, Any]:
        return self._status.plan()

    async def collect_spans(self, trace_id: str, nodes: Collection[str]) -> CollectedSpans:
        return await self._collector.collect(trace_id, nodes)

    def describe(self, explanation: Explanation) -> dict[str, Any]:
        return self._status.describe_route(explanation)

    def gateway_report(self, after: int) -> GatewayReport | None:
        return None if self._report is None else self._report(after)

    async def drain(self, cluster: str, drained: bool) -> dict[str, Any]:
        self._check_cluster(cluster)
        kept = await self._drains.order(ClusterId(cluster), drained)
        return {"cluster": cluster, "drained": drained, "kept": kept}

    def _check_cluster(self, name: str) -> None:
        known = self.fleet.members.clusters
        if name not in known:
            raise RequestError(
                400,
                "unknown_cluster",
                f"no cluster is named {name!r}; there are: {', '.join(known)}",
                param="cluster",
            )

    async def register(self, heartbeat: Heartbeat) -> None:
        self._check_cluster(heartbeat.cluster)
        try:
            kvd_url = parse_peer_url(heartbeat.kvd_url, "kvd_url")
            if any(self.fleet.members.has(url) for url in (kvd_url, heartbeat.kvd_url)):
                return
            await self._admission.approve(kvd_url)
            member = self.fleet.register(kvd_url, ClusterId(heartbeat.cluster))
        except InputError as error:
            raise RequestError(400, "invalid_request", str(error), param=error.where) from None
        except TooManyMembers as error:
            after_s = self.fleet.timeouts.forget_s
            raise RequestError(
                503, "overloaded", str(error), param="kvd_url", retry_after_s=after_s
            ) from None
        if member is not None:
            self._poller.start(member)


@asynccontextmanager
async def running(
    deployment: Deployment,
    problem: Problem | NetworkProblem,
    options: BackendOptions | None = None,
    clock: Clock | None = None,
    tenants: Tenants | None = None,
) -> AsyncIterator[GatewayBackend]:
    """`studies.problem_files.Study.problem` builds `problem` from the deployment, or
    `studies.network_plans.NetworkStudy.network` where there are several PD clusters. The policy is
    that of `deployment.scheduler`. `tenants` is also the API's; without it there is one tenant."""
    options, clock = options or BackendOptions(), clock or MonotonicClock()
    tenants = tenants or Tenants(deployment.gateway)
    async with AsyncExitStack() as stack:
        timeouts = deployment.gateway.timeouts
        tls = options.tls.client if options.tls is not None else None
        name = options.tls.server_name if options.tls is not None else None
        http = await stack.enter_async_context(
            open_client(options.member_key, timeouts.connect_s, tls, name)
        )
        strangers = await stack.enter_async_context(
            open_client(None, timeouts.connect_s, tls, name)
        )
        # Ends last, before the connections close: the parts that end earlier still start calls.
        # Long enough for a transfer that is being opened, and then for its abort.
        end_s = timeouts.open_s + timeouts.kvd_call_s
        background_calls = await stack.enter_async_context(BackgroundCalls(end_s))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        lateness = Lateness(clock.now())
        network = as_network(problem)

        def late_since(since_s: float) -> float:
            return lateness.since(since_s, clock.now())

        fleet = Fleet(deployment, network, clock, late_since)
        router = Router(fleet, deployment.scheduler, clock, deployment.gateway, tenants)
        poller = Poller(fleet, http, clock, tasks)
        copies = PrefixCopies(fleet, http, background_calls, clock)
        rules = deployment.scheduler.moves
        evacuations = Evacuations(fleet, copies, background_calls, clock, rules)
        shares = {home_name(home): home.share for home in network.homes}
        traffic = HomeTraffic(shares, clock.now(), deployment.scheduler.replan.window_s)
        electors = Electors(deployment, fleet.members)
        among_gateways = bool(deployment.gateways) and options.cluster is not None
        names = (PLAN, *(record_name(cluster) for cluster in fleet.members.clusters))
        records = RecordKeeping(
            electors,
            names,
            lambda url: KvdClient(http, url, timeouts),
            clock,
            leased=PLAN if among_gateways else "",
        )
        drains = Drains(fleet.members.clusters, records, clock, fleet.set_drained)
        kept = KeptPlans(records, deployment, network, clock)
        federation: Federation | None = None
        coordination: Coordination = Alone(
            traffic.histories,
            kept,
            plans=deployment.gateway.plans,
            # A gateway that advises has planned for the stated traffic, and would keep a plan
            # for nodes that have changed since.
            resumes=not deployment.gateway.advise,
        )
        report: Callable[[int], GatewayReport] | None = None
        queue_s = deployment.scheduler.adaptive.queue_s
        fair = FairAccess(fleet, router.waiting_room, queue_s, clock)
        if among_gateways and options.cluster is not None:
            federation = Federation(
                deployment, options.cluster, fleet, http, clock, late_since, electors, kept
            )
            coordination = among = federation.coordination(traffic)
            fair = FairAccess(fleet, router.waiting_room, queue_s, clock, federation.peers.uses_of)
            report = partial(federation.report, among, fair)
        between_homes = round_trips(deployment) if len(network.homes) > 1 else {}
        if len(network.homes) > 1:
            router.serve_several(fair, between_homes, options.cluster)
        helpers = between_homes if router.rules.decode_elsewhere else ()
        services = HomeServices(fleet, lambda: router.plans, clock, helpers)
        router.why_unserved = services.why_unserved
        roles = RoleChanges(fleet, evacuations, http, coordination)
        planning = LongTermLoop(fleet, router, roles, deployment, network, clock, coordination)
        for member in fleet.members:
            poller.start(member)
        loops = [
            tasks.create_task(_measure_lateness(lateness, fleet, clock)),
            tasks.create_task(run_short_term_loop(fleet, router, poller)),
            tasks.create_task(poller.watch()),
            tasks.create_task(planning.run()),
            tasks.create_task(_keep_records(records, drains, fleet)),
        ]
        if deployment.gateway.plans:
            replication = Replication(fleet, copies, evacuations, clock, rules)
            loops.append(tasks.create_task(replication.run()))
        if federation is not None:
            loops.append(tasks.create_task(federation.run(router)))
        budget = RetryBudget(max_attempts=deployment.gateway.max_attempts)
        hand_offs = HandOffs(fleet, http, background_calls, copies, clock)
        homes = RequestHomes(router, shares, options.cluster)
        dispatcher = Dispatcher(router, hand_offs, budget, traffic, homes, clock)
        gateways = None if federation is None else partial(federation.state, among)
        status = GatewayStatus(
            fleet, router, planning, budget, copies, clock, traffic, services, gateways
        )
        scenes = GatewayScenes(
            fleet, router, status, copies, lambda: dispatcher.in_flight, clock, services, gateways
        )
        admission = Admission(
            options.member_key, strangers, timeouts.kvd_call_s, has_tls=options.tls is not None
        )
        try:
            yield GatewayBackend(
                fleet,
                router,
                dispatcher,
                poller,
                admission,
                status,
                clock,
                drains,
                report,
                scenes,
                SpanCollector(fleet, http),
            )
        finally:
            await dispatcher.end(timeouts.cancel_s)
            for loop in loops:
                loop.cancel()
            poller.stop()
            if federation is not None:
                await asyncio.wait(loops)  # the election's last step
                await federation.leave()


async def _keep_records(records: RecordKeeping, drains: Drains, fleet: Fleet) -> None:
    async def step() -> None:
        await records.step()
        drains.step()

    await repeat(step, RECORDS_S, fleet.failures, loop="records")


async def _measure_lateness(lateness: Lateness, fleet: Fleet, clock: Clock) -> None:
    """A task, not a thread: what counts is when this event loop could have read an answer."""

    async def beat() -> None:
        lateness.beat(clock.now())

    await repeat(beat, BEAT_S, fleet.failures, loop="lateness")
