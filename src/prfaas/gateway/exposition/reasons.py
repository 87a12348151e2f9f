"""The reason of a route as a label: a few words from a fixed list, whatever the sentence says."""

from __future__ import annotations

from typing import Final

from prfaas.scheduler.adaptive import ALONE_IS_CHEAPEST, LEAST_COST, ONLY_WAY
from prfaas.scheduler.homes.elsewhere import ELSEWHERE
from prfaas.scheduler.request import (
    ONLY_ADAPTER,
    ONLY_DECODE,
    ONLY_LOGPROBS,
    ONLY_MULTIMODAL,
    ONLY_TOKEN,
)
from prfaas.scheduler.short_term import (
    ALONE,
    KEPT,
    LONG,
    NOT_KEPT,
    NOT_THERE,
    POLICY_LOCAL,
    POLICY_REMOTE,
    SHORT,
)

OTHER: Final = "other"
_LABELS: Final = {
    SHORT: "short",
    SHORT + NOT_THERE: "no local node",
    LONG: "long",
    LONG + NOT_THERE: "no remote node",
    KEPT: "raised threshold",
    NOT_KEPT: "long",
    LEAST_COST: "least cost",
    ONLY_WAY: "only way",
    ALONE_IS_CHEAPEST: "least cost alone",
    ALONE: "no prefill node",
    POLICY_LOCAL: "policy",
    POLICY_REMOTE: "policy",
    ONLY_LOGPROBS: "prompt logprobs",
    ONLY_ADAPTER: "adapter",
    ONLY_MULTIMODAL: "multimodal",
    ONLY_DECODE: "other tokenization",
    ONLY_TOKEN: "one token",
}
LABELS: Final = frozenset({*_LABELS.values(), "another cluster", OTHER})


def label_of(reason: str) -> str:
    """One of `LABELS`. The request's log line has the whole sentence."""
    label = _LABELS.get(reason)
    if label is None:
        label = "another cluster" if reason.startswith(ELSEWHERE) else OTHER
    return label
