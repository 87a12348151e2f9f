"""One member of the fleet, as of its latest answers: a kvd and its engine.

A process is *silent* when it was asked something that it can answer at once, and nothing has
arrived from it since for `silent_s`. Bytes of any response count, not only the answer. The time in
which the gateway itself was late does not count. A process that was not asked is not silent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from prfaas.config.gateway import GatewayTimeouts
from prfaas.contracts.forms import compats_of
from prfaas.contracts.kvd_api import KvdReport, PoolReport
from prfaas.gateway.client.node_client import Card, Load
from prfaas.lateness import LateSince, never_late
from prfaas.service.logging import with_fields
from prfaas.types import ClusterId, Compat, NodeId

Part: TypeAlias = Literal["kvd", "engine"]

# A process on a busy machine answers late before it does not answer in time. It may take so many
# times as long as the slowest of its recent answers before it counts as silent.
_LATE_FACTOR = 3.0
_REMEMBERED_S = 30.0  # late answers of this time, and of the same time before


def model_of(report: KvdReport) -> str | None:
    """The model's name and layers; None while the kvd has no engine. Formats of one model may
    differ in all else: a revision, a layout, a number format."""
    if report.pool is None:
        return None
    layers = Counter[str]()
    for group in report.pool.groups:
        layers[group.kind] += len(group.layers)
    counted = ", ".join(f"{layers[kind]} {kind}" for kind in sorted(layers))
    return f"{report.pool.compat.model} ({counted} layers)"


class Contact:
    """When one process was asked, and when it was last heard."""

    def __init__(self, timeouts: GatewayTimeouts, late_since: LateSince) -> None:
        self.url: str | None = None
        self.heard_s = -math.inf  # the latest bytes
        self._asked_s = -math.inf  # the first question since then
        self._timeouts = timeouts
        self._late_since = late_since
        self._slowest_s = self._slowest_before_s = 0.0
        self._remembered_from_s = -math.inf

    @property
    def is_known(self) -> bool:
        """Whether it has ever answered. If not, it may be starting."""
        return math.isfinite(self.heard_s)

    def ask(self, now_s: float) -> None:
        """A question is sent that a process which is alive answers at once."""
        if self._asked_s <= self.heard_s:
            self._asked_s = now_s

    def hear(self, at_s: float) -> None:
        """Bytes have arrived. May be called late, and more than once for the same bytes."""
        if at_s <= self.heard_s:
            return
        if self.heard_s < self._asked_s <= at_s:
            took_s = at_s - self._asked_s - self._late_since(self._asked_s)
            # A longer one was an outage, such as a stopped process that was continued.
            if took_s <= self._timeouts.unresponsive_s:
                self._remember(took_s, at_s)
        self.heard_s = at_s

    def silence_s(self, now_s: float) -> float:
        """How long it has not answered, less the time in which the gateway could not read."""
        if not self.is_known:
            return math.inf
        since_s = self._since_s()
        return max(0.0, now_s - since_s - self._late_since(since_s))

    def is_silent(self, now_s: float) -> bool:
        limit_s = self._timeouts.silent_s
        if now_s - self._since_s() <= limit_s:
            return False  # the usual case, many times a second for each member
        return self.silence_s(now_s) > max(limit_s, self._late_limit_s(now_s))

    def _since_s(self) -> float:
        """When it was asked. Where no question was sent since the latest answer, the next poll is
        due after its interval: a member whose polls have stopped is not taken for alive."""
        if self._asked_s > self.heard_s:
            return self._asked_s
        return self.heard_s + self._timeouts.node_poll_s

    def _late_limit_s(self, now_s: float) -> float:
        age_s = now_s - self._remembered_from_s
        if age_s > 2 * _REMEMBERED_S:
            return 0.0
        slowest_s = self._slowest_s
        if age_s <= _REMEMBERED_S:
            slowest_s = max(slowest_s, self._slowest_before_s)
        return min(_LATE_FACTOR * slowest_s, self._timeouts.unresponsive_s)

    def _remember(self, took_s: float, at_s: float) -> None:
        if at_s >= self._remembered_from_s + _REMEMBERED_S:
            fresh = at_s < self._remembered_from_s + 2 * _REMEMBERED_S
            self._slowest_before_s = self._slowest_s if fresh else 0.0
            self._slowest_s, self._remembered_from_s = 0.0, at_s
        self._slowest_s = max(self._slowest_s, took_s)


@dataclass(slots=True)
class Member:
    """One kvd and its engine. Only `Fleet` and `Membership` change it."""

    kvd_url: str
    cluster: ClusterId
    listed: bool  # in the deployment file
    timeouts: GatewayTimeouts
    url: str | None = None  # the engine's, from the deployment file; None: the kvd's report has it
    # Address of a relay that other clusters use to reach this kvd, or one for each such cluster.
    via: str | Mapping[str, str] | None = None
    # How late the gateway itself was: answers that it could not read are no silence of the member.
    late_since: LateSince = never_late
    report: KvdReport | None = None
    card: Card | None = None
    load: Load | None = None
    kvd_seen_s: float = -math.inf  # the latest good report
    engine_seen_s: float = -math.inf  # the latest poll that the engine answered
    engine_failed_s: float = -math.inf  # the latest request that could not connect
    kvd_failed_s: float = -math.inf
    leaving: bool = False  # the engine drains: it finishes its requests and accepts no new ones
    has_duplicate_name: bool = False  # another member has its name; this one's reports are ignored
    kvd_unreachable: bool = False  # the latest poll could not connect to the kvd
    # Why the latest poll of the kvd or of the engine failed; empty after a success.
    problems: dict[Part, str] = field(default_factory=dict)
    # The model of one report, which is described once.
    _described: tuple[KvdReport, str | None] | None = field(default=None, repr=False)
    kvd: Contact = field(init=False)
    engine: Contact = field(init=False)

    def __post_init__(self) -> None:
        self.kvd = Contact(self.timeouts, self.late_since)
        self.kvd.url = self.kvd_url
        self.engine = Contact(self.timeouts, self.late_since)

    @property
    def node(self) -> NodeId | None:
        return None if self.report is None else self.report.node

    @property
    def instance(self) -> str | None:
        """Of the kvd's process, as its latest good report names it."""
        return None if self.report is None else self.report.instance

    @property
    def engine_url(self) -> str | None:
        if self.url is not None or self.report is None:
            return self.url
        return next((engine.url for engine in self.report.engines if engine.url), None)

    def relay_from(self, source: ClusterId) -> str | None:
        """Address of the relay through which kvds of `source` reach this one, if it has its own."""
        return self.via if self.via is None or isinstance(self.via, str) else self.via.get(source)

    @property
    def relays(self) -> frozenset[str]:
        """The addresses of all relays of this kvd alone."""
        if self.via is None:
            return frozenset()
        return frozenset((self.via,) if isinstance(self.via, str) else self.via.values())

    @property
    def compat(self) -> Compat | None:
        """Of its first pool, which decides which members it works with."""
        pool = None if self.report is None else self.report.pool
        return None if pool is None else pool.compat

    def second_pool(self, name: str) -> PoolReport | None:
        """The pool beside the first one whose events have this name."""
        more = () if self.report is None else self.report.more_pools
        return next((pool for pool in more if pool.name == name), None)

    @property
    def compats(self) -> tuple[Compat, ...]:
        """Of all its pools, one for each form in which its engine hands over."""
        return compats_of(self.report)

    @property
    def model(self) -> str | None:
        report = self.report
        if report is None:
            return None
        if self._described is None or self._described[0] is not report:
            self._described = (report, model_of(report))
        return self._described[1]

    def is_kvd_alive(self, now_s: float) -> bool:
        return self.kvd_seen_s > self.kvd_failed_s and not self.kvd.is_silent(now_s)

    def is_alive(self, now_s: float) -> bool:
        return (
            self.compat is not None
            and self.card is not None
            and not self.leaving
            and self.is_kvd_alive(now_s)
            and self.engine_seen_s > self.engine_failed_s
            and not self.engine.is_silent(now_s)
        )

    def is_silent(self, now_s: float) -> bool:
        """Whether its kvd or its engine does not answer, although its connections may be open.
        False for a member that has never answered."""
        return any(part.is_known and part.is_silent(now_s) for part in (self.kvd, self.engine))

    def has_hung(self, now_s: float, *, engine_only: bool = False) -> bool:
        """Whether the member has been silent for `hung_s`. False for a member that has never
        answered. An answer that already streams needs the engine only."""
        parts = (self.engine,) if engine_only else (self.engine, self.kvd)
        return any(part.is_known and part.silence_s(now_s) > self.timeouts.hung_s for part in parts)

    def is_expected_back(self, now_s: float) -> bool:
        """Whether the member has left on purpose, as for a restart, and not too long ago."""
        if not self.leaving or not math.isfinite(self.engine_seen_s):
            return False
        silence_s = now_s - self.engine_seen_s - self.late_since(self.engine_seen_s)
        return silence_s < self.timeouts.forget_s

    def has_just_fallen_silent(self, now_s: float) -> bool:
        """Whether the member was in order, and is silent for less than `hung_s`. It gets no
        requests, but it is no reason yet to give its role to another node."""
        return (
            self.compat is not None
            and not self.leaving
            and self.kvd_seen_s > self.kvd_failed_s
            and self.engine_seen_s > self.engine_failed_s
            and self.is_silent(now_s)
            and not self.has_hung(now_s)
        )

    def is_expired(self, now_s: float) -> bool:
        """Whether the kvd has been silent for so long that it is not expected back."""
        if not math.isfinite(self.kvd_seen_s):
            return True
        silence_s = now_s - self.kvd_seen_s - self.late_since(self.kvd_seen_s)
        return silence_s > self.timeouts.forget_s


def member_fields(change: str, member: Member, node: NodeId | None = None) -> dict[str, Any]:
    """For the log line of a change of a member. `node`: its name, before it is recorded."""
    return with_fields(
        event="member",
        change=change,
        node=node or member.node,
        cluster=member.cluster,
        kvd_url=member.kvd_url,
    )
