"""Follows one request through every process that serves it: W3C trace context, spans, and where
they go. Without OpenTelemetry: `otlp/sender.py` alone needs the extra `otel`."""
