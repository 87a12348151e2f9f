"""Metric families of the gateway, each with the prefix of its names."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_PREFIX = "prfaas_gateway_"


def gauge(name: str, help_text: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    """`value`: of a gauge without labels."""
    return GaugeMetricFamily(f"{_PREFIX}{name}", help_text, value=value, labels=labels or None)


def counter(
    name: str, help_text: str, *labels: str, value: float | None = None
) -> CounterMetricFamily:
    """The exposition appends `_total` to the name."""
    return CounterMetricFamily(f"{_PREFIX}{name}", help_text, value=value, labels=labels or None)
