"""Flows between PrfaaS and PD clusters at given thresholds: a linear programme.

A flow is a uniform share of the offloaded requests of its home, whatever their length. So the work
of a flow is its size times the mean work of an offloaded request, under either reading, and all
constraints are linear in the sizes: seconds of prefill per PrfaaS cluster, bits per path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import OptimizeResult, linprog

from prfaas.planner.curves import Array
from prfaas.planner.network.work import HomeWork, Rows
from prfaas.planner.problem import Pool

Mask = npt.NDArray[np.bool_]

# HiGHS accepts no smaller tolerance. Uses of capacity are about 1, so this is a relative error.
_TOLERANCE = 1e-10
# A resource whose use is settled may still be used more by this part, for rounding.
_SETTLED = 1e-9
# A home that does not grow has to be served first. Its requests may be missing at a price above any
# growth, so that a programme always has a solution, and prices that show which thresholds help.
_MISSING_PRICE = 1e6
_MISSING = 1e-8  # of a home's rate: rounding
# HiGHS takes a use of capacity below 1e-9 for 0. A home with so little traffic would seem to need
# nothing, and to grow without a limit.
_MOST_GROWTH = 1e9


class Cut(NamedTuple):
    """A home at one threshold."""

    home: int
    row: int


class Prices(NamedTuple):
    """What the scarce resources are worth, in growth: the dual values of a linear programme."""

    resources: Array
    homes: Array


class Growth(NamedTuple):
    """The largest common factor by which the growing homes' rates may be multiplied."""

    factor: float  # infinite where no growing home offloads, 0 where another cannot be served
    amounts: list[Array]  # per cut: the size of each of its flows, relative to the home's rate
    prices: Prices | None  # None: no home offloads


class FlowProgram:
    """The linear programmes of one problem. A resource is a PrfaaS cluster's prefill or a path."""

    def __init__(self, homes: Sequence[HomeWork], pools: Mapping[str, Pool]) -> None:
        self.homes = homes
        self.solved = 0  # linear programmes so far
        numbers = {name: number for number, name in enumerate(pools)}
        self.pools_of = [[numbers[r.pool.cluster] for r in home.remotes] for home in homes]
        self.paths_of: list[range] = []
        first = len(pools)
        for home in homes:
            self.paths_of.append(range(first, first + len(home.remotes)))
            first += len(home.remotes)
        capacity = [float(pool.instances) for pool in pools.values()]
        capacity += [remote.path.bps for home in homes for remote in home.remotes]
        self._capacity = np.array(capacity)

    def grow(self, cuts: Sequence[Cut], rates: Array, growing: Mask) -> Growth:
        """Maximises the factor of the growing homes' rates; the others keep theirs. A home with
        several cuts may divide its traffic among them: that is a relaxation, because a home has one
        threshold."""
        homes = sorted({cut.home for cut in cuts if self._offloads(cut)})
        if not homes:
            return Growth(math.inf, self._any_amounts(cuts), None)
        uses, owners = self._columns(cuts, rates)
        flows = uses.shape[1]
        # Columns: the flows, the factor, and what is missing of each home that does not grow.
        balance = np.zeros((len(homes), flows + 1 + len(homes)))
        objective = np.zeros(flows + 1 + len(homes))
        limited = any(growing[home] for home in homes)
        objective[flows] = -1.0 if limited else 0.0
        for number, home in enumerate(homes):
            balance[number, :flows] = owners == home
            if growing[home]:
                balance[number, flows] = -1.0
            else:
                balance[number, flows + 1 + number] = 1.0
                objective[flows + 1 + number] = _MISSING_PRICE
        found = self._solve(
            objective,
            np.hstack([uses, np.zeros((len(uses), 1 + len(homes)))]),
            np.where(self._capacity > 0, 1.0, 0.0),
            balance,
            np.array([0.0 if growing[home] else 1.0 for home in homes]),
            most=np.where(np.arange(len(objective)) == flows, _MOST_GROWTH, math.inf),
        )
        assert found is not None, "all requests may be missing"
        prices = np.zeros(len(self.homes))
        prices[homes] = found.eqlin.marginals
        missing = float(np.sum(found.x[flows + 1 :]))
        factor = float(found.x[flows]) if limited else math.inf
        return Growth(
            factor=factor if missing < _MISSING else 0.0,
            amounts=self._by_cut(cuts, found.x),
            prices=Prices(-np.asarray(found.ineqlin.marginals), prices),
        )

    def balance(self, rows: Sequence[int], rates: Array) -> list[Array]:
        """The share of each flow of each home in the home's offloaded requests, so that the busiest
        resource is as little busy as possible, then the next busiest, and so on. With one home
        every PrfaaS cluster receives requests in proportion to what it can serve (eq. 3)."""
        cuts = [Cut(home, row) for home, row in enumerate(rows)]
        homes = [cut.home for cut in cuts if self._offloads(cut)]
        shares = self._any_amounts(cuts)
        if not homes:
            return shares
        uses, owners = self._columns(cuts, rates)
        flows = uses.shape[1]
        balance = np.zeros((len(homes), flows + 1))
        for number, home in enumerate(homes):
            balance[number, :flows] = owners == home
        objective = np.zeros(flows + 1)
        objective[flows] = 1.0
        unsettled = (uses > 0).any(axis=1) & (self._capacity > 0)
        # Where few requests are offloaded all uses are small, but HiGHS takes small ones for 0.
        uses = uses / (uses[unsettled].max(initial=0.0) or 1.0)
        limit = np.zeros(len(uses))  # of the settled resources
        while unsettled.any():
            found = self._solve(
                objective,
                np.hstack([uses, np.where(unsettled, -1.0, 0.0)[:, None]]),
                np.where(unsettled, 0.0, limit),
                balance,
                np.ones(len(homes)),
            )
            if found is None:  # rounding: the flows so far are balanced to its size
                break
            shares = self._by_cut(cuts, found.x)
            level = float(found.x[flows])
            # A resource with a price cannot be less busy than this, whatever the others do.
            settled = unsettled & (np.asarray(found.ineqlin.marginals) < -1e-9)
            if not settled.any() or level <= 1e-9:
                break
            limit[settled] = level * (1 + _SETTLED)
            unsettled &= ~settled
        return [_whole(share) for share in shares]

    def cheapest(self, home: int, rows: Rows, rate_rps: float, prices: Prices) -> tuple[int, float]:
        """The row whose work costs least at these prices on the best way, and its cost."""
        work, least, best = self.homes[home].work, math.inf, int(rows[-1])
        for index, (pool, path) in enumerate(self._ways(home)):
            per_second = prices.resources[pool] * rate_rps / self._scale(pool)
            per_bit = prices.resources[path] * rate_rps / self._scale(path)
            cost = per_second * work.remote_s[index][rows] + per_bit * work.bits[rows]
            place = int(np.argmin(cost))
            if cost[place] < least:
                least, best = float(cost[place]), int(rows[place])
        return best, least

    def _scale(self, resource: int) -> float:
        return float(self._capacity[resource]) or 1.0  # of 0: a limit of 0, see `grow`

    def _offloads(self, cut: Cut) -> bool:
        return bool(self.homes[cut.home].work.p[cut.row] > 0)

    def _columns(self, cuts: Sequence[Cut], rates: Array) -> tuple[Array, Array]:
        """One column per flow of each cut: its use of every resource; and each column's home."""
        columns, owners = [], []
        for home, row in filter(self._offloads, cuts):
            work, rate = self.homes[home].work, float(rates[home])
            for index, (pool, path) in enumerate(self._ways(home)):
                column = np.zeros(len(self._capacity))
                column[pool] = rate * work.remote_s[index][row] / self._scale(pool)
                column[path] = rate * work.bits[row] / self._scale(path)
                columns.append(column)
                owners.append(home)
        return np.stack(columns, axis=1), np.array(owners)

    def _by_cut(self, cuts: Sequence[Cut], flows: Array) -> list[Array]:
        amounts, first = [], 0
        for cut in cuts:
            count = len(self.pools_of[cut.home])
            if self._offloads(cut):
                amounts.append(np.maximum(flows[first : first + count], 0.0))
                first += count
            else:
                amounts.append(np.zeros(count))
        return amounts

    def _any_amounts(self, cuts: Sequence[Cut]) -> list[Array]:
        return [np.zeros(len(self.pools_of[cut.home])) for cut in cuts]

    def _ways(self, home: int) -> list[tuple[int, int]]:
        return list(zip(self.pools_of[home], self.paths_of[home], strict=True))

    def _solve(
        self,
        objective: Array,
        uses: Array,
        limits: Array,
        balance: Array,
        sums: Array,
        most: Array | None = None,
    ) -> OptimizeResult | None:
        """`most`: an upper bound of each column. None: no flows are within the limits."""
        self.solved += 1
        upper = np.full(len(objective), math.inf) if most is None else most
        found = linprog(
            objective,
            A_ub=uses,
            b_ub=limits,
            A_eq=balance,
            b_eq=sums,
            bounds=[(0.0, limit) for limit in upper.tolist()],
            method="highs",
            options={
                "primal_feasibility_tolerance": _TOLERANCE,
                "dual_feasibility_tolerance": _TOLERANCE,
            },
        )
        infeasible = 2
        assert found.status in (0, infeasible), found.message
        return found if found.status == 0 else None


def _whole(shares: Array) -> Array:
    """Shares that sum to 1, without those that are rounding. All are 0 where none is sent."""
    sent = np.where(shares > _MISSING, shares, 0.0)
    total = float(sent.sum())
    return sent / total if total > 0 else sent
