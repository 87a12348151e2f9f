"""Members of the fleet: every kvd with its engine, as of its latest report.

Bookkeeping only: the poller reports, `Fleet` records, the router reads. A member comes from the
deployment file or registers itself by heartbeat. A member is alive while its kvd and its engine
answer. A member that has been silent for `unresponsive_s`, or has just failed a request, gets no
new requests until it answers again. Requests stop waiting for a member that has been silent for
`hung_s`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.config import Deployment
from prfaas.config.gateway import GatewayTimeouts
from prfaas.contracts.kvd_api import KvdReport
from prfaas.gateway.client.node_client import Card, Load
from prfaas.types import ClusterId, Compat, NodeId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """One kvd and its engine. Only `Fleet` and `Membership` change it."""

    kvd_url: str
    cluster: ClusterId
    listed: bool  # in the deployment file
    # `hung_s` is longer than `unresponsive_s`: passing over a busy node costs other requests its
    # speed, but cancelling a request that waits for it costs the work already done.
    timeouts: GatewayTimeouts
    url: str | None = None  # the engine's, from the deployment file; None: the kvd's report has it
    via: str | None = None  # address of a relay that other clusters use to reach this kvd
    report: KvdReport | None = None
    card: Card | None = None
    load: Load | None = None
    kvd_seen_s: float = -math.inf  # the latest answer
    engine_seen_s: float = -math.inf
    engine_failed_s: float = -math.inf  # the latest request that could not connect
    kvd_failed_s: float = -math.inf
    leaving: bool = False  # the engine drains: it finishes its requests and accepts no new ones
    has_duplicate_name: bool = False  # another member has its name; this one's reports are ignored

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

    def is_kvd_alive(self, now_s: float) -> bool:
        return self.kvd_seen_s > max(now_s - self.timeouts.unresponsive_s, self.kvd_failed_s)

    def is_alive(self, now_s: float) -> bool:
        return (
            self.compat is not None
            and self.card is not None
            and not self.leaving
            and self.is_kvd_alive(now_s)
            and self.engine_seen_s > max(now_s - self.timeouts.unresponsive_s, self.engine_failed_s)
        )

    def has_hung(self, now_s: float, *, engine_only: bool = False) -> bool:
        """Whether the member has been silent for `hung_s`, although its connections may be
        open. False for a member that has never answered. An answer that already streams needs the
        engine only."""
        seen_s = self.engine_seen_s
        if not engine_only:
            seen_s = min(seen_s, self.kvd_seen_s)
        return math.isfinite(seen_s) and seen_s < now_s - self.timeouts.hung_s


class Membership:
    def __init__(self, deployment: Deployment) -> None:
        self._members: dict[str, Member] = {}  # by the kvd's address
        self.timeouts = deployment.gateway.timeouts
        self._by_name: dict[NodeId, Member] = {}
        self._local = ClusterId(deployment.of_kind("pd")[0].name)
        self.clusters = [ClusterId(cluster.name) for cluster in deployment.clusters]
        for cluster in deployment.clusters:
            for node in cluster.nodes:
                kvd_url = node.kvd_url.rstrip("/")
                self._members[kvd_url] = Member(
                    kvd_url,
                    ClusterId(cluster.name),
                    True,
                    self.timeouts,
                    node.url.rstrip("/"),
                    node.via,
                )

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def has(self, kvd_url: str) -> bool:
        return kvd_url.rstrip("/") in self._members

    def named(self, node: NodeId) -> Member | None:
        return self._by_name.get(node)

    def register(self, kvd_url: str, cluster: ClusterId, now_s: float) -> Member | None:
        """Adds a member. Returns None when the kvd is a member already."""
        kvd_url = kvd_url.rstrip("/")
        if kvd_url in self._members:
            return None
        log.info("kvd %s registered for cluster %s", kvd_url, cluster)
        member = self._members[kvd_url] = Member(kvd_url, cluster, False, self.timeouts)
        member.kvd_seen_s = now_s
        return member

    def record_report(self, member: Member, report: KvdReport, now_s: float) -> bool:
        """Returns whether the report is of a new process, which holds nothing. The report of a
        second kvd with the same name is ignored."""
        other = self.named(report.node)
        if other is not None and other is not member:
            if not member.has_duplicate_name:
                log.warning(
                    "ignoring kvd %s: its node name %s belongs to %s",
                    member.kvd_url,
                    report.node,
                    other.kvd_url,
                )
            member.has_duplicate_name = True
            return False
        member.has_duplicate_name = False
        is_new = member.report is None or member.report.instance != report.instance
        if member.node is not None:
            del self._by_name[member.node]  # another process may have another name
        self._by_name[report.node] = member
        member.report = report
        member.kvd_seen_s = now_s
        return is_new

    def expired(self, now_s: float) -> list[Member]:
        """Members that registered themselves and have been silent for `forget_s`."""
        since_s = now_s - self.timeouts.forget_s
        return [m for m in self._members.values() if not m.listed and m.kvd_seen_s < since_s]

    def remove(self, member: Member) -> None:
        del self._members[member.kvd_url]
        if member.node is not None:
            del self._by_name[member.node]

    def is_usable(self, member: Member, now_s: float) -> bool:
        """Whether the member is alive and its KV state is compatible with the decode side's."""
        return member.is_alive(now_s) and not self.differences(member)

    def usable_nodes(self, cluster: ClusterId, now_s: float) -> list[NodeId]:
        return [
            m.node
            for m in self
            if m.cluster == cluster and m.node is not None and self.is_usable(m, now_s)
        ]

    def remote_nodes(self) -> list[NodeId]:
        return [m.node for m in self if m.cluster != self._local and m.node is not None]

    def block_sizes(self) -> set[int]:
        """The block sizes in tokens at which prompts are hashed."""
        return {member.compat.block_tokens for member in self if member.compat}

    def differences(self, member: Member) -> tuple[str, ...]:
        """Why this member's KV state is incompatible with the decode side's; empty: it is not."""
        reference = self._reference()
        if reference is None or member.compat is None:
            return ()
        return reference.differences(member.compat)

    def _reference(self) -> Compat | None:
        """The decode side's format: that of the first PD member that has reported one."""
        return next(
            (m.compat for m in self._members.values() if m.cluster == self._local and m.compat),
            None,
        )
