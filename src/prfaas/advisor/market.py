"""What can be had: instances that hold the model, GPUs with their prices, links, and the goal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from prfaas.estimator.uncertainty import EstimateError
from prfaas.kvspec import KVSpec
from prfaas.planner.problem import LatencyGoal
from prfaas.planner.profile import DecodeRate, PrefillProfile
from prfaas.planner.workload import Workload

Array: TypeAlias = npt.NDArray[np.float64]
Site: TypeAlias = Literal["here", "there"]  # of the PD cluster, of the PrfaaS cluster

# Stands for the price of a GPU that cannot be bought: no budget reaches it, and unlike infinity it
# can be multiplied with a number of zero GPUs.
NOT_FOR_SALE = 1e15


@dataclass(frozen=True, slots=True, eq=False)
class Build:
    """One instance that holds the model: GPUs of one accelerator, and its times. An error is None
    where the times are not estimated."""

    accelerator: str
    gpus: int
    profile: PrefillProfile
    decode: DecodeRate | None  # None: no batch reaches the SLO, so the instance can only prefill
    prefill_error: EstimateError | None = None
    decode_error: EstimateError | None = None
    pipelined: bool = False  # across several interconnect domains

    @property
    def title(self) -> str:
        return f"{self.gpus} x {self.accelerator}"


@dataclass(frozen=True, slots=True)
class Supply:
    """GPUs of one accelerator at one site: those that are owned, and those that can be bought."""

    accelerator: str
    site: Site
    buy_usd: float | None  # per GPU and hour; None: no more can be bought
    owned: int = 0
    owned_usd: float = 0.0  # per owned GPU and hour in use

    @property
    def free_gpus(self) -> int:
        """Owned GPUs that are used before any is bought. Owned GPUs that cost more than bought ones
        are not used."""
        return self.owned if self.owned_usd <= self.marginal_usd else 0

    @property
    def marginal_usd(self) -> float:
        return NOT_FOR_SALE if self.buy_usd is None else self.buy_usd

    def cost(self, gpus: Array) -> Array:
        """USD per hour of this many GPUs."""
        bought = np.maximum(gpus - self.free_gpus, 0.0)
        return np.asarray((gpus - bought) * self.owned_usd + bought * self.marginal_usd)

    def most_gpus(self, usd: Array) -> Array:
        """The largest number of GPUs that this much money per hour pays for."""
        spare = np.asarray(usd) + 1e-9  # a sum of prices may exceed the budget by rounding
        free, price = self.free_gpus, self.owned_usd
        within = np.full(spare.shape, float(free)) if price == 0 else np.floor(spare / price)
        beyond = free + np.floor((spare - free * price) / self.marginal_usd)
        return np.asarray(np.where(within < free, np.maximum(within, 0.0), np.maximum(beyond, 0)))


@dataclass(frozen=True, slots=True)
class LinkChoice:
    gbps: float
    rtt_s: float
    usd_per_hour: float

    @property
    def bps(self) -> float:
        return self.gbps * 1e9


@dataclass(frozen=True, slots=True)
class Place:
    """A build at one site, and the supply of its GPUs."""

    supply: Supply
    build: Build


@dataclass(frozen=True, slots=True)
class Market:
    """Everything that may be combined. A question has a budget or a rate, never both."""

    spec: KVSpec
    workload: Workload
    here: tuple[Place, ...]
    there: tuple[Place, ...]
    links: tuple[LinkChoice, ...]
    output_tokens_per_s: float  # to each request
    utilisation: float
    budget_usd: float | None = None
    rate_rps: float | None = None
    goal: LatencyGoal | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        return (*self.here, *self.there)
