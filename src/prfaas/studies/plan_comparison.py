"""Compares a plan with published figures, quantity by quantity."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from prfaas.config.strict import decode, parse_toml, read_text
from prfaas.planner.comparison import DeploymentComparison
from prfaas.planner.report import SYSTEMS, comparison_as_dict


class PublishedTheta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prfaas: float | None = None
    pd_p: float | None = None
    pd_d: float | None = None


class PublishedSystem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold_tokens: int | None = None
    n_prfaas: int | None = None
    n_prefill: int | None = None
    n_decode: int | None = None
    theta_rps: PublishedTheta = PublishedTheta()
    lambda_max_rps: float | None = None
    offload_fraction: float | None = None
    egress_gbps: float | None = None
    ttft_mean_s: float | None = None
    ttft_p90_s: float | None = None


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    prfaas_pd: PublishedSystem = PublishedSystem()
    homogeneous: PublishedSystem = PublishedSystem()
    naive: PublishedSystem = PublishedSystem()
    equal_cost: PublishedSystem = PublishedSystem()
    ratios: dict[str, float] = {}


class Row(NamedTuple):
    system: str
    quantity: str
    ours: float | None
    published: float
    difference: float | None  # relative; None where the plan has no such number


def read_published(path: Path) -> Published:
    return decode(parse_toml(read_text(path), path), Published, path)


def compare(plan: DeploymentComparison, published: Published) -> list[Row]:
    """One row for every figure in the published file."""
    ours = comparison_as_dict(plan)
    rows = []
    for system in SYSTEMS:
        theirs = msgspec.to_builtins(getattr(published, system))
        for quantity, value in _flat(theirs).items():
            rows.append(_row(system, quantity, _flat(ours[system] or {}).get(quantity), value))
    for quantity, value in published.ratios.items():
        rows.append(_row("ratios", quantity, ours["ratios"].get(quantity), value))
    return rows


def _row(system: str, quantity: str, ours: float | None, published: float) -> Row:
    difference = ours / published - 1 if ours is not None and published else None
    return Row(system, quantity, ours, published, difference)


def _flat(entry: dict[str, object]) -> dict[str, float]:
    """The numbers of a nested dict, with keys such as `theta_rps.prfaas`."""
    flat: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": number for inner, number in _flat(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[key] = value
    return flat
