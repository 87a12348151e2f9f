"""One member of the fleet, as of its latest answers: a kvd and its engine."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from prfaas.config.gateway import GatewayTimeouts
from prfaas.contracts.kvd_api import KvdReport
from prfaas.gateway.client.node_client import Card, Load
from prfaas.lateness import LateSince, never_late
from prfaas.types import ClusterId, Compat, NodeId

Part: TypeAlias = Literal["kvd", "engine"]


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
    # How late the gateway itself was: answers that it could not read are no silence of the member.
    late_since: LateSince = never_late
    report: KvdReport | None = None
    card: Card | None = None
    load: Load | None = None
    kvd_seen_s: float = -math.inf  # the latest answer
    engine_seen_s: float = -math.inf
    engine_failed_s: float = -math.inf  # the latest request that could not connect
    kvd_failed_s: float = -math.inf
    leaving: bool = False  # the engine drains: it finishes its requests and accepts no new ones
    has_duplicate_name: bool = False  # another member has its name; this one's reports are ignored
    # Why the latest poll of the kvd or of the engine failed; empty after a success.
    problems: dict[Part, str] = field(default_factory=dict)
    # The model of one report, which is described once.
    _described: tuple[KvdReport, str] | None = field(default=None, repr=False)

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

    @property
    def model(self) -> str | None:
        """The model's name and layers. Formats of one model may differ in all else: a revision, a
        layout, a number format."""
        report = self.report
        if report is None or report.pool is None:
            return None
        if self._described is None or self._described[0] is not report:
            layers = Counter[str]()
            for group in report.pool.groups:
                layers[group.kind] += len(group.layers)
            counted = ", ".join(f"{layers[kind]} {kind}" for kind in sorted(layers))
            self._described = (report, f"{report.pool.compat.model} ({counted} layers)")
        return self._described[1]

    def is_kvd_alive(self, now_s: float) -> bool:
        return self._answers(self.kvd_seen_s, self.kvd_failed_s, now_s)

    def is_alive(self, now_s: float) -> bool:
        return (
            self.compat is not None
            and self.card is not None
            and not self.leaving
            and self.is_kvd_alive(now_s)
            and self._answers(self.engine_seen_s, self.engine_failed_s, now_s)
        )

    def has_hung(self, now_s: float, *, engine_only: bool = False) -> bool:
        """Whether the member has been silent for `hung_s`, although its connections may be
        open. False for a member that has never answered. An answer that already streams needs the
        engine only."""
        seen_s = self.engine_seen_s
        if not engine_only:
            seen_s = min(seen_s, self.kvd_seen_s)
        return math.isfinite(seen_s) and self._silence_s(seen_s, now_s) > self.timeouts.hung_s

    def is_expected_back(self, now_s: float) -> bool:
        """Whether the member has left on purpose, as for a restart, and not too long ago."""
        if not self.leaving or not math.isfinite(self.engine_seen_s):
            return False
        silence_s = now_s - self.engine_seen_s - self.late_since(self.engine_seen_s)
        return silence_s < self.timeouts.forget_s

    def is_expired(self, now_s: float) -> bool:
        """Whether the kvd has been silent for so long that it is not expected back."""
        return self._silence_s(self.kvd_seen_s, now_s) > self.timeouts.forget_s

    def _answers(self, seen_s: float, failed_s: float, now_s: float) -> bool:
        silence_s = self._silence_s(seen_s, now_s)
        return seen_s > failed_s and silence_s < self.timeouts.unresponsive_s

    def _silence_s(self, seen_s: float, now_s: float) -> float:
        """The time since then in which the gateway could have read an answer."""
        if not math.isfinite(seen_s):
            return math.inf
        return now_s - seen_s - self.late_since(seen_s)
