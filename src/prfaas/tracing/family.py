"""The spans of one request as a tree: the attempt and the call that each belongs to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prfaas.tracing.spans import ATTEMPT, DECODE, PREFILL, REQUEST, Span

_DEEPEST = 32  # spans of peers: a chain of parents may be wrong, or a circle


class Family:
    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self._by_id = {span.span_id: span for span in spans}

    @property
    def root(self) -> Span | None:
        return next((span for span in self.spans if span.name == REQUEST), None)

    def named(self, *names: str) -> list[Span]:
        return [span for span in self.spans if span.name in names]

    def ancestors(self, span: Span) -> Iterator[Span]:
        """The parent of the span, the parent's parent, and so on."""
        for _ in range(_DEEPEST):
            parent = self._by_id.get(span.parent_id or "")
            if parent is None:
                return
            yield parent
            span = parent

    def depth(self, span: Span) -> int:
        return sum(1 for _ in self.ancestors(span))

    def attempt_of(self, span: Span) -> Span | None:
        if span.name == ATTEMPT:
            return span
        return next((one for one in self.ancestors(span) if one.name == ATTEMPT), None)

    def is_lost(self, span: Span) -> bool:
        """Whether the span belongs to an attempt that has failed."""
        attempt = self.attempt_of(span)
        return attempt is not None and bool(attempt.error)

    def call_of(self, span: Span) -> Span | None:
        """The gateway's call of a node, PREFILL or DECODE, that the span is part of."""
        names = (PREFILL, DECODE)
        return next((one for one in self.ancestors(span) if one.name in names), None)
