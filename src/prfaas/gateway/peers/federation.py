"""This gateway among the gateways of its deployment, wired together: it polls them, takes part in
the election, and reports to them. `backend.running` runs it where the file has `[[gateways]]`.
"""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.contracts.gateway_api import GatewayReport, NodeLoad
from prfaas.contracts.kvd_api import ClaimPlanning, PlanningLease
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.gateway_work import OthersWork
from prfaas.gateway.homes.fair_access import FairAccess
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.peers.among import AmongGateways
from prfaas.gateway.peers.peers import POLL_S, PeerGateways, PeerRules
from prfaas.gateway.peers.traffic_rows import TrafficRows
from prfaas.gateway.planning.candidacy import RENEW_S
from prfaas.gateway.planning.election import Election
from prfaas.gateway.planning.electors import Electors
from prfaas.gateway.planning.kept_plans import KeptPlans
from prfaas.gateway.router import Router
from prfaas.http_client.client import HttpClient
from prfaas.lateness import LateSince
from prfaas.scheduler.homes.fair_shares import TIME_CONSTANT_S
from prfaas.supervision import repeat
from prfaas.types import ClusterId, NodeId


class Federation:
    def __init__(
        self,
        deployment: Deployment,
        own: ClusterId,
        fleet: Fleet,
        http: HttpClient,
        clock: Clock,
        late_since: LateSince,
        electors: Electors,
        kept: KeptPlans,
    ) -> None:
        self.own = own
        self._fleet = fleet
        self._http = http
        self._kept = kept
        self._clock = clock
        self._rules = deployment.scheduler
        self._instance = secrets.token_hex(16)
        rules = PeerRules(self._rules.replan.window_s, TIME_CONSTANT_S)
        self.peers = PeerGateways(
            deployment.gateways, own, http, clock, fleet.failures, late_since, rules
        )
        self._election = Election(
            self._instance,
            electors.urls,
            self._claim,
            clock,
            lambda: max(self.peers.highest_epoch(), kept.epoch),
            electors.stated,
        )
        self._rows = TrafficRows()
        fleet.work.share_with(self._others_at)

    def coordination(self, traffic: HomeTraffic) -> AmongGateways:
        """`traffic`: of this gateway; the other gateways are told about it from now on."""
        traffic.tell(self._rows.observe)
        return AmongGateways(self.peers, self._election, self._kept, traffic, self._clock)

    async def run(self, router: Router) -> None:
        """Takes part until cancelled."""

        async def watch() -> None:
            self._fleet.work.record_others()
            if router.waiting_room:
                router.retry_waiting()

        failures = self._fleet.failures
        async with asyncio.TaskGroup() as group:
            group.create_task(self.peers.run())
            group.create_task(repeat(self._election.step, RENEW_S, failures, loop="election"))
            group.create_task(repeat(watch, POLL_S, failures, loop="gateways"))

    async def leave(self) -> None:
        """For a clean stop, after `run` has ended: another gateway plans at once."""
        await self._election.give_up()

    def report(self, coordination: AmongGateways, shares: FairAccess, after: int) -> GatewayReport:
        """This gateway, as the others see it."""
        now_s = self._clock.now()
        first, rows = self._rows.rows_after(after, now_s)
        loads = self._fleet.work.own_loads()
        return GatewayReport(
            cluster=self.own,
            instance=self._instance,
            epoch=coordination.majority_epoch,
            plans=coordination.plans,
            loads={str(node): NodeLoad(*load) for node, load in loads.items()},
            uses=shares.uses_of([self.own], now_s),
            draining=tuple(sorted(self._fleet.roles.draining)),
            first_row=first,
            rows=rows,
            followed=coordination.followed,
            drained=tuple(sorted(self._fleet.drained)),
        )

    def _others_at(self, node: NodeId) -> OthersWork:
        return self.peers.others_at(node, self._clock.now())

    async def _claim(self, url: str, claim: ClaimPlanning) -> PlanningLease:
        return await KvdClient(self._http, url, self._fleet.timeouts).claim_planning(claim)

    def state(self, coordination: AmongGateways) -> dict[str, object]:
        """The gateways, for operators."""
        statuses = self.peers.statuses()
        planner = next((status.cluster for status in statuses if status.plans), None)
        own = {
            "cluster": self.own,
            "here": True,
            "alive": True,
            "plans": coordination.plans,
            "followed": coordination.followed,
            "drained": sorted(self._fleet.drained),
        }
        return {
            "gateways": [
                own,
                *({"here": False, **msgspec.to_builtins(status)} for status in statuses),
            ],
            "planner": {
                "cluster": self.own if coordination.plans else planner,
                "epoch": coordination.epoch,
                "here": coordination.plans,
            },
        }
