"""Corrects profiles by observation: how much longer a cluster's prefills take than stated.

There is one factor per cluster: the median of observed over stated time of its newest prefills, so
that a few outliers do not move it. Bookkeeping and arithmetic only. The corrected times replace
those of the profile in routing, and in the planner when the long-term loop calls it. Paper: section
3.4.3, "profiles current compute capacity".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from prfaas.config.deployment import CorrectionSection
from prfaas.types import ClusterId, NodeId


def next_factor(factor: float, ratios: Sequence[float], rules: CorrectionSection) -> float:
    """The factor after `factor`, if the newest prefills took `ratios` of the stated time. It moves
    only if it is off by more than chance explains, so that plans do not follow noise."""
    if not rules.correct or len(ratios) < rules.least_prefills:
        return factor
    target = min(max(median(ratios), 1 / rules.limit), rules.limit)
    return factor if abs(target / factor - 1) <= rules.step else target


class ProfileCorrection:
    """Measures prefills and keeps the factors. A node serves one prefill after the other, in the
    order in which it received them: each begins when it was sent or when the previous one ended.
    Prefills of other routers count as slowness, because this router's requests wait for them, too.
    """

    def __init__(self, rules: CorrectionSection) -> None:
        self._rules = rules
        self._ratios: dict[ClusterId, deque[float]] = {}
        self._warmups: dict[
            NodeId, int
        ] = {}  # prefills since the node started, up to the end of the warm-up
        self._free_s: dict[NodeId, float] = {}  # when the last prefill there ended
        self.factors: Mapping[ClusterId, float] = {}  # replaced, never modified

    def reset_node(self, node: NodeId) -> None:
        """The node's process has started or ended: its next prefills are a warm-up."""
        self._warmups.pop(node, None)
        self._free_s.pop(node, None)

    def record_prefill(
        self,
        cluster: ClusterId,
        node: NodeId,
        stated_s: float,
        sent_s: float,
        now_s: float,
        *,
        counts: bool = True,
    ) -> float:
        """Records the end of a prefill with the stated time `stated_s`. Returns its duration,
        without the time in the node's queue. `counts`: whether the duration is evidence."""
        took_s = now_s - max(sent_s, self._free_s.get(node, sent_s))
        self._free_s[node] = now_s
        if not counts:
            return took_s
        count = self._warmups.get(node, 0)
        if count < self._rules.warmup_prefills:
            self._warmups[node] = count + 1
        elif stated_s >= self._rules.least_s:
            ratios = self._ratios.setdefault(cluster, deque(maxlen=self._rules.window_prefills))
            ratios.append(took_s / stated_s)
            factor = self.factors.get(cluster, 1.0)
            moved = next_factor(factor, ratios, self._rules)
            if moved != factor:
                self.factors = {**self.factors, cluster: moved}
        return took_s
