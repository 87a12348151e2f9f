"""The kvd's report on itself, as JSON for gateways and as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
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
from prfaas.kvd.store import Storage, Store
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.lateness import LatenessMonitor
from prfaas.transport.listener import Listener
from prfaas.transport.workers.pool import WorkerPool
from prfaas.types import Form, LinkStats

T = TypeVar("T")
_POOL_HELP = {
    "queries": "Prefix lookups.",
    "refused": "Reservations refused because memory was short.",
    "hit_tokens": "Prompt tokens found in the pool.",
    "lost_tokens": "Prompt tokens found in the pool that lacked a state or a window.",
    "evicted_blocks": "Blocks evicted from every tier.",
    "spilled_blocks": "Blocks written to SSD.",
    "promoted_blocks": "Blocks read back from SSD.",
    "unreadable_blocks": "Blocks on SSD that differed from what was written.",
    "dropped_blocks": "Blocks evicted from memory without a copy on the SSD tier.",
    "kept_answers": "Answers whose generated state became a prefix.",
}


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
        )

    def metrics(self) -> bytes:
        return generate_latest(self._registry)

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
        arrivals = report.arrivals
        yield _counter("received_bytes", "Bytes received and verified.", arrivals.received_bytes)
        yield _counter(
            "duplicate_bytes",
            "Bytes received again after they had been verified.",
            arrivals.duplicate_bytes,
        )
        yield _counter(
            "committed_transfers", "Incoming transfers that were committed.", arrivals.committed
        )
        yield _counter(
            "failed_transfers", "Incoming transfers that failed or were aborted.", arrivals.aborted
        )
        transfers = _gauge("transfers", "Transfers by stage.", "stage")
        for stage, number in (*report.incoming.items(), *report.outgoing.items()):
            transfers.add_metric([stage], number)
        yield transfers
        held = _gauge("held_leases", "Leases held by engine processes.")
        held.add_metric([], report.held_leases)
        yield held
        late = _gauge(
            "late_seconds", "Seconds of the last two seconds in which this process could not run."
        )
        late.add_metric([], report.late_s)
        yield late
        by_form = CounterMetricFamily(
            "prfaas_kvd_committed_by_form",
            "Incoming transfers that were committed, also those that needed no byte.",
            labels=["form"],
        )
        for form, number in self._reporter.committed.items():
            by_form.add_metric([form], number)
        yield by_form
        if (workers := self._reporter.workers) is not None:
            running = _gauge("workers", "Worker processes that run.")
            running.add_metric([], len(workers.pids))
            yield running
            yield _counter(
                "replaced_workers", "Worker processes that have ended.", workers.replaced
            )
        if report.pools:
            yield from _pool_metrics(report.pools)
        yield from _link_metrics(report.links)


def _pool_metrics(pools: Sequence[PoolReport]) -> Iterator[Metric]:
    pages = _gauge("pool_pages", "Pages of the arena by state.", "form", "state")
    page_bytes = _gauge("pool_page_bytes", "Bytes of a page.", "form")
    by_group = _gauge("pool_bytes", "Bytes of memory in use by KV group.", "form", "group")
    for pool in pools:
        form, occupancy = pool.compat.form, pool.occupancy
        for state, number in (
            ("used", occupancy.used_pages),
            ("idle", occupancy.idle_pages),
            ("capacity", occupancy.capacity_pages or 0),
        ):
            pages.add_metric([form, state], number)
        page_bytes.add_metric([form], pool.page_bytes)
        for group, nbytes in pool.bytes_by_group.items():
            by_group.add_metric([form, group], nbytes)
    yield from (pages, page_bytes, by_group)
    for name in PoolCounters.__struct_fields__:
        counter = CounterMetricFamily(f"prfaas_kvd_pool_{name}", _POOL_HELP[name], labels=["form"])
        for pool in pools:
            counter.add_metric([pool.compat.form], getattr(pool.counters, name))
        yield counter


def _link_metrics(links: tuple[LinkStats, ...]) -> Iterator[Metric]:
    goodput = _gauge("link_goodput_bps", "Payload bits acknowledged per second.", "peer")
    backlog = _gauge(
        "link_backlog_bytes", "Bytes that the receiver has not acknowledged yet.", "peer"
    )
    waited = _gauge(
        "link_waited_seconds", "Time that the oldest byte of the backlog has waited.", "peer"
    )
    for link in links:
        waited.add_metric([link.peer], link.waited_s)
        goodput.add_metric([link.peer], link.goodput_bps)
        backlog.add_metric([link.peer], link.backlog_bytes)
    yield goodput
    yield backlog
    yield waited


def _counter(name: str, text: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"prfaas_kvd_{name}", text, value=value)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prfaas_kvd_{name}", text, labels=labels)
