"""The kvd's report on itself, as JSON for gateways and as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas.contracts.kvd_api import (
    LATE_WINDOW_S,
    ArrivalCounters,
    EngineReport,
    KvdReport,
    Occupancy,
    PoolCounters,
    PoolReport,
    Role,
    shapes_of,
)
from prfaas.kvd.engine_socket.server import EngineSocketServer
from prfaas.kvd.planning_records import PlanningRecords
from prfaas.kvd.store import Storage, Store
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.lateness import LatenessMonitor
from prfaas.service.exposition import include, render_metrics
from prfaas.transport.listener import Listener
from prfaas.transport.workers.pool import WorkerPool
from prfaas.types import Form, LinkStats

T = TypeVar("T")
_POOL_COUNTERS = {  # by the field of `PoolCounters`
    "queries": ("pool_lookups", "Lookups of a prefix in the pool."),
    "refused": (
        "pool_refused_reservations",
        "Reservations that the pool refused because its memory was full.",
    ),
    "hit_tokens": ("pool_hit_tokens", "Prompt tokens that lookups found and could reuse."),
    "lost_tokens": (
        "pool_stateless_tokens",
        "Prompt tokens that lookups found but could not reuse, because no state or window to "
        "resume from was left.",
    ),
    "evicted_blocks": ("pool_evicted_blocks", "Blocks that were evicted from every tier."),
    "spilled_blocks": ("pool_spilled_blocks", "Blocks that were written to the SSD tier."),
    "promoted_blocks": ("pool_promoted_blocks", "Blocks that were read back from the SSD tier."),
    "unreadable_blocks": (
        "pool_unreadable_blocks",
        "Blocks on the SSD tier that differed from what was written.",
    ),
    "dropped_blocks": (
        "pool_dropped_blocks",
        "Blocks that were evicted from memory without a copy on the SSD tier.",
    ),
    "kept_answers": ("pool_kept_answers", "Answers whose generated state became a prefix."),
}
_LATE_S = 60.0  # of which the share of lateness is shown; longer than the interval of most scrapes
_BITS = 8  # of a byte: Prometheus' base unit is the byte


class Reporter:
    def __init__(
        self,
        store: Store,
        incoming: IncomingTransfers,
        outgoing: OutgoingTransfers,
        engines: EngineSocketServer,
        links: Links,
        listener: Listener,
        lateness: LatenessMonitor,
    ) -> None:
        self.role = Role()
        self.records = PlanningRecords()
        self._store = store
        self._incoming = incoming
        self._outgoing = outgoing
        self._engines = engines
        self._links = links
        self._listener = listener
        self._lateness = lateness
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(self))

    @property
    def committed(self) -> Mapping[Form, int]:
        """Incoming transfers by form."""
        return self._incoming.committed

    @property
    def workers(self) -> WorkerPool | None:
        return self._listener.workers

    @property
    def late_ratio(self) -> float:
        """The share of the last minute in which this process could not run."""
        return min(1.0, self._lateness.within(_LATE_S) / _LATE_S)

    def report(self) -> KvdReport:
        pools = tuple(_pool(storage) for storage in self._store.storages)
        return KvdReport(
            node=self._store.node,
            instance=self._store.events.instance,
            data_address=self._incoming.data_address,
            role=self.role,
            engines=tuple(self._engine_reports()),
            pool=pools[0] if pools else None,
            incoming=self._incoming.counts(),
            outgoing=self._outgoing.counts(),
            held_leases=len(self._engines.holders),
            arrivals=_counts(self._listener.stats(), ArrivalCounters),
            links=self._links.reports,
            next_seq=self._store.events.nodes,
            late_s=round(self._lateness.within(LATE_WINDOW_S), 4),
            more_pools=pools[1:],
            records=tuple(self.records),
        )

    def include(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Adds the metrics that `collect` returns to the page."""
        include(self._registry, collect)

    def metrics(self) -> bytes:
        return render_metrics(self._registry)

    def _engine_reports(self) -> Iterator[EngineReport]:
        """A process with two forms has a connection for each of them."""
        connections: dict[str, Counter[Form]] = {}
        urls: dict[str, str | None] = {}
        for register in self._engines.connected.values():
            of_engine = connections.setdefault(register.engine_id, Counter())
            of_engine[register.compat.form] += 1
            urls[register.engine_id] = register.url or urls.get(register.engine_id)
        for engine_id, of_engine in connections.items():
            yield EngineReport(engine_id, urls[engine_id], max(of_engine.values()))


def _pool(storage: Storage) -> PoolReport:
    return PoolReport(
        compat=storage.compat,
        groups=shapes_of(storage.spec),
        block_tokens=storage.block_tokens,
        page_bytes=storage.arena.page_bytes,
        occupancy=_counts(storage.pool.occupancy(), Occupancy),
        bytes_by_group=storage.pool.bytes_by_group(),
        counters=_counts(storage.pool.stats, PoolCounters),
        name=storage.name,
    )


def _counts(owner: object, kind: type[T]) -> T:
    """The numbers of a part of the kvd in the form of the API."""
    return msgspec.convert(owner, kind, from_attributes=True)


class _Metrics(Collector):
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def describe(self) -> list[Metric]:
        return []  # the metrics depend on the engine, and this registry has no other collector

    def collect(self) -> Iterator[Metric]:
        report = self._reporter.report()
        yield from self._transfer_metrics(report)
        yield _gauge("held_leases", "Leases that engine processes hold.", value=report.held_leases)
        yield _gauge(
            "late_ratio",
            "The share of the last minute in which this process had work to do and could not run.",
            value=self._reporter.late_ratio,
        )
        if (workers := self._reporter.workers) is not None:
            yield _gauge(
                "workers", "Worker processes that move the bytes.", value=len(workers.pids)
            )
            yield _counter(
                "replaced_workers",
                "Worker processes that ended unexpectedly and were replaced.",
                value=workers.replaced,
            )
        if report.pools:
            yield from _pool_metrics(report.pools)
        yield from _link_metrics(report.links)

    def _transfer_metrics(self, report: KvdReport) -> Iterator[Metric]:
        arrivals = report.arrivals
        yield _counter(
            "received_bytes", "KV bytes that were received and verified.", arrivals.received_bytes
        )
        yield _counter(
            "duplicate_bytes",
            "KV bytes that were received again after they had been verified.",
            arrivals.duplicate_bytes,
        )
        committed = CounterMetricFamily(
            "prfaas_kvd_committed_transfers",
            "Incoming transfers that were committed, also those that needed no byte.",
            labels=["form"],
        )
        for form, number in self._reporter.committed.items():
            committed.add_metric([form], number)
        yield committed
        yield _counter(
            "failed_transfers", "Incoming transfers that failed or were aborted.", arrivals.aborted
        )
        transfers = _gauge("transfers", "Transfers by their stage.", "direction", "stage")
        for direction, counts in (("incoming", report.incoming), ("outgoing", report.outgoing)):
            for stage, number in counts.items():
                transfers.add_metric([direction, stage], number)
        yield transfers


def _pool_metrics(pools: Sequence[PoolReport]) -> Iterator[Metric]:
    memory = _gauge(
        "pool_memory_bytes",
        "Memory of the pool by its state. `held`: requests and transfers use it. `idle`: it has "
        "cached prefixes, which are evicted when memory runs short. `free`: it has nothing.",
        *("form", "state"),
    )
    by_group = _gauge(
        "pool_group_bytes",
        "Memory of the pool that is in use, by the group of layers.",
        *("form", "group"),
    )
    for pool in pools:
        form, occupancy = pool.compat.form, pool.occupancy
        pages = {
            "held": occupancy.used_pages - occupancy.idle_pages,
            "idle": occupancy.idle_pages,
            "free": max(0, (occupancy.capacity_pages or 0) - occupancy.used_pages),
        }
        for state, number in pages.items():
            memory.add_metric([form, state], number * pool.page_bytes)
        for group, nbytes in pool.bytes_by_group.items():
            by_group.add_metric([form, group], nbytes)
    yield from (memory, by_group)
    for field, (name, text) in _POOL_COUNTERS.items():
        counter = CounterMetricFamily(f"prfaas_kvd_{name}", text, labels=["form"])
        for pool in pools:
            counter.add_metric([pool.compat.form], getattr(pool.counters, field))
        yield counter


def _link_metrics(links: tuple[LinkStats, ...]) -> Iterator[Metric]:
    """A kvd has at most `links.MAX_LINKS` links, which bounds the number of peers."""
    connections = _gauge("link_connections", "TCP connections to the peer.", "peer")
    goodput = _gauge(
        "link_goodput_bytes_per_second",
        "The rate at which KV bytes arrived at the peer in the latest report.",
        "peer",
    )
    backlog = _gauge(
        "link_backlog_bytes", "KV bytes that the peer has not acknowledged yet.", "peer"
    )
    waited = _gauge(
        "link_waited_seconds", "How long the oldest byte of the backlog has waited.", "peer"
    )
    rtt = _gauge(
        "link_rtt_seconds",
        "The round-trip time to the peer. The series is absent until it has been measured.",
        "peer",
    )
    for link in links:
        connections.add_metric([link.peer], link.connections)
        waited.add_metric([link.peer], link.waited_s)
        goodput.add_metric([link.peer], link.goodput_bps / _BITS)
        backlog.add_metric([link.peer], link.backlog_bytes)
        if link.rtt_s is not None:
            rtt.add_metric([link.peer], link.rtt_s)
    yield from (connections, goodput, backlog, waited, rtt)


def _counter(name: str, text: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"prfaas_kvd_{name}", text, value=value)


def _gauge(name: str, text: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    """`value`: of a gauge without labels."""
    return GaugeMetricFamily(f"prfaas_kvd_{name}", text, value=value, labels=labels or None)
