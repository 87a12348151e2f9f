"""The API's Prometheus metrics, `prfaas_gateway_*`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from prfaas.contracts.openai import Usage
from prfaas.gateway.api.loop_lag import Lag, LargestLag
from prfaas.gateway.api.response_stream import CutShort
from prfaas.gateway.request import RequestTrace

_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)


class PromptRecord(NamedTuple):
    """One prompt of a request, which is routed by itself."""

    trace: RequestTrace
    tokens: int
    usage: Usage | None


@dataclass(slots=True)
class RequestRecord:
    """One request, filled in as it proceeds; logged and counted when it ends. Of a list of prompts,
    `trace` has the sums, and `prompts` has the course of each."""

    id: str
    path: str
    tenant: str
    trace: RequestTrace
    prompt_tokens: int = 0
    usage: Usage | None = None
    cut_short: CutShort | None = None
    stream: bool = False  # the client requested a stream
    delivered: bool = False  # a stream was sent up to its last event
    prompts: Sequence[PromptRecord] = ()  # of a list

    @property
    def each_prompt(self) -> Sequence[PromptRecord]:
        return self.prompts or (PromptRecord(self.trace, self.prompt_tokens, self.usage),)

    @property
    def route(self) -> str:
        """`mixed`: the prompts of a list took different routes."""
        routes = {route_of(prompt.trace) for prompt in self.each_prompt}
        return routes.pop() if len(routes) == 1 else "mixed"


class ApiMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Finished requests.", ("path", "route", "outcome")
        )
        self._tenant_requests = self._counter(
            "tenant_requests", "Finished requests of a tenant.", ("tenant", "outcome")
        )
        self._ttft_s = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from arrival to the first token, of answers that stream. An answer that does "
            "not stream has no first token; request_seconds counts it.",
            ("route",),
        )
        self._total_s = self._histogram(
            "request_seconds", "Seconds from arrival to the end of the response.", ("route",)
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.", ("route",))
        self._cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens served from the cache.", ("route",)
        )
        self._output_tokens = self._counter("output_tokens", "Generated tokens.", ("route",))
        self._handed_bytes = self._counter(
            "handed_off_bytes", "KV bytes handed off, as the route predicted.", ("route",)
        )
        self._handoffs = self._counter(
            "handoffs",
            "Hand-offs of finished requests, by the form in which the state travelled.",
            ("route", "form"),
        )
        self.unauthorized = self._counter("unauthorized", "Requests without a valid API key.")
        self._retries = self._counter("retries", "Retries.")
        self.in_flight = Gauge(
            "prfaas_gateway_in_flight", "Requests in flight.", registry=self.registry
        )
        self._lag_s = Histogram(
            "prfaas_gateway_loop_stall_seconds",
            "Event-loop lag.",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self._own_lag_s = Histogram(
            "prfaas_gateway_loop_stall_own_seconds",
            "Part of the event-loop lag in which the gateway itself used the CPU.",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self._largest_lag, self._largest_own_lag = LargestLag(), LargestLag()
        largest = Gauge(
            "prfaas_gateway_loop_stall_max_seconds",
            "Largest event-loop lag of the last one to two minutes; `own`: the largest part of a "
            "lag in which the gateway itself used the CPU.",
            ("part",),
            registry=self.registry,
        )
        largest.labels("all").set_function(lambda: self._largest_lag.at(self._probed_s))
        largest.labels("own").set_function(lambda: self._largest_own_lag.at(self._probed_s))
        self._probed_s = 0.0
        self._lost_workers = self._counter(
            "body_workers_lost", "Body workers that died or took too long.", ("reason",)
        )
        self.bodies_waiting = Gauge(
            "prfaas_gateway_bodies_waiting",
            "Long bodies that wait for a body worker.",
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "prfaas_gateway_body_bytes",
            "Bytes of the bodies of requests in flight.",
            registry=self.registry,
        )

    def count(self, record: RequestRecord, outcome: str, now_s: float) -> None:
        trace, route = record.trace, record.route
        self._requests.labels(record.path, route, outcome).inc()
        if record.tenant:  # a tenant that has keys: their number bounds the number of series
            self._tenant_requests.labels(record.tenant, outcome).inc()
        for prompt in record.each_prompt:
            self._count_prompt(prompt)
        if trace.first_token_s is None:
            return
        if record.stream:
            self._ttft_s.labels(route).observe(trace.first_token_s - trace.arrived_s)
        self._total_s.labels(route).observe(now_s - trace.arrived_s)

    def _count_prompt(self, prompt: PromptRecord) -> None:
        trace, usage = prompt.trace, prompt.usage
        route = route_of(trace)
        self._retries.inc(max(0, trace.attempts - 1))
        if trace.committed_s is not None:
            self._handoffs.labels(route, trace.form).inc()
        if trace.first_token_s is None:
            return
        self._prompt_tokens.labels(route).inc(prompt.tokens)
        self._cached_tokens.labels(route).inc(trace.cached_tokens)
        self._handed_bytes.labels(route).inc(trace.nbytes)
        if usage is not None:
            self._output_tokens.labels(route).inc(usage.completion_tokens)

    def observe_lag(self, lag: Lag, now_s: float) -> None:
        self._probed_s = now_s
        self._lag_s.observe(lag.lag_s)
        self._own_lag_s.observe(lag.own_s)
        self._largest_lag.observe(lag.lag_s, now_s)
        self._largest_own_lag.observe(lag.own_s, now_s)

    def count_lost_worker(self, reason: str) -> None:
        self._lost_workers.labels(reason).inc()

    def include(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Adds the metrics that `collect` returns to the page."""
        self.registry.register(_Included(collect))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"prfaas_gateway_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, labels: tuple[str, ...]) -> Histogram:
        return Histogram(
            f"prfaas_gateway_{name}", help_text, labels, buckets=_SECONDS, registry=self.registry
        )


class _Included(Collector):
    def __init__(self, collect_metrics: Callable[[], Iterable[Metric]]) -> None:
        self._collect_metrics = collect_metrics

    def describe(self) -> list[Metric]:
        return []  # a name that is taken already fails when it is collected

    def collect(self) -> Iterable[Metric]:
        return self._collect_metrics()


def route_of(trace: RequestTrace) -> str:
    if trace.offloaded:
        return "remote"
    if trace.remainder:
        return "remainder"
    return "local" if trace.routed_s is not None else "none"
