"""Metrics of the requests that wait and of the attempts that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from prfaas.gateway.dispatch.attempts import RetryBudget
from prfaas.gateway.exposition.families import counter, gauge


def attempt_metrics(budget: RetryBudget) -> Iterator[Metric]:
    yield counter(
        "retries", "Attempts after the first that failed requests have made.", value=budget.spent
    )
    yield counter(
        "denied_retries",
        "Failed attempts after which a request got an error: it had no attempt left, or the retry "
        "budget of all requests was spent.",
        value=budget.denied,
    )
    yield gauge(
        "retry_budget", "Retries that all requests together may make now.", value=budget.left
    )
    yield counter(
        "nodes_lost_requests",
        "Requests that were refused because they have cost two nodes, now or a while ago.",
        value=budget.nodes_lost,
    )
    yield counter(
        "refused_grants",
        "Grants that a decode node's kvd refused because its memory was full.",
        value=budget.refused_grants,
    )


def waiting_metrics(waiting: Mapping[str, int]) -> Iterator[Metric]:
    family = gauge(
        "requests_waiting",
        "Requests that wait for a node, by the cluster that is to prefill them. An empty name: no "
        "cluster can take them now.",
        "cluster",
    )
    for cluster, number in waiting.items():
        family.add_metric([cluster], number)
    yield family
