"""The page of a service's metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


def render_metrics(registry: CollectorRegistry) -> bytes:
    """Without the time at which each series began, which Python's library adds as one more series
    and which Prometheus does not use: the page would be nearly twice as long."""
    page = CollectorRegistry(auto_describe=False)
    page.register(_WithoutTimes(registry))
    return generate_latest(page)


class _WithoutTimes(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric
