"""Spans to a collector, by OTLP over HTTP. `sender.py` alone needs the extra `otel`."""

from prfaas.tracing.otlp.exporter import check_endpoint, chosen_exporter, open_exporter

__all__ = ["check_endpoint", "chosen_exporter", "open_exporter"]
