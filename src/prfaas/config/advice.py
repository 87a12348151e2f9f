"""The schema of the file that `prfaas advise` reads: a model, traffic, money and what is owned.

The sections model, workload and slo are those of the deployment file, so that an answer can be
written as one. "Here" is the site of the PD cluster, "there" the site of the PrfaaS cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from prfaas.config.deployment import SLO, ModelSection, WorkloadSection
from prfaas.config.deployment_file import check_units
from prfaas.config.fields import Amount, AmountOrZero, Count, CountOrZero, Share
from prfaas.config.strict import decode
from prfaas.errors import InputError

Site: TypeAlias = Literal["here", "there"]
HOURS_PER_MONTH = 730.0


class HardwareSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The GPUs that may be bought or rented, and their prices."""

    here: list[str] | None = None
    """Accelerators that may be bought for the PD cluster. The default is every accelerator of the
    catalog that has a price, and of which a time is known or its price is given here."""
    there: list[str] | None = None
    """Accelerators that may be bought for the PrfaaS cluster. The default is the same."""
    prices: dict[str, Amount] = {}
    """USD per GPU and hour, by accelerator. They replace the prices of the catalog."""
    gpus_per_instance: list[Count] = []
    """Instance sizes to consider. The default is the smallest size that holds the model, twice
    and four times that size."""


class Owned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPUs that exist already."""

    accelerator: str
    """Accelerator, as the catalog names it."""
    gpus: CountOrZero
    """Number of GPUs."""
    site: Site = "here"
    """Site: `here` beside the PD cluster, `there` beside the PrfaaS cluster."""
    usd_per_gpu_hour: AmountOrZero = 0.0
    """What an owned GPU costs when it is used, for example its power."""


class LinkOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bandwidth that the sites can be connected with. One offer is chosen."""

    gbps: Amount
    """Bandwidth towards the PD cluster in 10^9 bits per second."""
    rtt_ms: AmountOrZero = 20.0
    """Round-trip time in milliseconds."""
    usd_per_month: AmountOrZero | None = None
    """Price per month of 730 hours. Without a price the link costs nothing."""
    usd_per_hour: AmountOrZero | None = None
    """Price per hour."""

    @property
    def hourly_usd(self) -> float:
        return self.usd_per_hour or (self.usd_per_month or 0.0) / HOURS_PER_MONTH


class AdviceQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `prfaas advise` is asked."""

    model: ModelSection
    workload: WorkloadSection
    slo: SLO
    links: Annotated[list[LinkOffer], msgspec.Meta(min_length=1)]
    """Bandwidths between the two sites to choose from."""
    budget_usd_per_hour: AmountOrZero | None = None
    """Most money per hour, beside what is owned. The answer has the largest rate for it."""
    rate_rps: Amount | None = None
    """Requests per second to be served. The answer has the least cost for it."""
    utilisation: Share = 0.8
    """Largest load of a stage, as a share of what it can do. At 1 its queue grows forever."""
    hardware: HardwareSection = HardwareSection()
    owned: list[Owned] = []
    """GPUs that exist already."""
    catalog: list[str] = []
    """Catalog files, relative to this file. Their entries are added to the built-in ones."""


def parse_question(raw: dict[str, Any], file: str | Path) -> AdviceQuestion:
    question = decode(raw, AdviceQuestion, file)
    try:
        _check_objective(question)
        _check_owned(question)
        _check_links(question)
    except InputError as error:
        raise error.in_file(file) from None
    return question


def _check_objective(question: AdviceQuestion) -> None:
    if (question.budget_usd_per_hour is None) == (question.rate_rps is None):
        both = question.rate_rps is not None
        raise InputError(
            "a budget and a rate are both given"
            if both
            else "neither a budget nor a rate is given",
            where="budget_usd_per_hour",
            fix="give a budget (--budget) to get the largest rate, or a rate (--rate) to get the "
            "least cost",
        )
    if question.budget_usd_per_hour == 0 and not any(owned.gpus for owned in question.owned):
        raise InputError(
            "is 0 and no GPU is owned, so there is nothing to serve with",
            where="budget_usd_per_hour",
            fix="raise the budget, or name the GPUs that exist in [[owned]]",
        )


def _check_owned(question: AdviceQuestion) -> None:
    seen = set()
    for index, owned in enumerate(question.owned):
        key = (owned.accelerator, owned.site)
        if key in seen:
            raise InputError(
                f"{owned.accelerator} {owned.site} is stated twice",
                where=f"owned.{index}",
                fix="state the number of GPUs once",
            )
        seen.add(key)


def _check_links(question: AdviceQuestion) -> None:
    for index, link in enumerate(question.links):
        at = f"links.{index}"
        if link.usd_per_month is not None and link.usd_per_hour is not None:
            raise InputError(
                "has two prices", where=at, fix="keep usd_per_month or usd_per_hour, not both"
            )
        check_units(link.gbps, link.rtt_ms, at=at)
