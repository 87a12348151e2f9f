"""Why an attempt has failed: the span's attribute says it, or the words of the error. Pure."""

from __future__ import annotations

from typing import Final

from prfaas.tracing.spans import FAILURE, FAILURES, Span
from prfaas.tracing.summary import CauseKind

_KINDS: Final[dict[str, CauseKind]] = {
    "silent node": "hung node",
    "lost node": "lost node",
    "cut link": "cut link",
    "lost state": "lost state",
    "no memory": "no memory",
    "other": "retry",
}
assert set(_KINDS) == set(FAILURES)
# For spans without the attribute. The words are those of the gateway's own errors.
_WORDS: Final[tuple[tuple[str, CauseKind], ...]] = (
    ("has fallen silent", "hung node"),
    (" is cut", "cut link"),
    ("no room for", "no memory"),
    ("not connected", "lost node"),
    ("connection", "lost node"),
    ("has just left", "lost node"),
    ("tokens cached; ", "lost state"),
)


def failure_kind(attempt: Span) -> CauseKind:
    stated = attempt.attributes.get(FAILURE)
    if isinstance(stated, str) and stated in _KINDS:
        return _KINDS[stated]
    error = attempt.error.lower()
    return next((kind for words, kind in _WORDS if words in error), "retry")
