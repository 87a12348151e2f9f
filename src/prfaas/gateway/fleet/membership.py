"""Members of the fleet: every kvd with its engine, as of its latest report.

Bookkeeping only: the poller reports, `Fleet` records, the router reads. A member comes from the
deployment file or registers itself by heartbeat. A member is alive while its kvd and its engine
answer. A member that is silent, or has just failed a request, gets no new requests until it
answers again, and requests stop waiting for it (`liveness`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prfaas.config import Deployment
from prfaas.config.address import parse_peer_url
from prfaas.contracts.forms import compats_of
from prfaas.contracts.kvd_api import KvdReport
from prfaas.errors import MalformedResponse, PrfaasError
from prfaas.gateway.fleet.formats import Formats
from prfaas.gateway.fleet.member import Member, member_fields, model_of
from prfaas.lateness import LateSince, never_late
from prfaas.types import ClusterId, Compat, NodeId

log = logging.getLogger(__name__)

MOST_REGISTERED = 1024  # members that are not in the deployment file


class TooManyMembers(PrfaasError):
    """So many kvds have registered that no other is accepted until some are forgotten."""


class Membership:
    def __init__(self, deployment: Deployment, late_since: LateSince = never_late) -> None:
        """`late_since` returns how late this gateway was."""
        self._late_since = late_since
        self._members: dict[str, Member] = {}  # by the kvd's address
        self.timeouts = deployment.gateway.timeouts
        self._by_name: dict[NodeId, Member] = {}
        self._homes = frozenset(ClusterId(pd.name) for pd in deployment.of_kind("pd"))
        self.formats = Formats(self.timeouts, self._homes)
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
                    late_since,
                )

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def has(self, kvd_url: str) -> bool:
        return kvd_url.rstrip("/") in self._members

    def at(self, kvd_url: str) -> Member | None:
        return self._members.get(kvd_url)

    def named(self, node: NodeId) -> Member | None:
        return self._by_name.get(node)

    def register(self, kvd_url: str, cluster: ClusterId, now_s: float) -> Member | None:
        """Adds a member. Returns None when the kvd is a member already. Raises `InputError` when
        `kvd_url` is not the URL of a kvd, and `TooManyMembers`."""
        if kvd_url.rstrip("/") in self._members:
            return None
        kvd_url = parse_peer_url(kvd_url, "kvd_url")
        if kvd_url in self._members:
            return None
        if sum(not member.listed for member in self._members.values()) >= MOST_REGISTERED:
            raise TooManyMembers(f"{MOST_REGISTERED} kvds have registered, which is the limit")
        member = self._members[kvd_url] = Member(
            kvd_url, cluster, False, self.timeouts, late_since=self._late_since
        )
        fields = member_fields("registered", member)
        log.info("kvd %s registered for cluster %s", kvd_url, cluster, extra=fields)
        member.kvd_seen_s = now_s
        return member

    def record_report(self, member: Member, report: KvdReport, now_s: float) -> bool:
        """Returns whether the report is of a new process, which holds nothing. Raises
        `MalformedResponse` when a process has changed its name or its KV format.

        A kvd that comes back at another address takes over its name when the old address is silent
        or refuses connections. While both answer, the first keeps the name, and the report of the
        second is ignored; but a member of the deployment file has its name back when it answers. A
        name does not move to another cluster, nor to a kvd that does not serve the model."""
        member.kvd.hear(now_s)
        member.kvd_unreachable = False
        known = member.report
        if known is not None and (known.instance, known.node) != (report.instance, report.node):
            if known.instance == report.instance:
                raise MalformedResponse(f"malformed report: node: the process was {known.node}")
        if (
            known is not None
            and known.instance == report.instance
            and _changes_format(known, report)
        ):
            raise MalformedResponse("malformed report: pool.compat: the process had another format")
        other = self.named(report.node)
        if other is not None and self._may_take_over(other, member, report, now_s):
            log.warning(
                "%s is at %s now, and not at %s",
                report.node,
                member.kvd_url,
                other.kvd_url,
                extra=member_fields("moved", member, report.node),
            )
            # What runs there ends by the verdicts on the old processes (`liveness`).
            other.report, other.card, other.has_duplicate_name = None, None, True
            del self._by_name[report.node]
            other = None
        if other is not None and other is not member:
            if not member.has_duplicate_name:
                log.warning(
                    "ignoring kvd %s: its node name %s belongs to %s",
                    member.kvd_url,
                    report.node,
                    other.kvd_url,
                    extra=member_fields("ignored", member, report.node),
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
        member.problems.pop("kvd", None)
        return is_new

    def _may_take_over(
        self, holder: Member, claimant: Member, report: KvdReport, now_s: float
    ) -> bool:
        if holder is claimant or holder.cluster != claimant.cluster:
            return False
        model = self.formats.model
        if model is not None and model_of(report) != model:
            return False
        if holder.listed != claimant.listed and claimant.listed:
            return True
        return holder.kvd_unreachable or holder.kvd.is_silent(now_s)

    def expired(self, now_s: float) -> list[Member]:
        """Members that registered themselves and have been silent for `forget_s`."""
        return [m for m in self._members.values() if not m.listed and m.is_expired(now_s)]

    def remove(self, member: Member) -> None:
        del self._members[member.kvd_url]
        if member.node is not None:
            del self._by_name[member.node]

    def is_usable(self, member: Member, now_s: float) -> bool:
        """Whether the member is alive and its KV format lets it serve."""
        return member.is_alive(now_s) and self.formats.problem(member) is None

    def usable_nodes(self, cluster: ClusterId, now_s: float) -> list[NodeId]:
        return [
            m.node
            for m in self
            if m.cluster == cluster and m.node is not None and self.is_usable(m, now_s)
        ]

    def expected_nodes(self, cluster: ClusterId, now_s: float) -> list[NodeId]:
        """Nodes that have left on purpose, as for a restart, or have just fallen silent."""
        return [
            m.node
            for m in self
            if m.cluster == cluster
            and m.node is not None
            and (m.is_expected_back(now_s) or m.has_just_fallen_silent(now_s))
        ]

    def format_of(self, node: NodeId) -> Compat | None:
        member = self.named(node)
        return None if member is None else member.compat

    def remote_nodes(self) -> list[NodeId]:
        """The nodes of PrfaaS clusters."""
        return [m.node for m in self if m.cluster not in self._homes and m.node is not None]

    def block_sizes(self) -> frozenset[int]:
        """The block sizes in tokens at which prompts are hashed."""
        return self.formats.block_sizes

    def update_formats(self, now_s: float) -> None:
        """Judges which formats may serve. Called whenever a member may have changed."""
        self.formats.update(list(self._members.values()), now_s)


def _changes_format(known: KvdReport, report: KvdReport) -> bool:
    """A kvd has the formats of its first engine until it exits. A second one may appear later."""
    return any(a != b for a, b in zip(compats_of(known), compats_of(report), strict=False))
