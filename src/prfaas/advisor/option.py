"""One deployment that could be bought, with its rate and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from prfaas.advisor.market import LinkChoice, Market, Place, Supply
from prfaas.advisor.work import worth
from prfaas.planner.problem import Local, Path, Pool, Problem, Remote


@dataclass(frozen=True, slots=True)
class Group:
    """Equal instances at one site."""

    place: Place
    instances: int

    @property
    def supply(self) -> Supply:
        return self.place.supply

    @property
    def accelerator(self) -> str:
        return self.place.build.accelerator

    @property
    def gpus(self) -> int:
        return self.instances * self.place.build.gpus

    @property
    def usd_per_hour(self) -> float:
        used = min(self.gpus, self.supply.free_gpus)
        return used * self.supply.owned_usd + (self.gpus - used) * self.supply.marginal_usd

    @property
    def bought(self) -> int:
        return max(0, self.gpus - self.supply.free_gpus)


@dataclass(frozen=True, slots=True)
class Option:
    """A PD cluster, and perhaps a PrfaaS cluster behind a link."""

    local: Group
    remote: Group | None
    link: LinkChoice | None
    lambda_max_rps: float
    rate_rps: float  # sustained: within the utilisation, and within the TTFT goal if there is one
    local_prefill: bool = True  # an instance of the PD cluster prefills

    @property
    def worth(self) -> float:
        return worth(self.rate_rps, self.local_prefill)

    @property
    def usd_per_hour(self) -> float:
        remote = 0.0 if self.remote is None else self.remote.usd_per_hour
        link = 0.0 if self.link is None else self.link.usd_per_hour
        return self.local.usd_per_hour + remote + link

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.local,) if self.remote is None else (self.local, self.remote)

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def instances(self) -> int:
        return sum(group.instances for group in self.groups)

    @property
    def accelerators(self) -> tuple[str, ...]:
        return tuple(group.accelerator for group in self.groups)


@dataclass(frozen=True, slots=True)
class Separate:
    """Two PD clusters that share the traffic, without a link: what owned GPUs at two sites, or of
    two types, can do without PrfaaS."""

    first: Option
    second: Option

    @property
    def rate_rps(self) -> float:
        return self.first.rate_rps + self.second.rate_rps

    @property
    def worth(self) -> float:
        return self.first.worth + self.second.worth

    @property
    def lambda_max_rps(self) -> float:
        return self.first.lambda_max_rps + self.second.lambda_max_rps

    @property
    def usd_per_hour(self) -> float:
        return self.first.usd_per_hour + self.second.usd_per_hour

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.first.local, self.second.local

    @property
    def gpus(self) -> int:
        return self.first.gpus + self.second.gpus

    @property
    def instances(self) -> int:
        return self.first.instances + self.second.instances


# What a PrfaaS option is compared with.
Alternative: TypeAlias = Option | Separate


def better(one: Alternative, other: Alternative, market: Market) -> bool:
    """With a budget: the rate of larger worth, then the lower cost. With a rate: the lower cost.
    Then fewer GPUs, fewer instances, and the rate of larger worth. Differences by rounding do not
    count."""
    same_worth = abs(one.worth - other.worth) <= 1e-9 * other.worth
    if market.budget_usd is not None and not same_worth:
        return one.worth > other.worth
    if abs(one.usd_per_hour - other.usd_per_hour) > 1e-9:
        return one.usd_per_hour < other.usd_per_hour
    if (one.gpus, one.instances) != (other.gpus, other.instances):
        return (one.gpus, one.instances) < (other.gpus, other.instances)
    return one.worth > other.worth and not same_worth


def gain_over(option: Option, other: Alternative, market: Market) -> float | None:
    """With a budget: how many times the rate of the other it has. With a rate: how many times its
    cost the other has. None: it costs nothing."""
    if market.budget_usd is not None:
        return option.rate_rps / other.rate_rps
    return other.usd_per_hour / option.usd_per_hour if option.usd_per_hour else None


def problem_of(market: Market, option: Option) -> Problem:
    """The planner's problem of a deployment. The sites' own networks are never the limit."""
    build = option.local.place.build
    assert build.decode is not None, "a PD cluster decodes"
    remotes: tuple[Remote, ...] = ()
    if option.remote is not None:
        assert option.link is not None, "two sites have a link"
        path = Path(option.link.bps, option.link.rtt_s)
        remotes = (Remote(_pool("prfaas", option.remote), path),)
    return Problem(
        spec=market.spec,
        workload=market.workload,
        remotes=remotes,
        local=Local(
            pool=_pool("pd", option.local),
            decode=build.decode,
            fabric=None,
            fixed_prefill=None,
            decode_error=build.decode_error,
            output_tokens_per_s=market.output_tokens_per_s,
        ),
        goal=market.goal,
    )


def _pool(name: str, group: Group) -> Pool:
    build = group.place.build
    return Pool(
        cluster=name,
        accelerator=build.accelerator,
        instances=group.instances,
        gpus_per_instance=build.gpus,
        profile=build.profile,
        usd_per_gpu_hour=group.supply.buy_usd,
        error=build.prefill_error,
    )
