"""What the front counts, for Prometheus: `prfaas_gateway_*`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from prfaas.contracts.openai import Usage
from prfaas.gateway.api.response_stream import CutShort
from prfaas.gateway.request import RequestTrace

_STALLS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request; filled in as it happens, told when it ends."""

    id: str
    path: str
    tenant: str
    story: RequestTrace
    prompt_tokens: int = 0
    usage: Usage | None = None
    cut_short: CutShort | None = None
    delivered: bool = False  # a stream was sent up to its last event


class ApiMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Finished requests.", ("path", "route", "outcome")
        )
        self._ttft_s = self._histogram("time_to_first_token_seconds", "From arrival.", ("route",))
        self._total_s = self._histogram("request_seconds", "From arrival to the end.", ("route",))
        self._prompt_tokens = self._counter("prompt_tokens", "In prompts.", ("route",))
        self._cached_tokens = self._counter("cached_tokens", "Of them, not computed.", ("route",))
        self._output_tokens = self._counter("output_tokens", "Generated.", ("route",))
        self._handed_bytes = self._counter("handed_off_bytes", "KV, as routes expect.", ("route",))
        self.unauthorized = self._counter("unauthorized", "Requests without a key that is known.")
        self._retries = self._counter("retries", "Attempts behind the first.")
        self.in_flight = Gauge(
            "prfaas_gateway_in_flight", "Requests being served.", registry=self.registry
        )
        self.loop_stall_s = Histogram(
            "prfaas_gateway_loop_stall_seconds",
            "How late the event loop comes to what is due.",
            buckets=_STALLS,
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "prfaas_gateway_body_bytes", "Of requests in flight.", registry=self.registry
        )

    def ended(self, account: RequestRecord, outcome: str, now_s: float) -> None:
        story, usage = account.story, account.usage
        route = route_of(story)
        self._requests.labels(account.path, route, outcome).inc()
        self._retries.inc(max(0, story.attempts - 1))
        if story.first_token_s is None:
            return
        self._ttft_s.labels(route).observe(story.first_token_s - story.arrived_s)
        self._total_s.labels(route).observe(now_s - story.arrived_s)
        self._prompt_tokens.labels(route).inc(account.prompt_tokens)
        self._cached_tokens.labels(route).inc(story.cached_tokens)
        self._handed_bytes.labels(route).inc(story.nbytes)
        if usage is not None:
            self._output_tokens.labels(route).inc(usage.completion_tokens)

    def include(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """What somebody else counts, beside it."""
        self.registry.register(_Others(collect))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, says: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"prfaas_gateway_{name}", says, labels, registry=self.registry)

    def _histogram(self, name: str, says: str, labels: tuple[str, ...]) -> Histogram:
        return Histogram(
            f"prfaas_gateway_{name}", says, labels, buckets=_SECONDS, registry=self.registry
        )


class _Others(Collector):
    def __init__(self, counted: Callable[[], Iterable[Metric]]) -> None:
        self._counted = counted

    def describe(self) -> list[Metric]:
        return []  # names that are taken already would show when they are collected

    def collect(self) -> Iterable[Metric]:
        return self._counted()


def route_of(story: RequestTrace) -> str:
    if story.offloaded:
        return "remote"
    return "local" if story.routed_s is not None else "none"
