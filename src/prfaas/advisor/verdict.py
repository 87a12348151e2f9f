"""Whether PrfaaS is worth it, and if not, why: with the number that decides.

PrfaaS pays where a request is served for less money by two kinds of GPUs than by one, and where the
link carries what moves between them. So if it does not pay, the search is repeated with one
obstacle removed at a time: the link's bandwidth, its price, both, whole instances. The first that
makes PrfaaS pay is the reason. If none is, no pair of GPUs serves a request for less, and the
reason is the price of arithmetic, or that prefill is too small a part of the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from prfaas.advisor import bounds
from prfaas.advisor.market import LinkChoice, Market, Place
from prfaas.advisor.option import Alternative, Option, Separate, gain_over
from prfaas.advisor.search import Found, Search
from prfaas.kvspec import FullAttention

WORTH_IT = 1.05  # a smaller gain does not pay for a second site and its operation
_MOST_GBPS = 1e6
_UNLIMITED = 1e6  # times the bandwidth, or a fraction of the price
_HALVINGS = 5

Reason: TypeAlias = Literal[
    "gain",
    "no single cluster",
    "owned GPUs suffice",
    "two clusters",
    "nothing to offload to",
    "nothing to decode with",
    "dense model",
    "thin link",
    "price of the link",
    "whole instances",
    "short prompts",
    "no cheaper arithmetic",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    worth_it: bool
    reason: Reason
    text: str
    gain: float | None
    pays_from_gbps: float | None = None  # the slowest link with which it would be worth it


def judge(search: Search, found: Found) -> Verdict:
    market = search.market
    best = found.alternative(market)
    if best is None:
        text = "Worth it: no single PD cluster serves this, and PrfaaS does."
        return Verdict(True, "no single cluster", text, None)
    if market.rate_rps is not None and best.usd_per_hour < 0.005:
        text = (
            f"Not worth it: {_hardware(best)} suffice for {market.rate_rps:g} requests/s and "
            "cost nothing more."
        )
        return Verdict(False, "owned GPUs suffice", text, None)
    gain = gain_over(found.prfaas[0], best, market) if found.prfaas else None
    if gain is not None and gain >= WORTH_IT:
        return Verdict(True, "gain", _praise(market, found.prfaas[0], best, gain), gain)
    if found.prfaas and found.prfaas[0].usd_per_hour == 0 and market.rate_rps is not None:
        text = f"Worth it: owned GPUs serve it; {_hardware(best)} would cost more."
        return Verdict(True, "gain", text, None)
    return _Doubt(search, found, best, gain).verdict()


def _praise(market: Market, option: Option, other: Alternative, gain: float) -> str:
    best = f"the best without PrfaaS ({_hardware(other)})"
    if market.budget_usd is not None:
        return (
            f"Worth it: {option.rate_rps:.2f} requests/s, {gain:.2f} times the "
            f"{other.rate_rps:.2f} of {best} for the same budget."
        )
    return (
        f"Worth it: ${option.usd_per_hour:,.2f} per hour, and {best} costs "
        f"${other.usd_per_hour:,.2f} for the same rate, {gain:.2f} times as much."
    )


class _Doubt:
    """Finds the reason why PrfaaS does not pay."""

    def __init__(self, search: Search, found: Found, best: Alternative, gain: float | None) -> None:
        self._search = search
        self._market = search.market
        self._best = best
        self._single = found.singles[0] if found.singles else None
        self._gain = gain

    def verdict(self) -> Verdict:
        if not self._market.there:
            return self._because("nothing to offload to", "no GPU that may be used there holds it")
        if not any(self._search.traffic.of(place.build).decode_rps for place in self._market.here):
            words = "no GPU that may be used here holds the model and decodes fast enough"
            return self._because("nothing to decode with", words)
        if self._pays_with(_faster(self._market.links, _UNLIMITED)):
            return self._slow_link()
        if self._pays_with(_cheaper(self._market.links, 0.0)):
            return self._dear_link()
        if self._pays_with(_cheaper(_faster(self._market.links, _UNLIMITED), 0.0)):
            words = f"{_prices(self._market.links)}. Only a faster link for less money would pay"
            return self._because("price of the link", words)
        if isinstance(self._best, Separate) or self._single is None:
            return self._because(
                "two clusters",
                f"{_hardware(self._best)} as two PD clusters that share the traffic serve "
                f"{self._best.rate_rps:.2f} requests/s, and no link makes PrfaaS serve more",
            )
        possible = self._gain_of_fractions()
        if possible >= WORTH_IT:
            return self._because(
                "whole instances",
                f"if instances could be divided, PrfaaS would gain up to {possible:.2f}x over "
                f"{_hardware(self._best)}, but with whole instances at two sites it does not",
            )
        return self._dear_arithmetic(possible, self._single)

    def _slow_link(self) -> Verdict:
        links = self._market.links
        factor = _smallest(lambda times: self._pays_with(_faster(links, times)), 1.0, _UNLIMITED)
        chosen = self._best_with(_faster(links, factor))
        assert chosen is not None and chosen.link is not None, "it pays with this bandwidth"
        pays_from = chosen.link.gbps
        offered = links[_faster(links, factor).index(chosen.link)].gbps
        spec = self._market.spec
        tokens = self._typical_long_tokens()
        kv_bytes = spec.kv_bytes(tokens)
        dense = all(isinstance(group, FullAttention) for group in spec.groups)
        words = (
            f"a link of {offered:,.3g} Gbit/s carries the KV of {offered * 1e9 / 8 / kv_bytes:.2g} "
            f"prompts of {tokens:,} tokens per second ({kv_bytes / 1e6:,.0f} MB each)"
        )
        if dense:
            words += (
                f", because every layer of this model keeps all tokens "
                f"({spec.bytes_per_token / 1e3:,.0f} kB per token)"
            )
        words += (
            f". At {pays_from:,.3g} Gbit/s for the same price, {_times(factor)} times this "
            "bandwidth, it begins to pay"
        )
        return self._because("dense model" if dense else "thin link", words, pays_from)

    def _dear_link(self) -> Verdict:
        links = self._market.links

        def pays(discount: float) -> bool:
            return self._pays_with(_cheaper(links, 1 / discount))

        factor = _smallest(pays, 1.0, _UNLIMITED)
        free = self._gain_with(_cheaper(links, 0.0))
        enough = f"At {1 / factor:.2g} times this price it begins to pay"
        if factor >= _UNLIMITED:
            enough = "It pays only if it is free"
        return self._because(
            "price of the link",
            f"{_prices(links)}. {enough}; if it cost nothing, the gain would be {free:.2f}x",
        )

    def _dear_arithmetic(self, possible: float, single: Option) -> Verdict:
        work = self._search.traffic.of(single.local.place.build)
        share = work.all_s / (work.all_s + 1 / work.decode_rps)
        mean = self._market.workload.mean_new_tokens
        free = 1 / (1 - share)
        if free < WORTH_IT:
            return self._because(
                "short prompts",
                f"prefill is only {share:.0%} of the work of {_hardware(single)} (prompts "
                f"have {mean:,.0f} uncached tokens on average): even prefill that costs nothing "
                f"would gain no more than {free:.2f}x",
            )
        cheaper_from = self._cheaper_from(single.local.place)
        if cheaper_from is not None and cheaper_from > mean:
            there, here = (
                1e3 * self._prompt_usd(place, mean)
                for place in (self._cheapest(mean), single.local.place)
            )
            return self._because(
                "short prompts",
                f"a thousand prompts of {mean:,.0f} uncached tokens, the mean, cost ${there:.3f} "
                f"on the cheapest accelerator there and ${here:.3f} on "
                f"{single.local.place.build.title}; prefill there is cheaper only from "
                f"{cheaper_from:,} tokens on",
            )
        place = self._cheapest(mean)
        usd = self._prompt_usd(place, mean) / mean * 1e6
        words = f"the cheapest prefill there costs ${usd:.3f} per million prompt tokens"
        if place.build.accelerator == single.local.place.build.accelerator:
            words += f" on {place.build.accelerator}, of which the best single cluster is made, too"
        else:
            here = self._prompt_usd(single.local.place, mean) / mean * 1e6
            words += f" ({place.build.title}) and ${here:.3f} on {single.local.place.build.title}"
        return self._because(
            "no cheaper arithmetic",
            f"{words}; with any link and any number of GPUs no pair gains more than "
            f"{possible:.2f}x",
        )

    def _because(self, reason: Reason, words: str, pays_from: float | None = None) -> Verdict:
        return Verdict(False, reason, f"Not worth it: {words}.", self._gain, pays_from)

    def _pays_with(self, links: tuple[LinkChoice, ...]) -> bool:
        if self._market.budget_usd is not None:
            limit = self._best.rate_rps * WORTH_IT
        else:
            limit = self._best.usd_per_hour / WORTH_IT
        return Search(replace(self._market, links=links), self._search.traffic).reaches(limit)

    def _gain_with(self, links: tuple[LinkChoice, ...]) -> float:
        found = self._best_with(links)
        gain = None if found is None else gain_over(found, self._best, self._market)
        return gain or 0.0

    def _best_with(self, links: tuple[LinkChoice, ...]) -> Option | None:
        market = replace(self._market, links=links)
        return Search(market, self._search.traffic).best_prfaas()

    def _gain_of_fractions(self) -> float:
        """The largest gain if there were no link to pay for and instances could be divided."""
        pairs = [pair.bound for pair in self._search.pairs(_FREE)]
        alone = [self._fraction_alone(place) for place in self._market.places]
        if not pairs:
            return 0.0
        if self._market.budget_usd is not None:
            return max(pairs) / max(alone)
        return min(alone) / max(min(pairs), 1e-9)

    def _fraction_alone(self, place: Place) -> float:
        """The rate or cost of a single PD cluster whose instances can be divided."""
        market, work, supply = self._market, self._search.traffic.of(place.build), place.supply
        rate = 1 / (work.all_s + 1 / work.decode_rps) if work.decode_rps else 0.0
        if market.budget_usd is not None:
            return (
                bounds.largest_gpus(supply, market.budget_usd)
                / place.build.gpus
                * (rate * market.utilisation)
            )
        assert market.rate_rps is not None
        if not rate:
            return np.inf
        gpus = market.rate_rps / market.utilisation / rate * place.build.gpus
        return float(supply.cost(np.array(gpus)))

    def _cheapest(self, tokens: float) -> Place:
        return min(self._market.there, key=lambda place: self._prompt_usd(place, tokens))

    def _cheaper_from(self, single: Place) -> int | None:
        """The shortest prompt, as a power of two up to 131,072, from which prefill is cheaper
        there."""
        for power in range(7, 18):
            there = self._prompt_usd(self._cheapest(2.0**power), 2.0**power)
            if there * WORTH_IT < self._prompt_usd(single, 2.0**power):
                return int(2**power)
        return None

    def _prompt_usd(self, place: Place, tokens: float) -> float:
        """USD of one prefill without a cached prefix, if the GPUs do nothing else."""
        supply = place.supply
        price = supply.owned_usd if supply.buy_usd is None else supply.buy_usd
        return float(place.build.profile.seconds(tokens)) * place.build.gpus * price / 3600

    def _typical_long_tokens(self) -> int:
        """The prompt in the middle of the offloaded bytes, if every prompt is offloaded."""
        work = self._market.workload
        bytes_up_to = np.cumsum(self._search.traffic.atoms.kv_bytes * work.weight)
        return int(work.new[int(np.searchsorted(bytes_up_to, bytes_up_to[-1] / 2))])


_FREE = LinkChoice(_MOST_GBPS, 0.0, 0.0)


def _faster(links: tuple[LinkChoice, ...], factor: float) -> tuple[LinkChoice, ...]:
    return tuple(replace(link, gbps=min(link.gbps * factor, _MOST_GBPS)) for link in links)


def _cheaper(links: tuple[LinkChoice, ...], factor: float) -> tuple[LinkChoice, ...]:
    return tuple(replace(link, usd_per_hour=link.usd_per_hour * factor) for link in links)


def _prices(links: tuple[LinkChoice, ...]) -> str:
    cheap, fast = min(links, key=lambda k: k.usd_per_hour), max(links, key=lambda k: k.gbps)
    words = f"a link of {cheap.gbps:g} Gbit/s costs ${cheap.usd_per_hour:,.2f} per hour"
    if fast != cheap:
        words += f", and one of {fast.gbps:g} Gbit/s ${fast.usd_per_hour:,.2f}"
    return words


def _smallest(pays: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest factor with which it pays, to a few per cent; it does not pay at `low` and does
    at `high`."""
    step = low * 2
    while step < high and not pays(step):
        low, step = step, step * 2
    high = min(step, high)
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _times(factor: float) -> str:
    return f"{factor:.2g}" if factor < 100 else f"{factor:,.0f}"


def _hardware(option: Alternative) -> str:
    return " and ".join(f"{group.gpus} x {group.accelerator}" for group in option.groups)
