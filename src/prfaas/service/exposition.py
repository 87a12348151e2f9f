"""The page of a service's metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas.service.logging import dropped_lines


def render_metrics(registry: CollectorRegistry) -> bytes:
    """With the metrics that every service has. Without the time at which each series began, which
    Python's library adds as one more series and which Prometheus does not use: the page would be
    nearly twice as long."""
    page = CollectorRegistry(auto_describe=False)
    page.register(_WithoutTimes(registry))
    page.register(_Common())
    return generate_latest(page)


class _Common(Collector):
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "prfaas_log_dropped_lines",
            "Lines of the log that were dropped, because standard error did not take them in time.",
            dropped_lines(),
        )


def include(registry: CollectorRegistry, collect: Callable[[], Iterable[Metric]]) -> None:
    """Adds the metrics that `collect` returns to the registry's page."""
    registry.register(_Included(collect))


class _Included(Collector):
    def __init__(self, collect_metrics: Callable[[], Iterable[Metric]]) -> None:
        self._collect_metrics = collect_metrics

    def describe(self) -> list[Metric]:
        return []  # a name that is taken already fails when it is collected

    def collect(self) -> Iterable[Metric]:
        return self._collect_metrics()


class _WithoutTimes(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric
