"""The home of a request that names none, where one gateway serves several PD clusters. Pure.

Requests take turns, so that each PD cluster gets its share of the traffic. A request goes where
more of its prompt is cached, so that conversations stay at one PD cluster; but only while that PD
cluster is ahead of its share by few requests: a prefix that all prompts begin with must not draw
all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prfaas.types import ClusterId

MOST_AHEAD = 16.0  # requests


class HomeTurns:
    def __init__(self, shares: Mapping[ClusterId, float]) -> None:
        """`shares`: of the traffic, by PD cluster."""
        self._shares = shares
        self._credits = dict.fromkeys(shares, 0.0)  # requests that a home is behind its share

    def choose(self, cached: Mapping[ClusterId, int], serving: Collection[ClusterId]) -> ClusterId:
        """`cached`: tokens of the longest prefix at each PD cluster. `serving`: those that can
        serve; where none can, all of them take their turns."""
        homes = self._among(serving)
        near = [home for home in homes if self._credits[home] > -MOST_AHEAD] or homes
        longest = max(cached.get(home, 0) for home in near)
        holders = [home for home in near if cached.get(home, 0) == longest]
        return max(holders, key=lambda home: self._credits[home] + self._shares[home])

    def take(self, chosen: ClusterId, serving: Collection[ClusterId]) -> None:
        """A request goes to the PD cluster that was chosen."""
        homes = self._among(serving)
        total = sum(self._shares[home] for home in homes)
        for home in homes:
            self._credits[home] += self._shares[home] / total
        self._credits[chosen] -= 1.0
        # What a home has missed while it was lost, it need not catch up.
        bound = MOST_AHEAD + 1.0
        self._credits = {home: max(min(c, bound), -bound) for home, c in self._credits.items()}

    def _among(self, serving: Collection[ClusterId]) -> list[ClusterId]:
        return [home for home in self._shares if home in serving] or list(self._shares)
