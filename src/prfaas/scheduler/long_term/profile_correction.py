"""Corrects profiles by observation: how much longer prefills take than stated, at each cluster and
at each of its nodes.

A cluster's factor is what its typical node needs, over the stated time: the median over its nodes
of the median of each node's newest prefills, so that neither a few outliers nor a slow node moves
it. A node's pace is relative to its like, and 1 unless it differs from them by much. The corrected
times replace those of the profile in routing, and the factors also in the planner when the
long-term loop calls it. Bookkeeping and arithmetic only. Paper: section 3.4.3, "profiles current
compute capacity".

What is slow gets little work, and then nothing shows that it is not slow any more. So slowness that
was not observed for a while is believed less and less, until the next prefill shows the truth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median, median_low

from prfaas.config.deployment import CorrectionSection
from prfaas.types import ClusterId, NodeId

WARM_UP = 3  # first prefills of a started node: caches, compilers and links warm up
LEAST_PREFILLS = 8  # of a cluster, for a correction: with fewer, a stray one could be the median
_WINDOW = 16  # newest prefills of a node whose median counts
STEP = 0.05  # a factor that is off by less is noise
# A node's own pace comes from so many of its newest prefills, at least and at most.
_LEAST_OF_NODE, _MOST_OF_NODE = 3, 5
_ODD, _LIKE = 1.5, 1.25  # a node differs from its like from the first on, and no more at the second
_GRID = 1.25  # paces are powers of this, so that equally slow nodes have equal paces
_FORGIVEN = 0.5  # a prefill in this part of a node's usual time: what was known of it is outdated
_DOUBTED_AFTER_S, _DOUBTED_EVERY_S = 10.0, 7.0
_UNDOUBTED = 2.0  # a cluster's factor up to this is believed however old it is


def next_factor(
    factor: float, seen: Sequence[Sequence[float]], rules: CorrectionSection, *, least: int
) -> float:
    """The factor after `factor`, if the newest prefills of each node took the times `seen`, over
    the stated ones. It moves only if it is off by more than chance explains, so that plans do not
    follow noise. `least`: the smallest number of prefills."""
    if not rules.correct or sum(map(len, seen)) < least:
        return factor
    target = median_low([median(ratios) for ratios in seen if ratios])
    target = min(max(target, 1 / rules.limit), rules.limit)
    return factor if abs(target / factor - 1) <= STEP else target


class _NodeHistory:
    __slots__ = ("at_s", "brief", "cluster", "doubted_s", "free_s", "pace", "ratios", "warmed_up")

    def __init__(self, cluster: ClusterId) -> None:
        self.cluster = cluster
        self.ratios: deque[float] = deque(maxlen=_WINDOW)  # observed over stated times
        # Its prefills since the newest ratio were short, and took no longer than overheads do.
        self.brief = False
        self.warmed_up = 0  # prefills since the node started, up to the end of the warm-up
        self.free_s = -math.inf  # when the last prefill there ended
        self.at_s = -math.inf  # of the newest ratio
        self.pace = 1.0
        self.doubted_s: float | None = None  # when the pace was last believed less

    def recent(self) -> float | None:
        """The median of the newest ratios; None: too few. Where the pace is in doubt, one shows the
        truth."""
        least = _LEAST_OF_NODE if self.doubted_s is None else 1
        newest = list(self.ratios)[-_MOST_OF_NODE:]
        return median(newest) if len(newest) >= least else None


class ProfileCorrection:
    """Measures prefills and keeps the factors. A node serves one prefill after the other, in the
    order in which it received them: each begins when it was sent or when the previous one ended.
    Prefills of other routers count as slowness, because this router's requests wait for them, too.
    """

    def __init__(self, rules: CorrectionSection) -> None:
        self._rules = rules
        self._nodes: dict[NodeId, _NodeHistory] = {}
        self._doubted_s: dict[ClusterId, float] = {}  # when a factor was last believed less
        self.factors: Mapping[ClusterId, float] = {}  # replaced, never modified
        self.paces: Mapping[NodeId, float] = {}  # those that are not 1; replaced, never modified

    def reset_node(self, node: NodeId) -> None:
        """The node's process has started or ended: its next prefills are a warm-up."""
        if self._nodes.pop(node, None) is not None:
            self._keep_paces()

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
        known = self._nodes.get(node)
        if known is None:
            known = self._nodes[node] = _NodeHistory(cluster)
        took_s = now_s - max(sent_s, min(known.free_s, now_s))
        known.free_s = now_s
        if not counts or not self._rules.correct:
            return took_s
        if known.warmed_up < WARM_UP:
            known.warmed_up += 1
            return took_s
        # Overheads dominate short prefills. They say nothing about a time, unless they took long:
        # else they say that the node is like others.
        ratio = took_s / max(stated_s, self._rules.least_s)
        if stated_s < self._rules.least_s and ratio <= 1:
            known.brief = True
            return took_s
        usual = known.recent()
        if usual is not None and ratio < _FORGIVEN * usual:
            known.ratios.clear()
            known.pace, known.doubted_s = 1.0, None
        known.ratios.append(ratio)
        known.at_s, known.brief = now_s, False
        self._learn(cluster)
        return took_s

    def doubt_old(self, now_s: float, is_busy: Callable[[NodeId], bool]) -> None:
        """Believes slowness less that was not observed for a while. Comes about every second.
        `is_busy`: whether a node has yet to end prefills of this router. If so, nothing was
        observed because it is slow."""
        for node, known in self._nodes.items():
            if known.pace <= 1 or is_busy(node):
                continue
            if _is_due(known.at_s, known.doubted_s, now_s):
                known.pace, known.doubted_s = _snap(math.sqrt(known.pace)), now_s
                known.ratios.clear()
        for cluster, factor in self.factors.items():
            histories = [known for known in self._nodes.values() if known.cluster == cluster]
            at_s = max((known.at_s for known in histories), default=-math.inf)
            doubted_s = self._doubted_s.get(cluster)
            if factor > _UNDOUBTED and _is_due(at_s, doubted_s, now_s):
                self._doubted_s[cluster] = now_s
                self.factors = {**self.factors, cluster: max(math.sqrt(factor), _UNDOUBTED)}
                for known in histories:
                    known.ratios.clear()
        self._keep_paces()

    def _learn(self, cluster: ClusterId) -> None:
        histories = [known for known in self._nodes.values() if known.cluster == cluster]
        factor = self.factors.get(cluster, 1.0)
        # One prefill shows the truth about a factor that is in doubt.
        least = 1 if cluster in self._doubted_s else LEAST_PREFILLS
        # Without them, the only node that is slow would pass for the typical one.
        as_usual = [known for known in histories if known.brief and not known.ratios]
        seen = [*(known.ratios for known in histories), *([factor] for _ in as_usual)]
        moved = next_factor(factor, seen, self._rules, least=least)
        if moved != factor:
            self.factors = {**self.factors, cluster: moved}
        self._doubted_s.pop(cluster, None)
        recent = [(known, found) for known in histories if (found := known.recent()) is not None]
        if recent:
            usual = median_low([*(found for _, found in recent), *(factor for _ in as_usual)])
            if len(histories) > 1 and len(recent) + len(as_usual) == 1:
                usual = factor  # of its like nothing newer is known
            for known, found in recent:
                known.pace = _pace(found / usual, known.pace)
                if known.pace == 1:
                    known.doubted_s = None
        self._keep_paces()

    def _keep_paces(self) -> None:
        paces = {node: known.pace for node, known in self._nodes.items() if known.pace != 1}
        if paces != self.paces:
            self.paces = paces


def _is_due(at_s: float, doubted_s: float | None, now_s: float) -> bool:
    if doubted_s is None or at_s > doubted_s:
        return now_s - at_s > _DOUBTED_AFTER_S
    return now_s - doubted_s > _DOUBTED_EVERY_S


def _pace(ratio: float, before: float) -> float:
    """The pace of a node whose newest prefills took `ratio` times as long as those of its like."""
    limit = _LIKE if before != 1 else _ODD
    return 1.0 if 1 / limit < ratio < limit else _snap(ratio)


def _snap(pace: float) -> float:
    steps = round(math.log(pace) / math.log(_GRID))
    return 1.0 if abs(steps) <= 1 else round(_GRID**steps, 4)
