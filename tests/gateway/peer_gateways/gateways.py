"""Gateways with the real endpoint over sockets, and one that polls them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

from prometheus_client.core import Metric

from prfaas.clock import MonotonicClock
from prfaas.config.deployment import GatewayEntry
from prfaas.contracts.gateway_api import GatewayReport, NodeLoad
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.errors import RequestError
from prfaas.gateway.api.credentials import GatewayCredentials
from prfaas.gateway.peers.peers import PeerGateways, PeerRules
from prfaas.gateway.peers.traffic_rows import TrafficRows
from prfaas.gateway.process import GatewayOptions, serving
from prfaas.gateway.request import CollectedSpans, GatewayRequest, RequestTrace, Upstream
from prfaas.http_client.client import open_client
from prfaas.lateness import never_late
from prfaas.scheduler.explain import Explanation
from prfaas.security.shared_key import SharedKey
from prfaas.supervision import Failures
from prfaas.types import ClusterId
from tests.gateway.api.api_server import deployment

KEY = SharedKey(["the member key of the tests"])
OPERATOR = "Bearer the operator key"
_INSTANCES = count()


class ReportingBackend:
    """A backend without nodes: the gateway serves its report and takes orders, and no requests."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._instance = f"process {next(_INSTANCES)}"
        self._clock = MonotonicClock()
        self.rows = TrafficRows()
        self.drained: frozenset[str] = frozenset()
        self.loads: dict[str, NodeLoad] = {}
        self.followed: tuple[int, int] | None = None
        self.epoch = 0
        self.plans = False
        self.draining: tuple[str, ...] = ()
        self.polls: list[int] = []

    def finish_request(self, new_tokens: int) -> None:
        self.rows.observe(self._clock.now(), new_tokens, 0, 1, 0.0)

    def gateway_report(self, after: int) -> GatewayReport | None:
        self.polls.append(after)
        first, rows = self.rows.rows_after(after, self._clock.now())
        return GatewayReport(
            cluster=self._cluster,
            instance=self._instance,
            epoch=self.epoch,
            plans=self.plans,
            loads=self.loads,
            uses={},
            draining=self.draining,
            first_row=first,
            rows=rows,
            followed=self.followed,
            drained=tuple(self.drained),
        )

    async def drain(self, cluster: str, drained: bool) -> dict[str, Any]:
        raise RequestError(400, "unknown_cluster", "this gateway has no clusters")

    def answer(
        self, request: GatewayRequest, trace: RequestTrace
    ) -> AbstractAsyncContextManager[Upstream]:
        raise RequestError(503, "no_node", "this gateway has no nodes")

    async def collect_spans(self, trace_id: str, nodes: Collection[str]) -> CollectedSpans:
        return CollectedSpans([], [])

    def describe(self, explanation: Explanation) -> dict[str, Any]:
        return {}

    def explain(self, request: GatewayRequest) -> dict[str, Any]:
        return {}

    def unready_reason(self) -> str:
        return "this gateway has no nodes"

    def state(self) -> dict[str, Any]:
        return {}

    def metrics(self) -> list[Metric]:
        return []

    def plan(self) -> dict[str, Any]:
        return {}

    async def register(self, heartbeat: Heartbeat) -> None:
        raise RequestError(503, "no_node", "this gateway has no nodes")


class Gateway:
    """A gateway at one address, which can be killed and started again."""

    def __init__(self, cluster: str, *, key: SharedKey = KEY) -> None:
        self._cluster = cluster
        self._key = key
        self._port = 0
        self._running: AsyncExitStack | None = None
        self.url = ""
        self.backend = ReportingBackend(cluster)

    @property
    def entry(self) -> GatewayEntry:
        return GatewayEntry(self._cluster, self.url)

    async def start(self) -> None:
        self.backend = ReportingBackend(self._cluster)
        operator = SharedKey([OPERATOR.removeprefix("Bearer ")])
        options = GatewayOptions(
            credentials=GatewayCredentials(operator=operator, member=self._key)
        )
        listening = socket.create_server(("127.0.0.1", self._port))
        self._port = listening.getsockname()[1]
        self._running = AsyncExitStack()
        self._running.enter_context(listening)
        self.url = await self._running.enter_async_context(
            serving(deployment(), self.backend, options, MonotonicClock(), listening)
        )

    async def kill(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.aclose()


@asynccontextmanager
async def gateways(*clusters: str, key: SharedKey = KEY) -> AsyncIterator[list[Gateway]]:
    made = [Gateway(cluster, key=key) for cluster in clusters]
    try:
        for gateway in made:
            await gateway.start()
        yield made
    finally:
        for gateway in made:
            await gateway.kill()


@asynccontextmanager
async def polling(
    entries: Sequence[GatewayEntry], own: str = "east", *, key: SharedKey | None = KEY
) -> AsyncIterator[PeerGateways]:
    clock = MonotonicClock()
    failures = Failures(clock)
    async with open_client(key) as http:
        rules = PeerRules(window_s=600.0, decay_s=20.0)
        peers = PeerGateways(entries, ClusterId(own), http, clock, failures, never_late, rules)
        task = asyncio.create_task(peers.run())
        try:
            yield peers
        finally:
            task.cancel()
            await asyncio.wait([task])
    assert task.cancelled() and not failures.counts
