"""Follows requests: keeps some of them, makes their spans, and collects the spans of the nodes and
kvds that have served them (docs/tracing.md)."""
