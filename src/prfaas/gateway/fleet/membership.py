"""Who is there: every kvd with its engine, as it last described itself.

Bookkeeping only; `watching` feeds it, the router asks it. A member comes from the deployment file
or registers itself by heartbeat. It counts as alive while kvd and engine answer: one that has been
silent for `DEAD_AFTER_S`, or has just failed a request, is routed to again when it answers; one
that has been silent for `HUNG_AFTER_S` is not waited for, either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.config import Deployment
from prfaas.contracts.kvd_api import KvdReport
from prfaas.gateway.client.node_client import Card, Load
from prfaas.types import ClusterId, Compat, NodeId

log = logging.getLogger(__name__)

DEAD_AFTER_S = 4.0
# It is not only passed over: whoever waits for it gives up. Later than the above, for a busy node
# costs others its speed, and a request that is given up costs its work.
HUNG_AFTER_S = 10.0
FORGOTTEN_AFTER_S = 60.0  # silent ones that had registered themselves


@dataclass(slots=True)
class Member:
    kvd_url: str
    cluster: ClusterId
    listed: bool  # in the deployment file
    url: str | None = None  # of its engine; else as the engine has told the kvd
    via: str | None = None  # of a relay that other clusters use to reach this kvd
    report: KvdReport | None = None
    card: Card | None = None
    load: Load | None = None
    kvd_heard_s: float = -math.inf
    engine_heard_s: float = -math.inf
    engine_failed_s: float = -math.inf  # a request found nobody there
    kvd_failed_s: float = -math.inf
    leaving: bool = False  # its engine finishes what it has, and takes nothing new
    namesake: bool = False  # another one has its name: this one is not listened to

    @property
    def node(self) -> NodeId | None:
        return None if self.report is None else self.report.node

    @property
    def engine_url(self) -> str | None:
        if self.url is not None or self.report is None:
            return self.url
        return next((engine.url for engine in self.report.engines if engine.url), None)

    @property
    def compat(self) -> Compat | None:
        pool = None if self.report is None else self.report.pool
        return None if pool is None else pool.compat

    def kvd_alive(self, now_s: float) -> bool:
        return self.kvd_heard_s > max(now_s - DEAD_AFTER_S, self.kvd_failed_s)

    def alive(self, now_s: float) -> bool:
        return (
            self.compat is not None
            and self.card is not None
            and not self.leaving
            and self.kvd_alive(now_s)
            and self.engine_heard_s > max(now_s - DEAD_AFTER_S, self.engine_failed_s)
        )

    def hung(self, now_s: float, *, engine_alone: bool = False) -> bool:
        """Connections stand, yet nobody is behind them; not of one that was never heard. An answer
        that streams needs the `engine_alone`."""
        heard_s = self.engine_heard_s
        if not engine_alone:
            heard_s = min(heard_s, self.kvd_heard_s)
        return math.isfinite(heard_s) and heard_s < now_s - HUNG_AFTER_S


class Membership:
    def __init__(self, deployment: Deployment) -> None:
        self._members: dict[str, Member] = {}  # by the kvd's address
        self._named: dict[NodeId, Member] = {}
        self._local = ClusterId(deployment.of_kind("pd")[0].name)
        self.clusters = [ClusterId(cluster.name) for cluster in deployment.clusters]
        for cluster in deployment.clusters:
            for node in cluster.nodes:
                kvd_url = node.kvd_url.rstrip("/")
                self._members[kvd_url] = Member(
                    kvd_url, ClusterId(cluster.name), True, node.url.rstrip("/"), node.via
                )

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def named(self, node: NodeId) -> Member | None:
        return self._named.get(node)

    def registered(self, kvd_url: str, cluster: ClusterId, now_s: float) -> Member | None:
        """A member that has not been here before; None when it has."""
        kvd_url = kvd_url.rstrip("/")
        if kvd_url in self._members:
            return None
        log.info("kvd %s has registered for %s", kvd_url, cluster)
        member = self._members[kvd_url] = Member(kvd_url, cluster, False)
        member.kvd_heard_s = now_s
        return member

    def heard(self, member: Member, report: KvdReport, now_s: float) -> bool:
        """Whether it is a new process, which holds nothing. A second kvd of the same name is not
        listened to."""
        other = self.named(report.node)
        if other is not None and other is not member:
            if not member.namesake:
                log.warning("%s: %s is the name of %s", member.kvd_url, report.node, other.kvd_url)
            member.namesake = True
            return False
        member.namesake = False
        fresh = member.report is None or member.report.instance != report.instance
        if member.node is not None:
            del self._named[member.node]  # another process may have another name
        self._named[report.node] = member
        member.report = report
        member.kvd_heard_s = now_s
        return fresh

    def forgotten(self, now_s: float) -> list[Member]:
        """Who registered and has been silent for so long that it is not expected back."""
        since_s = now_s - FORGOTTEN_AFTER_S
        return [m for m in self._members.values() if not m.listed and m.kvd_heard_s < since_s]

    def drop(self, member: Member) -> None:
        del self._members[member.kvd_url]
        if member.node is not None:
            del self._named[member.node]

    def differences(self, member: Member) -> tuple[str, ...]:
        """Why this member's state is of no use to the decode side, or the other way round."""
        reference = self._reference()
        if reference is None or member.compat is None:
            return ()
        return reference.differences(member.compat)

    def _reference(self) -> Compat | None:
        """The decode side's: of the first of its members that has said."""
        return next(
            (m.compat for m in self._members.values() if m.cluster == self._local and m.compat),
            None,
        )
