"""Metrics of the tenants: what each of them has taken of the gateway's limits."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from prfaas.gateway.exposition.families import counter, gauge
from prfaas.gateway.tenants import Tenants

_GAUGES = {  # by the key of the tenant's state
    "in_flight": (
        "tenant_requests_in_flight",
        "Sequences of the tenant's requests that have not ended.",
    ),
    "queued": ("tenant_requests_waiting", "Requests of the tenant that wait for a node."),
    "queued_tokens": (
        "tenant_waiting_tokens",
        "Prompt tokens of the tenant's requests that have no first token yet.",
    ),
    "body_bytes": ("tenant_body_bytes", "Bytes of the bodies of the tenant's requests in flight."),
    "weight": ("tenant_weight", "The weight of the tenant when requests wait."),
}


def tenant_metrics(tenants: Tenants) -> Iterator[Metric]:
    """One series for each tenant that has a name and keys now."""
    named = {name: found for name, found in tenants.state().items() if name}
    if not named:
        return
    for key, (name, meaning) in _GAUGES.items():
        family = gauge(name, meaning, "tenant")
        for tenant, found in named.items():
            family.add_metric([tenant], found[key])
        yield family
    refused = counter(
        "tenant_refused_requests",
        "Requests of the tenant that a limit on requests, tokens or bytes has refused.",
        "tenant",
    )
    for tenant, found in named.items():
        refused.add_metric([tenant], found["refused"])
    yield refused
