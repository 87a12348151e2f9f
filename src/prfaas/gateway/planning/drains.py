"""Orders of operators to drain a cluster, or to take it back into use.

Each cluster has a planning record with its latest order, so that all gateways follow it, and a
gateway still does after a restart. An order counts at once at the gateway that received it. It is
numbered and sent again until a majority of the kvds keeps it, or a later order for the cluster. A
drained cluster gets no new requests; that is the routers' work, not this module's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from prfaas.clock import Clock
from prfaas.contracts.gateway_api import DrainOrder
from prfaas.gateway.planning.record_keeping import Record, RecordKeeping
from prfaas.types import ClusterId

log = logging.getLogger(__name__)

STORE_S = 3.0  # in which an order should be kept, before the operator is told that it is not
_AGAIN_S = 0.2
# Two gateways that number their orders alike, so that neither has a majority, number them again at
# different times.
_RENUMBERED = 0.5  # the share of the steps


class _Pending(NamedTuple):
    drained: bool
    at_s: float


def record_name(cluster: ClusterId) -> str:
    return f"drain/{cluster}"


class Drains:
    """The orders that this gateway follows, for the clusters of its deployment."""

    def __init__(
        self,
        clusters: Collection[ClusterId],
        records: RecordKeeping,
        clock: Clock,
        use: Callable[[frozenset[ClusterId]], None],
    ) -> None:
        """`use`: called with the drained clusters whenever they change."""
        self._clusters = tuple(clusters)
        self._records = records
        self._clock = clock
        self._use = use
        self._pending: dict[ClusterId, _Pending] = {}  # not kept yet
        self._drained: frozenset[ClusterId] = frozenset()
        self._random = random.Random()

    @property
    def drained(self) -> frozenset[ClusterId]:
        return self._drained

    def is_kept(self, cluster: ClusterId) -> bool:
        """Whether a majority of the kvds keeps what this gateway follows."""
        return cluster not in self._pending and self._records.is_kept(record_name(cluster))

    async def order(self, cluster: ClusterId, drained: bool) -> bool:
        """A new order, which counts from now on. The cluster is one of the deployment's. Returns
        whether a majority of the kvds keeps it; if not, it is sent to them again later."""
        assert cluster in self._clusters, cluster
        self._pending[cluster] = _Pending(drained, self._clock.now())
        self._number(cluster)
        self._follow()
        try:
            async with asyncio.timeout(STORE_S):
                while True:
                    await self._records.step()
                    self.step()
                    if self.is_kept(cluster):
                        return True
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            log.warning("no majority of the kvds keeps the order for the cluster %s", cluster)
            return False

    def step(self) -> None:
        """Follows what the kvds keep. Comes after each step of the records."""
        for cluster in list(self._pending):
            self._check(cluster)
        self._follow()

    def _check(self, cluster: ClusterId) -> None:
        name, pending = record_name(cluster), self._pending[cluster]
        wanted, found = self._records.wanted(name), self._records.found(name)
        if wanted is not None:
            if self._records.is_contested(name) and self._random.random() < _RENUMBERED:
                self._number(cluster)
        elif found is None or found.made_s >= pending.at_s or _drains(found) == pending.drained:
            del self._pending[cluster]  # it is kept, or a later one
        else:
            self._number(cluster)  # an earlier one was kept with a higher number

    def _number(self, cluster: ClusterId) -> None:
        name, pending = record_name(cluster), self._pending[cluster]
        number = self._records.next_number(name, 0)
        data = msgspec.json.encode(DrainOrder(pending.drained))
        self._records.want(Record(name, 0, number, data, pending.at_s))

    def _follow(self) -> None:
        drained = {cluster for cluster in self._clusters if self._is_drained(cluster)}
        if drained != self._drained:
            self._drained = frozenset(drained)
            self._use(self._drained)

    def _is_drained(self, cluster: ClusterId) -> bool:
        pending, found = self._pending.get(cluster), self._records.found(record_name(cluster))
        if pending is not None:
            return pending.drained
        return found is not None and _drains(found)


def _drains(record: Record) -> bool:
    try:
        return msgspec.json.decode(record.data, type=DrainOrder).drained
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # of a later version
