"""One other gateway, as of its latest report. Bookkeeping only: the caller passes the time."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from prfaas.config.deployment import GatewayEntry
from prfaas.contracts.gateway_api import ClusterUse, GatewayReport, NodeLoad
from prfaas.errors import HttpError, PeerError
from prfaas.gateway.peers.traffic_rows import TrafficFollower
from prfaas.lateness import LateSince
from prfaas.supervision import one_line
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)

OVERDUE_S = 0.75  # work that is left at a node whose prefill should have ended
ALIVE_S = 1.5  # since the latest report; two polls may be lost


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """One other gateway, for `/prfaas/v1/state` and for changes of roles."""

    cluster: ClusterId
    url: str
    alive: bool
    plans: bool  # it is alive and holds the planning lease
    instance: str  # of its process; empty before its first report
    followed: tuple[int, int] | None  # epoch and number of the plan that it follows
    draining: frozenset[str]  # nodes that get no new requests of it
    drained: frozenset[str]  # clusters that it has out of use, by an operator's order
    problem: str  # why the latest poll failed; empty after a success


class Peer:
    def __init__(
        self, entry: GatewayEntry, follower: TrafficFollower, late_since: LateSince
    ) -> None:
        self.cluster = ClusterId(entry.cluster)
        self.url = entry.url.rstrip("/")
        self.follower = follower
        self.report: GatewayReport | None = None  # the latest
        self._heard_s = -math.inf  # when it arrived
        self._late_since = late_since
        self._problem = ""
        self._logged: tuple[str, int] | None = None  # kind of the problem that was logged last

    def receive(self, report: GatewayReport, after: int, now_s: float) -> None:
        """`after`: the number that the poll sent. Raises `PeerError` when the report is another
        gateway's."""
        if report.cluster != self.cluster:
            raise PeerError(
                f"it is the gateway of {report.cluster!r}, and its entry in `gateways` names "
                f"{self.cluster!r}; its reports are ignored until the deployment file is corrected"
            )
        self.follower.receive(report, after, now_s)
        self.report, self._heard_s = report, now_s
        if self._logged is not None:
            log.info("the gateway of %s at %s answers", self.cluster, self.url)
        self._problem, self._logged = "", None

    def record_problem(self, error: PeerError) -> None:
        """Logs the reason, once for each kind of problem: the next poll usually fails alike."""
        self._problem = one_line(str(error))
        kind = type(error).__name__, error.status if isinstance(error, HttpError) else 0
        if kind != self._logged:
            log.warning(
                "the gateway of %s at %s does not answer as it should: %s",
                *(self.cluster, self.url, self._problem),
            )
        self._logged = kind

    def is_alive(self, now_s: float) -> bool:
        silence_s = now_s - self._heard_s
        if silence_s <= ALIVE_S:
            return True  # the usual case, many times for each request
        # Reports that this gateway could not read in time are no silence of the peer.
        return math.isfinite(silence_s) and silence_s - self._late_since(self._heard_s) <= ALIVE_S

    def load_at(self, node: NodeId, now_s: float) -> NodeLoad | None:
        """What the gateway has at the node, less the work that is done since its report. None:
        nothing, or the gateway is not alive."""
        found = None if self.report is None else self.report.loads.get(node)
        if found is None or not self.is_alive(now_s):
            return None
        left_s = max(found.work_s - max(now_s - self._heard_s, 0.0), 0.0)
        if found.prefills and not left_s:
            left_s = OVERDUE_S  # it takes longer than predicted, and keeps its node busy
        return NodeLoad(found.prefills, left_s, found.decodes)

    def use_of(self, cluster: ClusterId, now_s: float, decay_s: float) -> ClusterUse | None:
        """What the gateway's home takes of the PrfaaS cluster, decayed since its report. None:
        nothing, or the gateway is not alive."""
        found = None if self.report is None else self.report.uses.get(cluster)
        if found is None or not self.is_alive(now_s):
            return None
        left = math.exp(-max(now_s - self._heard_s, 0.0) / decay_s)
        return ClusterUse(found.used_s * left, found.wants)

    def status(self, now_s: float) -> PeerStatus:
        alive, report = self.is_alive(now_s), self.report
        return PeerStatus(
            cluster=self.cluster,
            url=self.url,
            alive=alive,
            plans=alive and report is not None and report.plans,
            instance="" if report is None else report.instance,
            followed=None if report is None else report.followed,
            draining=frozenset() if report is None else frozenset(report.draining),
            drained=frozenset() if report is None else frozenset(report.drained),
            problem=self._problem,
        )
