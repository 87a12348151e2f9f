"""The plain reference: every number of instances on both sides, by the paper's equations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from prfaas.advisor.market import Build, LinkChoice, Market, Place
from prfaas.planner.curves import Atoms, WorkCurves, cut_workload
from prfaas.planner.equations import (
    eq3_theta_prfaas,
    eq4_theta_pd_p,
    eq5_theta_pd_d,
    eq6_lambda_max,
)


class Choice(NamedTuple):
    here: str
    n_local: int
    there: str
    n_remote: int
    gbps: float


class Tried(NamedTuple):
    order: tuple[float, ...]  # the smaller, the better
    choice: Choice
    rate_rps: float  # sustained
    usd_per_hour: float
    gpus: int
    instances: int


class Rate(NamedTuple):
    rps: float
    worth: float  # what rates are compared by: with local prefill, the rate / 0.98


class Exhaustive:
    """Tries all counts of one market. Its workload is the coarse one that the search uses."""

    def __init__(self, market: Market) -> None:
        self.market = market
        self._curves = WorkCurves(
            cut_workload(market.workload), Atoms(market.workload, market.spec), "exact"
        )

    def decode_rps(self, build: Build, instances: int) -> float:
        decode = build.decode
        assert decode is not None
        out = self.market.workload.output_tokens
        return eq5_theta_pd_d(instances, decode.bs_max, decode.t_decode_s, out)

    def producers(
        self, here: Build, there: Build | None, n_prefill: int, n_remote: int, bps: float
    ) -> float:
        """Eq. 6 without decode, at the best threshold."""
        curves, p = self._curves, self._curves.cuts.p
        local = eq4_theta_pd_p(n_prefill, curves.prefill_short_s(here.profile))
        if there is None or n_remote == 0:
            return float(np.asarray(local)[-1])
        remote = eq3_theta_prfaas(
            n_remote, curves.prefill_long_s(there.profile), bps, curves.kv_bytes_long
        )
        with np.errstate(invalid="ignore"):
            # Without a prefill instance only the row that keeps nothing local counts.
            local = np.where(p == 1, np.inf, local)
        return float(np.max(eq6_lambda_max(remote, local, np.inf, p)))

    def rates(
        self, here: Build, there: Build | None, n_locals: int, n_remote: int, bps: float
    ) -> list[Rate]:
        """Lambda_max for 1, 2, ... `n_locals` local instances."""
        made = [self.producers(here, there, n, n_remote, bps) for n in range(n_locals)]
        if made and (there is None or n_remote == 0):
            made[0] = 0.0
        found = []
        for total in range(1, n_locals + 1):
            splits = [min(made[n], self.decode_rps(here, total - n)) for n in range(total)]
            some = max(splits[1:], default=0.0)
            if some >= 0.98 * max(splits):
                found.append(Rate(some, some / 0.98))
            else:
                found.append(Rate(max(splits), max(splits)))
        return found

    def ranked(self) -> list[Tried]:
        """The best deployment of two sites of each pair of accelerators, best first."""
        best: dict[tuple[str, str], Tried] = {}
        for here, there, link in itertools.product(
            self.market.here, self.market.there, self.market.links
        ):
            if here.build.decode is None:
                continue
            key = (here.build.accelerator, there.build.accelerator)
            for tried in self._tried(here, there, link):
                if key not in best or tried.order < best[key].order:
                    best[key] = tried
        return sorted(best.values())

    def single(self) -> tuple[float, float] | None:
        """Sustained rate and cost of the best PD cluster without a remote site."""
        market = self.market
        found: list[tuple[float, ...]] = []
        for place in market.places:
            if place.build.decode is None:
                continue
            for count, rate in enumerate(
                self.rates(place.build, None, self._most(place), 0, 1.0), 1
            ):
                served, usd = rate.rps * market.utilisation, self._usd(place, count)
                if market.budget_usd is not None and served and usd <= market.budget_usd + 1e-9:
                    found.append((-_digits(served), usd))
                if market.rate_rps is not None and served >= market.rate_rps * (1 - 1e-9):
                    found.append((round(usd, 6), place.build.gpus * count, count, -_digits(served)))
        if not found:
            return None
        best = min(found)
        if market.budget_usd is not None:
            return -best[0], best[1]
        return -best[3], best[0]

    def _tried(self, here: Place, there: Place, link: LinkChoice) -> Iterator[Tried]:
        market = self.market
        n_locals, n_remotes = self._most(here), self._most(there)
        alone = self.rates(here.build, None, n_locals, 0, link.bps)
        for n_remote in range(1, n_remotes + 1):
            rates = self.rates(here.build, there.build, n_locals, n_remote, link.bps)
            for n_local, rate in enumerate(rates, start=1):
                usd = link.usd_per_hour + self._usd(here, n_local) + self._usd(there, n_remote)
                served = rate.rps * market.utilisation
                gpus = n_local * here.build.gpus + n_remote * there.build.gpus
                size = (gpus, n_local + n_remote)
                if market.budget_usd is not None:
                    idle = rate.rps <= alone[n_local - 1].rps * (1 + 1e-9)
                    if usd > market.budget_usd + 1e-9 or idle:
                        continue
                    worth = _digits(rate.worth * market.utilisation)
                    order: tuple[float, ...] = (-worth, round(usd, 6), *size)
                else:
                    assert market.rate_rps is not None
                    suffices = alone[n_local - 1].rps * market.utilisation >= market.rate_rps
                    if served < market.rate_rps * (1 - 1e-9) or suffices:
                        continue
                    order = (round(usd, 6), *size, -_digits(rate.worth))
                choice = Choice(here.build.title, n_local, there.build.title, n_remote, link.gbps)
                yield Tried(order, choice, served, usd, *size)

    def _most(self, place: Place) -> int:
        """The most instances that could be in any deployment."""
        if self.market.budget_usd is not None:
            gpus = place.supply.free_gpus
            if place.supply.buy_usd is not None:
                spare = self.market.budget_usd - gpus * place.supply.owned_usd
                gpus += int(spare / place.supply.buy_usd + 1e-9)
            return gpus // place.build.gpus
        assert self.market.rate_rps is not None
        rate = self.market.rate_rps / self.market.utilisation
        all_s = float(self._curves.prefill_long_s(place.build.profile)[0])
        decode = self.decode_rps(place.build, 1) if place.build.decode is not None else np.inf
        needed = int(rate * all_s + 1) + int(rate / decode + 1)
        if place.supply.buy_usd is None:
            needed = min(needed, place.supply.free_gpus // place.build.gpus)
        return needed

    def _usd(self, place: Place, instances: int) -> float:
        gpus, supply = instances * place.build.gpus, place.supply
        owned = min(gpus, supply.free_gpus)
        bought = gpus - owned
        return owned * supply.owned_usd + (
            bought * supply.buy_usd if bought and supply.buy_usd else 0
        )


def _digits(value: float) -> float:
    """Nine significant digits: differences by rounding do not decide."""
    return float(f"{value:.9g}")
