"""Reads the files of a question to `prfaas advise`, and finds what can be had: the market."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prfaas.advisor.market import Build, LinkChoice, Market, Place, Site, Supply
from prfaas.catalog import Catalog
from prfaas.config import Deployment, parse_deployment
from prfaas.config.advice import AdviceQuestion
from prfaas.config.deployment import Cluster
from prfaas.config.write import sparse
from prfaas.errors import InputError
from prfaas.estimator.efficiency import fitted
from prfaas.estimator.sizes import MOST_GPUS, joined_gpus, smallest_instance
from prfaas.planner.instance_times import Lengths, TimesFinder
from prfaas.planner.problem import LatencyGoal
from prfaas.planner.profile import decode_rate
from prfaas.studies.problem_files import Study

# Instances of the smallest size that holds the model, and these multiples of it.
SIZES = (1, 2, 4)
_NO_PRICE = "no price is known"


class LeftOut(NamedTuple):
    """An accelerator that is not considered, with the reason."""

    accelerator: str
    reason: str


@dataclass(frozen=True, slots=True)
class Price:
    """What a GPU of an accelerator costs per hour, and who says so."""

    accelerator: str
    usd_per_hour: float
    source: str


@dataclass(frozen=True, slots=True)
class Offer:
    """The market of a question, and what was left out of it."""

    market: Market
    prices: tuple[Price, ...]
    left_out: tuple[LeftOut, ...]
    catalog: Catalog


class MarketStudy(Study):
    """Finds the builds of a question's accelerators with the times that `prfaas plan` uses."""

    def __init__(self, file: Path, question: AdviceQuestion) -> None:
        super().__init__(file, "exact")
        self._question = question

    def offer(self) -> Offer:
        question = self._question
        deployment = self._checked_deployment()
        catalog = self.catalog(deployment)
        try:
            self._check_names(catalog)
            spec = self._spec(question.model, catalog)
            workload = self._workload(question.workload)
            lengths = Lengths.of(workload)
            times = self._finder(question.model, catalog, spec, lengths)
            prices = self._prices(catalog)
            finder = _Finder(question, times, lengths, catalog)
            here, there = (tuple(finder.places(site, prices)) for site in ("here", "there"))
            if not here and not there:
                raise finder.nothing()
        except InputError as error:
            raise error.in_file(self._file) from None
        goal = None
        if question.slo.ttft_s is not None:
            goal = LatencyGoal(question.slo.ttft_s, question.slo.ttft_quantile)
        market = Market(
            spec=spec,
            workload=workload,
            here=here,
            there=there,
            links=tuple(
                LinkChoice(link.gbps, link.rtt_ms / 1e3, link.hourly_usd) for link in question.links
            ),
            output_tokens_per_s=question.slo.output_tokens_per_s,
            utilisation=question.utilisation,
            budget_usd=question.budget_usd_per_hour,
            rate_rps=question.rate_rps,
            goal=goal,
        )
        return Offer(market, tuple(prices.values()), finder.left_out(), catalog)

    def _checked_deployment(self) -> Deployment:
        """The sections that a deployment file has, too, with the checks of its reader."""
        question = self._question
        deployment = Deployment(
            model=question.model,
            workload=question.workload,
            slo=question.slo,
            clusters=[Cluster("pd", "pd", "any", 1, 1)],
            catalog=question.catalog,
        )
        return parse_deployment(sparse(deployment), self._file)

    def _check_names(self, catalog: Catalog) -> None:
        hardware = self._question.hardware
        named = [
            (f"owned.{i}.accelerator", o.accelerator) for i, o in enumerate(self._question.owned)
        ]
        named += [(f"hardware.here.{i}", name) for i, name in enumerate(hardware.here or [])]
        named += [(f"hardware.there.{i}", name) for i, name in enumerate(hardware.there or [])]
        named += [(f"hardware.prices.{name}", name) for name in hardware.prices]
        for where, name in named:
            try:
                catalog.accelerator(name)
            except InputError as error:
                raise InputError(error.problem, where=where, fix=error.fix) from None

    def _prices(self, catalog: Catalog) -> dict[str, Price]:
        found = {}
        for name, accelerator in catalog.accelerators.items():
            listed = accelerator.usd_per_hour
            if name in self._question.hardware.prices:
                found[name] = Price(name, self._question.hardware.prices[name], "given")
            elif listed is not None:
                found[name] = Price(name, listed.value, f"{listed.status}: {listed.source}")
        return found


class _Finder:
    """Finds the instances that hold the model, for every accelerator that may be used."""

    def __init__(
        self, question: AdviceQuestion, times: TimesFinder, lengths: Lengths, catalog: Catalog
    ) -> None:
        self._question = question
        self._times = times
        self._lengths = lengths
        self._catalog = catalog
        self._builds: dict[str, tuple[Build, ...]] = {}
        self._left_out: dict[str, str] = {}

    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(LeftOut(*item) for item in self._left_out.items())

    def nothing(self) -> InputError:
        """No accelerator is left; says why, for those that have a price first."""
        reasons = [f"{left.accelerator}: {left.reason}" for left in self.left_out()]
        reasons.sort(key=lambda reason: _NO_PRICE in reason)
        more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        return InputError(
            f"no accelerator that may be used holds the model ({'; '.join(reasons[:3])}{more})",
            where="hardware",
            fix="allow others, give prices (--price), or use weights of fewer bits (--weights fp8)",
        )

    def places(self, site: Site, prices: dict[str, Price]) -> Iterator[Place]:
        hardware = self._question.hardware
        named = hardware.here if site == "here" else hardware.there
        wanted = set(self._usual() if named is None else named)
        owned = {o.accelerator: o for o in self._question.owned if o.site == site and o.gpus}
        for name in self._catalog.accelerators:
            mine = owned.get(name)
            price = prices.get(name) if name in wanted else None
            if name in wanted and price is None and mine is None:
                self._left_out[name] = f"{_NO_PRICE}; give one with --price"
            if price is None and mine is None:
                continue
            supply = Supply(name, site, price.usd_per_hour if price else None)
            if mine is not None:
                supply = Supply(name, site, supply.buy_usd, mine.gpus, mine.usd_per_gpu_hour)
            for build in self._builds_of(name):
                yield Place(supply, build)

    def _usual(self) -> Iterator[str]:
        """Accelerators that are considered without being named. Estimates for hardware of which
        nothing was ever fitted say what its data sheet allows, not what engines reach: such
        hardware would win too often."""
        known = {record.accelerator for record in self._catalog.profiles}
        known.update(fitted().fitted_accelerators, self._question.hardware.prices)
        for name in self._catalog.accelerators:
            if name in known:
                yield name
            else:
                self._left_out[name] = "no time on it is known; name it (--here, --there)"

    def _builds_of(self, accelerator: str) -> tuple[Build, ...]:
        if accelerator not in self._builds:
            found = []
            for gpus in self._sizes(accelerator):
                try:
                    found.append(self._build(accelerator, gpus))
                except InputError as error:
                    self._left_out.setdefault(accelerator, error.problem)
            if found:
                self._left_out.pop(accelerator, None)
            self._builds[accelerator] = tuple(found)
        return self._builds[accelerator]

    def _sizes(self, accelerator: str) -> list[int]:
        if self._question.hardware.gpus_per_instance:
            return sorted(set(self._question.hardware.gpus_per_instance))
        measured = self._catalog.profiles_of(self._question.model.name)
        sizes = {record.gpus for record in measured if record.accelerator == accelerator}
        try:
            one = self._times.instance(accelerator, 1)
            sized = smallest_instance(
                one, self._lengths.longest, self._lengths.context, across_domains=True
            )
            # An instance goes across interconnect domains only if it must.
            joined, least = joined_gpus(one), sized.gpus
            most = min(MOST_GPUS, joined if least <= joined else MOST_GPUS)
            sizes |= {least * times for times in SIZES if least * times <= most}
        except InputError as error:
            if not sizes:
                self._left_out[accelerator] = error.problem
        return sorted(sizes)

    def _build(self, accelerator: str, gpus: int) -> Build:
        times = self._times.times(accelerator, gpus, decode=True)
        try:
            decode = decode_rate(times.decode, self._question.slo.output_tokens_per_s)
        except InputError:
            decode = None
        joined = self._catalog.accelerator(accelerator).interconnect_gpus
        return Build(
            accelerator=accelerator,
            gpus=gpus,
            profile=times.prefill,
            decode=decode,
            prefill_error=times.prefill_error,
            decode_error=times.decode_error,
            pipelined=joined is not None and gpus > joined.value,
        )
