"""The home of a request that names none, where one gateway serves several PD clusters. Pure.

A request goes where the longest prefix of its prompt is cached, so that conversations stay at one
PD cluster. Other requests take turns, so that each PD cluster gets its share of the traffic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prfaas.types import ClusterId


class HomeTurns:
    def __init__(self, shares: Mapping[ClusterId, float]) -> None:
        """`shares`: of the traffic, by PD cluster."""
        self._shares = shares
        self._credits = dict.fromkeys(shares, 0.0)

    def choose(self, cached: Mapping[ClusterId, int], serving: Collection[ClusterId]) -> ClusterId:
        """`cached`: tokens of the longest prefix at each PD cluster. `serving`: those that can
        serve; where none can, all of them take their turns."""
        homes = [home for home in self._shares if home in serving] or list(self._shares)
        longest = max(cached.get(home, 0) for home in homes)
        if longest:
            chosen = next(home for home in homes if cached.get(home, 0) == longest)
        else:
            chosen = max(homes, key=lambda home: self._credits[home] + self._shares[home])
        total = sum(self._shares[home] for home in homes)
        for home in homes:
            self._credits[home] += self._shares[home] / total
        self._credits[chosen] -= 1.0
        # A home that always has the longest prefix must not be in debt without bound.
        self._credits = {home: max(min(c, 16.0), -16.0) for home, c in self._credits.items()}
        return chosen
