"""A node's metrics, under vLLM's names where vLLM has one, so that one scraper reads both.

Gauges are read from the engine at each scrape; requests update histograms and counters.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prfaas.engine.api import EngineLimits, EngineStats, StepTiming
from prfaas.service.exposition import render_metrics

# Seconds. A subset of vLLM's bounds.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_STEP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_LABELS = ("model_name", "engine")


class NodeMetrics:
    def __init__(self, model: str, block_tokens: int, limits: EngineLimits) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model, "0")
        self._limits = limits
        self._running = self._gauge(
            "vllm:num_requests_running", "Requests that the engine prefills or decodes."
        )
        self._waiting = self._gauge(
            "vllm:num_requests_waiting", "Requests that wait for the engine."
        )
        self._usage = self._gauge(
            "vllm:kv_cache_usage_perc", "The share of the KV cache in use, from 0 to 1."
        )
        config = Gauge(
            "vllm:cache_config_info",
            "The configuration of the cache, in labels. The value is always 1.",
            (*_LABELS, "block_size"),
            registry=self.registry,
        )
        config.labels(*self._labels, str(block_tokens)).set(1)
        self.queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked up in the pool."
        )
        self.hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were found in the pool."
        )
        self.external_queries = self._counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens that another node prefilled."
        )
        self.external_hits = self._counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens whose state a transfer brought here."
        )
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens that were processed."
        )
        self.generation_tokens = self._counter(
            "vllm:generation_tokens", "Tokens that were generated."
        )
        self.ttft_s = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _TTFT_S,
        )
        self.step_s = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens of a request.", _STEP_S
        )
        self.exported_bytes = self._counter(
            "prfaas_node_exported_bytes", "Bytes of state that were written to the kvd's pages."
        )
        self.unpooled = self._counter(
            "prfaas_node_unpooled_requests",
            "Requests without a hand-off that did not use the pool: it had no room, or no kvd "
            "answered.",
        )
        self.kept_answers = self._counter(
            "prfaas_node_kept_answers", "Answers whose state the pool has kept."
        )
        self.unkept_answers = self._counter(
            "prfaas_node_unkept_answers",
            "Answers whose state was not kept: the pool had no room or had lost their prompt, or "
            "no kvd answered.",
        )
        self._by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens, by the source of their state.",
            (*_LABELS, "source"),
            registry=self.registry,
        )
        self._succeeded = Counter(
            "vllm:request_success",
            "Requests that have finished, by the reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._timing = _TimingCounters(self.registry, self._labels)
        self._failed = Counter(
            "prfaas_node_failed_requests",
            "Requests that have failed, by the error code.",
            (*_LABELS, "code"),
            registry=self.registry,
        )

    def computed(self, *, computed: int, local: int, external: int) -> None:
        """Counts the prompt tokens of one request by source."""
        self.prompt_tokens.inc(computed + local + external)
        for source, tokens in (
            ("local_compute", computed),
            ("local_cache_hit", local),
            ("external_kv_transfer", external),
        ):
            self._by_source.labels(*self._labels, source).inc(tokens)

    def succeeded(self, reason: str) -> None:
        self._succeeded.labels(*self._labels, reason).inc()

    def failed(self, code: str) -> None:
        self._failed.labels(*self._labels, code).inc()

    def render(self, stats: Callable[[], EngineStats], held: int) -> bytes:
        """`held`: requests that wait for the pool and that the engine does not have yet."""
        now = stats()
        if now.timing is not None:
            self._timing.show(now.timing)
        self._running.set(now.running + now.prefilling)
        self._waiting.set(now.waiting + held)
        capacity = max(1, self._limits.max_running) * self._limits.max_tokens
        self._usage.set(min(1.0, now.kv_tokens / capacity))
        return render_metrics(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self.registry).labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, _LABELS, registry=self.registry, buckets=bounds)
        return family.labels(*self._labels)


class _TimingCounters:
    """How well an emulated engine keeps its schedule. Only emulated engines have these counters."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self._registry = registry
        self._labels = labels
        self._shown = StepTiming()
        self._counters: tuple[Counter, Counter, Counter] | None = None

    def show(self, now: StepTiming) -> None:
        if self._counters is None:
            self._counters = (
                self._counter("steps", "Prefill chunks and decode steps that were emulated."),
                self._counter("wanted_seconds", "Time that these steps take in the profile."),
                self._counter("late_seconds", "Time by which these steps ended too late."),
            )
        steps, wanted_s, late_s = self._counters
        steps.inc(now.steps - self._shown.steps)
        wanted_s.inc(now.wanted_s - self._shown.wanted_s)
        late_s.inc(now.late_s - self._shown.late_s)
        self._shown = now

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"prfaas_emulated_{name}", text, _LABELS, registry=self._registry)
        return family.labels(*self._labels)
