"""The connector's counters, which vLLM passes on to Prometheus. Sums only."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTERS = {
    "handoffs": "Prefills whose state was handed to the kvd.",
    "native_handoffs": "Hand-offs in the native form: whole blocks, to an equal server.",
    "canonical_handoffs": "Hand-offs in the canonical form: converted, to any engine.",
    "refused_handoffs": "Prefills whose state could not be handed off.",
    "lost_transfers": "Decodes whose transfer was lost.",
    "loaded_tokens": "Tokens whose state was loaded from the kvd and not computed.",
    "kept_answers": "Answers whose state the kvd has kept.",
    "unkept_answers": "Answers whose state was not kept: the kvd had no room, or did not answer.",
    "late_lookups": "Requests that went on before the kvd had found their prefix.",
    "saved_bytes": "Bytes that were copied to the kvd.",
    "loaded_bytes": "Bytes that were copied from the kvd.",
}


class PrfaasStats(KVConnectorStats):
    """Sums by the names of `COUNTERS`."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: PrfaasStats) -> PrfaasStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, Any]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PrfaasPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(f"prfaas_connector_{name}", text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        # All labels are set now, so that an unused counter reads 0.
        self._counters: dict[int, dict[str, Counter]] = {
            engine: {name: counter.labels(*labels) for name, counter in counters.items()}
            for engine, labels in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(value)
