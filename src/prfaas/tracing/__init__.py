"""Follows one request through every process that serves it: W3C trace context, spans, and where
they go. No sockets here, and no OpenTelemetry: `otlp.py` alone needs the extra `otel`."""
