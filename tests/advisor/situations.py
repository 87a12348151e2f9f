"""The stated situations of configs/advise, and small markets."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from prfaas.advisor.market import Build, LinkChoice, Market, Place, Site, Supply
from prfaas.config.advice import parse_question
from prfaas.config.strict import parse_toml, read_text
from prfaas.planner.profile import DecodeRate, DecodeStep, PrefillProfile
from prfaas.planner.workload import lognormal
from prfaas.studies.advice_market import MarketStudy
from tests.planner.builders import FAST, SLOW, SPEC

CONFIGS = Path(__file__).parents[2] / "configs" / "advise"
SITUATIONS = ("hybrid", "rate", "owned", "dense", "short")
NOT_WORTH_IT = {"dense": "dense model", "short": "short prompts"}


def stated(name: str) -> Market:
    file = CONFIGS / f"{name}.toml"
    question = parse_question(parse_toml(read_text(file), file), file)
    return MarketStudy(file, question).offer().market


def build(name: str, gpus: int, profile: PrefillProfile, batch: int, step_s: float) -> Build:
    decode = DecodeRate(batch, step_s, (DecodeStep(1, step_s / 2), DecodeStep(batch, step_s)))
    return Build(name, gpus, profile, decode)


# "near" decodes well and prefills slowly, "far" the other way round. Each has two instance sizes.
NEAR = (build("near", 1, SLOW, 4, 0.02), build("near", 2, SLOW.paced(0.6), 10, 0.02))
FAR = (build("far", 1, FAST, 2, 0.02), build("far", 2, FAST.paced(0.6), 5, 0.02))


def small_market(
    *,
    budget: float | None = 20.0,
    rate: float | None = None,
    near_usd: float = 1.0,
    far_usd: float = 1.6,
    gbps: tuple[float, ...] = (0.02, 0.1),
    link_usd: float = 0.5,
    owned: int = 0,
) -> Market:
    def places(site: Site) -> tuple[Place, ...]:
        near = Supply("near", site, near_usd, owned if site == "here" else 0)
        far = Supply("far", site, far_usd)
        return tuple(
            Place(supply, one) for supply, builds in ((near, NEAR), (far, FAR)) for one in builds
        )

    return Market(
        spec=SPEC,
        workload=lognormal(6.5, 1.0, 20, 5000, output_tokens=100),
        here=places("here"),
        there=places("there"),
        links=tuple(LinkChoice(g, 0.01, link_usd * (i + 1)) for i, g in enumerate(gbps)),
        output_tokens_per_s=40.0,
        utilisation=0.8,
        budget_usd=budget,
        rate_rps=rate,
    )


def random_market(seed: int) -> Market:
    """Prices, links and owned GPUs: some cost money, and of some no more can be bought."""
    draw = random.Random(seed)
    market = small_market(
        budget=draw.uniform(4, 14),
        near_usd=draw.uniform(0.3, 2),
        far_usd=draw.uniform(0.5, 3),
        gbps=tuple(draw.choices([0.001, 0.004, 0.01, 0.05, 0.2], k=draw.choice([1, 2]))),
        link_usd=draw.choice([0, 0.3, 1.1]),
    )

    def owned(places: tuple[Place, ...]) -> tuple[Place, ...]:
        supplies: dict[str, Supply] = {}
        for place in places:
            supply = place.supply
            if supply.accelerator not in supplies:
                gpus = draw.choice([0, 0, 3, 6])
                price = None if gpus and draw.random() < 0.3 else supply.buy_usd
                usd = draw.choice([0, 0.2, 5.0])
                supplies[supply.accelerator] = Supply(
                    supply.accelerator, supply.site, price, gpus, usd
                )
        return tuple(replace(place, supply=supplies[place.supply.accelerator]) for place in places)

    market = replace(
        market,
        here=owned(market.here),
        there=owned(market.there),
        utilisation=draw.choice([0.5, 0.8, 1.0]),
    )
    return market if draw.random() < 0.5 else with_rate(market, draw.uniform(0.5, 5))


def with_rate(market: Market, rate: float) -> Market:
    return replace(market, budget_usd=None, rate_rps=rate)
