"""All other gateways of the deployment: polls them, and sums up what they report.

Every gateway asks every other one for its `GatewayReport`. A gateway that does not answer is asked
again after the usual interval. What one gateway sends never ends the polls of another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prfaas.clock import Clock
from prfaas.config.deployment import GatewayEntry
from prfaas.contracts.gateway_api import (
    MAX_REPORT_BYTES,
    REPORT_PATH,
    ClusterUse,
    GatewayReport,
)
from prfaas.errors import ConnectionLost, PeerError
from prfaas.gateway.fleet.gateway_work import OthersWork
from prfaas.gateway.peers.peer import Peer, PeerStatus
from prfaas.gateway.peers.traffic_rows import TrafficFollower
from prfaas.http_client.client import HttpClient
from prfaas.lateness import LateSince
from prfaas.scheduler.long_term.traffic import TrafficHistory
from prfaas.supervision import Failures, repeat
from prfaas.types import ClusterId, NodeId

POLL_S = 0.25
ANSWER_S = 1.0  # for one report
_POLL_LIMIT_S = 2 * ANSWER_S  # with the time to connect


@dataclass(frozen=True, slots=True)
class PeerRules:
    window_s: float  # of the requests that a history keeps (`scheduler.replan.window_s`)
    decay_s: float  # time constant of the use of PrfaaS clusters


class PeerGateways:
    def __init__(
        self,
        entries: Sequence[GatewayEntry],
        own: ClusterId,
        http: HttpClient,
        clock: Clock,
        failures: Failures,
        late_since: LateSince,
        rules: PeerRules,
    ) -> None:
        """`entries`: all of the deployment file; that of the cluster `own` is this gateway. `http`
        sends the member key."""
        self._http = http
        self._clock = clock
        self._failures = failures
        self._decay_s = rules.decay_s
        started_s = clock.now()
        self._peers = [
            Peer(
                entry,
                TrafficFollower(TrafficHistory(started_s, rules.window_s), started_s),
                late_since,
            )
            for entry in entries
            if entry.cluster != own
        ]

    async def run(self) -> None:
        """Polls until cancelled."""
        async with asyncio.TaskGroup() as group:
            for peer in self._peers:
                step = partial(self._poll, peer)
                group.create_task(repeat(step, POLL_S, self._failures, loop="poll_gateway"))

    # What the others report -----------------------------------------------------------------------

    def others_at(self, node: NodeId, now_s: float) -> OthersWork:
        """The sum over the gateways that are alive."""
        prefills, work_s, decodes = 0, 0.0, 0
        for peer in self._peers:
            load = peer.load_at(node, now_s)
            if load is not None:
                prefills += load.prefills
                work_s += load.work_s
                decodes += load.decodes
        return OthersWork(prefills, work_s, decodes)

    def uses_of(self, cluster: ClusterId, now_s: float) -> Mapping[ClusterId, ClusterUse]:
        """By home, of the gateways that are alive."""
        found = {peer.cluster: peer.use_of(cluster, now_s, self._decay_s) for peer in self._peers}
        return {home: use for home, use in found.items() if use is not None}

    @property
    def traffic(self) -> Mapping[ClusterId, TrafficHistory]:
        """By home. Every other home has a history, also before its gateway has answered."""
        return {peer.cluster: peer.follower.history for peer in self._peers}

    def highest_epoch(self) -> int:
        """Of the gateways that are alive: what others have said before does not count for ever."""
        now_s = self._clock.now()
        reports = [peer.report for peer in self._peers if peer.is_alive(now_s)]
        return max((report.epoch for report in reports if report is not None), default=0)

    def statuses(self) -> list[PeerStatus]:
        """Of all other gateways, also of those that have never answered."""
        now_s = self._clock.now()
        return [peer.status(now_s) for peer in self._peers]

    def living(self) -> list[PeerStatus]:
        return [status for status in self.statuses() if status.alive]

    # Polling --------------------------------------------------------------------------------------

    async def _poll(self, peer: Peer) -> None:
        after = peer.follower.after
        try:
            report = await self._ask(peer.url, after)
            peer.receive(report, after, self._clock.now())
        except PeerError as error:
            peer.record_problem(error)

    async def _ask(self, url: str, after: int) -> GatewayReport:
        try:
            # The client's limit excludes connecting, and does not count a pause of this process.
            async with asyncio.timeout(_POLL_LIMIT_S):
                return await self._http.request_json(
                    "GET",
                    f"{url}{REPORT_PATH}?after={after}",
                    GatewayReport,
                    timeout_s=ANSWER_S,
                    max_bytes=MAX_REPORT_BYTES,
                )
        except TimeoutError:
            raise ConnectionLost(f"{url}: no answer within {_POLL_LIMIT_S:g} s") from None
