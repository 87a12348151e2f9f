"""What a kvd says of itself: one report, as JSON for gateways and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas.cache.lease import Occupancy, PoolStats
from prfaas.kvd.engine_socket.messages import GroupShape, shapes_of
from prfaas.kvd.engine_socket.server import Engines
from prfaas.kvd.events import EventLog
from prfaas.kvd.role import Role
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.lateness import LatenessMonitor
from prfaas.transport.listener import Listener
from prfaas.transport.receiver import ReceiverStats
from prfaas.types import Compat, LinkStats, NodeId

# A report says how late the kvd was within the last seconds: long enough for what a gateway that
# looks twice a second may have missed.
LATE_WINDOW_S = 2.0


class EngineReport(msgspec.Struct, frozen=True):
    engine_id: str
    url: str | None
    processes: int


class PoolReport(msgspec.Struct, frozen=True):
    compat: Compat
    groups: tuple[GroupShape, ...]
    block_tokens: int
    page_bytes: int
    occupancy: Occupancy
    bytes_by_group: dict[str, int]
    counters: PoolStats


class Report(msgspec.Struct, frozen=True):
    node: NodeId
    instance: str  # another one: the kvd was restarted, and holds nothing of before
    data_address: str
    role: Role
    engines: tuple[EngineReport, ...]
    pool: PoolReport | None  # None: no engine has registered yet
    incoming: dict[str, int]
    outgoing: dict[str, int]
    held_leases: int  # by engine processes
    arrivals: ReceiverStats
    links: tuple[LinkStats, ...]
    next_seq: dict[NodeId, int]  # of each node's cache events
    late_s: float = 0.0  # of the last LATE_WINDOW_S: how long this process was not able to run


class Reporter:
    def __init__(
        self,
        instance: str,
        data_address: str,
        store: Store,
        incoming: IncomingTransfers,
        outgoing: OutgoingTransfers,
        engines: Engines,
        events: EventLog,
        links: Links,
        listener: Listener,
        lateness: LatenessMonitor,
    ) -> None:
        self.role = Role()
        self._instance = instance
        self._data_address = data_address
        self._store = store
        self._incoming = incoming
        self._outgoing = outgoing
        self._engines = engines
        self._events = events
        self._links = links
        self._listener = listener
        self._lateness = lateness
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(self))

    def report(self) -> Report:
        return Report(
            node=self._store.node,
            instance=self._instance,
            data_address=self._data_address,
            role=self.role,
            engines=tuple(self._engine_reports()),
            pool=self._pool(),
            incoming=self._incoming.counts(),
            outgoing=self._outgoing.counts(),
            held_leases=len(self._engines.holds),
            arrivals=self._listener.stats(),
            links=self._links.reports,
            next_seq=self._events.nodes,
            late_s=round(self._lateness.within(LATE_WINDOW_S), 4),
        )

    def metrics(self) -> bytes:
        return generate_latest(self._registry)

    def _engine_reports(self) -> Iterator[EngineReport]:
        processes: dict[str, int] = {}
        urls: dict[str, str | None] = {}
        for register in self._engines.connected.values():
            processes[register.engine_id] = processes.get(register.engine_id, 0) + 1
            urls[register.engine_id] = register.url or urls.get(register.engine_id)
        for engine_id, number in processes.items():
            yield EngineReport(engine_id, urls[engine_id], number)

    def _pool(self) -> PoolReport | None:
        shelf = self._store.shelf
        if shelf is None:
            return None
        return PoolReport(
            compat=shelf.compat,
            groups=shapes_of(shelf.spec),
            block_tokens=shelf.block_tokens,
            page_bytes=shelf.arena.page_bytes,
            occupancy=shelf.pool.occupancy(),
            bytes_by_group=shelf.pool.bytes_by_group(),
            counters=shelf.pool.stats,
        )


class _Metrics(Collector):
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def describe(self) -> list[Metric]:
        return []  # what there is depends on the engine; nothing else is in this registry

    def collect(self) -> Iterator[Metric]:
        report = self._reporter.report()
        arrivals = report.arrivals
        yield _counter("received_bytes", "Verified bytes.", arrivals.received_bytes)
        yield _counter("duplicate_bytes", "Bytes that came again.", arrivals.duplicate_bytes)
        yield _counter("committed_transfers", "Incoming.", arrivals.committed)
        yield _counter("failed_transfers", "Incoming.", arrivals.aborted)
        transfers = _gauge("transfers", "By stage.", "stage")
        for stage, number in (*report.incoming.items(), *report.outgoing.items()):
            transfers.add_metric([stage], number)
        yield transfers
        held = _gauge("held_leases", "Leases that engine processes hold.")
        held.add_metric([], report.held_leases)
        yield held
        late = _gauge(
            "late_seconds", "Seconds of the last two in which this process could not run."
        )
        late.add_metric([], report.late_s)
        yield late
        if report.pool is not None:
            yield from _pool_metrics(report.pool)
        yield from _link_metrics(report.links)


def _pool_metrics(pool: PoolReport) -> Iterator[Metric]:
    occupancy = pool.occupancy
    pages = _gauge("pool_pages", "Pages of the arena.", "state")
    for state, number in (
        ("used", occupancy.used_pages),
        ("idle", occupancy.idle_pages),
        ("capacity", occupancy.capacity_pages or 0),
    ):
        pages.add_metric([state], number)
    yield pages
    by_group = _gauge("pool_bytes", "Memory in use.", "group")
    for group, nbytes in pool.bytes_by_group.items():
        by_group.add_metric([group], nbytes)
    yield by_group
    for name in pool.counters.__slots__:
        yield _counter(f"pool_{name}", "See PoolStats.", getattr(pool.counters, name))


def _link_metrics(links: tuple[LinkStats, ...]) -> Iterator[Metric]:
    goodput = _gauge("link_goodput_bps", "Payload bits that arrived, per second.", "peer")
    backlog = _gauge("link_backlog_bytes", "Bytes that are not acknowledged yet.", "peer")
    waited = _gauge("link_waited_seconds", "How long the oldest byte has waited.", "peer")
    for link in links:
        waited.add_metric([link.peer], link.waited_s)
        goodput.add_metric([link.peer], link.goodput_bps)
        backlog.add_metric([link.peer], link.backlog_bytes)
    yield goodput
    yield backlog
    yield waited


def _counter(name: str, text: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"prfaas_kvd_{name}", text, value=value)


def _gauge(name: str, text: str, label: str | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prfaas_kvd_{name}", text, labels=[label] if label else [])
