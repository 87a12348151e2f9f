"""Profiles corrected by what is observed: how much longer a cluster's prefills take than stated.

One factor per cluster, the median of what its newest prefills took over what its profile says, so
that neither a stray observation nor a few of them move it. Bookkeeping and arithmetic only. The
corrected times are used wherever the profile's were: in routing, and by the planner when the
long-term loop asks it. Paper: section 3.4.3, "profiles current compute capacity".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from prfaas.config.deployment import CorrectionSection
from prfaas.types import ClusterId, NodeId


def next_factor(factor: float, ratios: Sequence[float], rules: CorrectionSection) -> float:
    """The factor that follows `factor` when the newest prefills took `ratios` of what was stated.
    It moves only when it is off by more than chance, so that plans do not follow noise."""
    if not rules.correct or len(ratios) < rules.least_prefills:
        return factor
    target = min(max(median(ratios), 1 / rules.limit), rules.limit)
    return factor if abs(target / factor - 1) <= rules.step else target


class ProfileCorrection:
    """A node serves one prefill after the other, in the order in which it got them: each begins
    when it was sent or when the one before it ended. What other routers send there counts as
    slowness; a request of ours will find it there as well."""

    def __init__(self, rules: CorrectionSection) -> None:
        self._rules = rules
        self._ratios: dict[ClusterId, deque[float]] = {}
        self._answers: dict[NodeId, int] = {}  # since the node started, up to the warm-up's end
        self._free_s: dict[NodeId, float] = {}  # when the last prefill there ended
        self.factors: Mapping[ClusterId, float] = {}  # replaced, never changed

    def reset_node(self, node: NodeId) -> None:
        """A process that has just begun, or has gone: what it does first is no measure."""
        self._answers.pop(node, None)
        self._free_s.pop(node, None)

    def record_prefill(
        self, cluster: ClusterId, node: NodeId, stated_s: float, sent_s: float, now_s: float
    ) -> float:
        """A prefill has ended that should have taken `stated_s`. How long it took, its time in the
        node's queue not counted."""
        took_s = now_s - max(sent_s, self._free_s.get(node, sent_s))
        self._free_s[node] = now_s
        seen = self._answers.get(node, 0)
        if seen < self._rules.warmup_prefills:
            self._answers[node] = seen + 1
        elif stated_s >= self._rules.least_s:
            ratios = self._ratios.setdefault(cluster, deque(maxlen=self._rules.window_prefills))
            ratios.append(took_s / stated_s)
            factor = self.factors.get(cluster, 1.0)
            moved = next_factor(factor, ratios, self._rules)
            if moved != factor:
                self.factors = {**self.factors, cluster: moved}
        return took_s
