"""The API's Prometheus metrics, `prfaas_gateway_*`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from prfaas.contracts.openai import Usage
from prfaas.gateway.api.loop_lag import Lag, LargestLag
from prfaas.gateway.api.response_stream import CutShort
from prfaas.gateway.exposition.reasons import label_of
from prfaas.gateway.request import RequestTrace
from prfaas.service.exposition import include, render_metrics

_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_EXPOSED_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40)
_TOKENS = (256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)

_PATHS = ("/v1/completions", "/v1/chat/completions")
_ROUTES = ("local", "remote", "none")  # and `alone` and `mixed`, which are rare
_FAILURES = ("shed", "failed", "broken")  # beside other outcomes
_LOSSES = ("died", "timeout")  # of body workers


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


class _RouteMetrics(NamedTuple):
    """The metrics with the label `route`: of all routes, or the series of one. Looking each of them
    up for every request would take longer than counting."""

    ttft_s: Histogram
    duration_s: Histogram
    until_routed_s: Histogram
    exposed_s: Histogram
    uncached_tokens: Histogram
    prompt_tokens: Counter
    cached_tokens: Counter
    stateless_tokens: Counter
    output_tokens: Counter
    handed_bytes: Counter

    def labels(self, route: str) -> _RouteMetrics:
        return _RouteMetrics(
            self.ttft_s.labels(route),
            self.duration_s.labels(route),
            self.until_routed_s.labels(route),
            self.exposed_s.labels(route),
            self.uncached_tokens.labels(route),
            self.prompt_tokens.labels(route),
            self.cached_tokens.labels(route),
            self.stateless_tokens.labels(route),
            self.output_tokens.labels(route),
            self.handed_bytes.labels(route),
        )


class ApiMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Requests that have ended.", ("path", "route", "outcome")
        )
        # A series that appears with its first failure would hide it: Prometheus counts the
        # increase from the first value that it has seen.
        for labels in product(_PATHS, _ROUTES, _FAILURES):
            self._requests.labels(*labels)
        self._tenant_requests = self._counter(
            "tenant_requests", "Requests of a tenant that have ended.", ("tenant", "outcome")
        )
        self._routed = self._counter(
            "routed_prompts",
            "Prompts that were routed and have ended, by the PD cluster at which they arrived, the "
            "cluster that prefilled them, and the reason for the latest attempt's route.",
            ("home", "cluster", "route", "reason"),
        )
        self._handoffs = self._counter(
            "handoffs",
            "Hand-offs of requests that have ended, by the form in which the state travelled.",
            ("route", "form"),
        )
        self._all_routes = self._define_route_metrics()
        self._of_route: dict[str, _RouteMetrics] = {}
        self.unauthorized = self._counter(
            "unauthorized_requests", "Requests that had no valid API key."
        )
        self.in_flight = self._gauge("requests_in_flight", "Requests that have not ended.")
        self._lag_s = self._lag_histogram(
            "loop_lag_seconds",
            "How much later than due the event loop ran a callback. It is probed every 10 ms.",
        )
        self._own_lag_s = self._lag_histogram(
            "loop_lag_own_seconds",
            "The part of the event-loop lag in which the gateway itself used the CPU.",
        )
        self._largest_lag, self._largest_own_lag = LargestLag(), LargestLag()
        self._gauge(
            "loop_lag_max_seconds", "The largest event-loop lag of the last one to two minutes."
        ).set_function(lambda: self._largest_lag.at(self._probed_s))
        self._gauge(
            "loop_lag_own_max_seconds",
            "The largest part of an event-loop lag in which the gateway itself used the CPU, of "
            "the last one to two minutes.",
        ).set_function(lambda: self._largest_own_lag.at(self._probed_s))
        self._probed_s = 0.0
        self._lost_workers = self._counter(
            "body_workers_lost", "Body workers that died or took too long.", ("reason",)
        )
        for reason in _LOSSES:
            self._lost_workers.labels(reason)
        self.bodies_waiting = self._gauge(
            "bodies_waiting", "Long bodies that wait for a body worker."
        )
        self.body_bytes = self._gauge(
            "body_bytes",
            "Bytes of the bodies, and of answers that wait in memory, of requests in flight.",
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
        of_route = self._metrics_of(route)
        if record.stream:
            of_route.ttft_s.observe(trace.first_token_s - trace.arrived_s)
        of_route.duration_s.observe(now_s - trace.arrived_s)

    def _count_prompt(self, prompt: PromptRecord) -> None:
        trace, usage = prompt.trace, prompt.usage
        route = route_of(trace)
        of_route = self._metrics_of(route)
        if trace.routed_s is not None:
            reason = label_of(trace.reason)
            self._routed.labels(trace.home, trace.cluster, route, reason).inc()
            of_route.until_routed_s.observe(trace.routed_s - trace.arrived_s)
            of_route.stateless_tokens.inc(trace.stateless_tokens)
        if trace.committed_s is not None:
            self._handoffs.labels(route, trace.form).inc()
            # The receiver may commit before the prefill node's answer is here.
            prefilled_s = trace.prefilled_s or trace.committed_s
            of_route.exposed_s.observe(max(0.0, trace.committed_s - prefilled_s))
        of_route.handed_bytes.inc(trace.nbytes)
        if trace.first_token_s is None:
            return
        of_route.prompt_tokens.inc(prompt.tokens)
        of_route.cached_tokens.inc(trace.cached_tokens)
        of_route.uncached_tokens.observe(max(0, prompt.tokens - trace.cached_tokens))
        if usage is not None:
            of_route.output_tokens.inc(usage.completion_tokens)

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
        include(self.registry, collect)

    def render(self) -> bytes:
        return render_metrics(self.registry)

    def _metrics_of(self, route: str) -> _RouteMetrics:
        found = self._of_route.get(route)
        if found is None:
            found = self._of_route[route] = self._all_routes.labels(route)
        return found

    def _define_route_metrics(self) -> _RouteMetrics:
        return _RouteMetrics(
            self._histogram(
                "time_to_first_token_seconds",
                "Time from the arrival of a request to its first token, of answers that stream. "
                "An answer that does not stream has no first token; request_duration_seconds "
                "counts it.",
                _SECONDS,
            ),
            self._histogram(
                "request_duration_seconds",
                "Time from the arrival of a request to the end of its answer.",
                _SECONDS,
            ),
            self._histogram(
                "time_to_route_seconds",
                "Time from the arrival of a request to the start of its latest attempt: reading, "
                "tokenising and waiting for a node, and earlier attempts where there were any.",
                _SECONDS,
            ),
            self._histogram(
                "exposed_transfer_seconds",
                "Time from the end of a hand-off's prefill until its state was in place at the "
                "decode node. The transfer before that time was hidden by the prefill.",
                _EXPOSED_SECONDS,
            ),
            self._histogram(
                "uncached_tokens",
                "Prompt tokens of a request that were not cached where it was prefilled.",
                _TOKENS,
            ),
            self._counter("prompt_tokens", "Tokens of prompts that got an answer.", ("route",)),
            self._counter(
                "cached_tokens",
                "Tokens of these prompts that were served from a cache.",
                ("route",),
            ),
            self._counter(
                "stateless_tokens",
                "Tokens of prompts whose blocks a node had cached, but which had to be computed "
                "again because no state or window to resume from was left.",
                ("route",),
            ),
            self._counter("output_tokens", "Tokens that were generated.", ("route",)),
            self._counter(
                "handed_off_bytes",
                "KV bytes of hand-offs that have arrived, also of those that failed.",
                ("route",),
            ),
        )

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"prfaas_gateway_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"prfaas_gateway_{name}", help_text, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"prfaas_gateway_{name}",
            help_text,
            ("route",),
            buckets=buckets,
            registry=self.registry,
        )

    def _lag_histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(
            f"prfaas_gateway_{name}", help_text, buckets=_LAG_SECONDS, registry=self.registry
        )


def route_of(trace: RequestTrace) -> str:
    if trace.offloaded:
        return "remote"
    if trace.alone:
        return "alone"
    return "local" if trace.routed_s is not None else "none"
