"""Bounds on what a pair of builds and a link can reach, with fractions of instances allowed.

They cost a few array operations, and hardly any pair is better than the best known option: the
search evaluates whole instances only where the bound allows it.
"""

from __future__ import annotations

import numpy as np

from prfaas.advisor.market import Array, LinkChoice, Place, Supply
from prfaas.advisor.work import BuildWork


def gpus_per_rps(
    here: Place, there: Place, local: BuildWork, remote: BuildWork
) -> tuple[Array, Array]:
    """GPUs here and there that one request per second needs, for every threshold that offloads
    something."""
    near = (local.short_s[:-1] + 1 / local.decode_rps) * here.build.gpus
    return near, remote.long_s[:-1] * there.build.gpus


def largest_rate(
    usd: float, near: Array, far: Array, here: Supply, there: Supply, link_rate: Array
) -> float:
    """The largest rate that the money pays for. The cost of a threshold grows with the rate in
    three straight pieces: until the owned GPUs of one site are used up, until those of the other
    are, and beyond."""
    buy_both = near * here.marginal_usd + far * there.marginal_usd
    if not here.free_gpus and not there.free_gpus:
        return float(np.minimum(max(usd, 0.0) / buy_both, link_rate).max())
    near_ends, far_ends = here.free_gpus / near, there.free_gpus / far
    first, second = np.minimum(near_ends, far_ends), np.maximum(near_ends, far_ends)
    own_both = near * here.owned_usd + far * there.owned_usd
    one_bought = np.where(
        near_ends < far_ends,
        near * here.marginal_usd + far * there.owned_usd,
        near * here.owned_usd + far * there.marginal_usd,
    )
    rate = _extended(np.zeros_like(near), np.full_like(near, usd), own_both, first)
    left = usd - rate * own_both
    further = _extended(rate, left, one_bought, second)
    left = left - (further - rate) * one_bought
    rate = np.where(rate < first, rate, further)
    beyond = _extended(rate, left, buy_both, np.full_like(near, np.inf))
    rate = np.where(rate < second, rate, beyond)
    return float(np.minimum(rate, link_rate).max())


def least_cost(
    rate_rps: float, near: Array, far: Array, here: Supply, there: Supply, link_rate: Array
) -> float:
    """The least cost of the GPUs that serve a rate; infinite where the link is too slow."""
    cost = here.cost(near * rate_rps) + there.cost(far * rate_rps)
    # Rounding must not exclude a link that carries exactly this rate.
    return float(np.where(link_rate >= rate_rps * (1 - 1e-9), cost, np.inf).min())


def largest_gpus(supply: Supply, usd: float) -> float:
    """The GPUs that the money pays for, with fractions."""
    owned = supply.free_gpus
    if usd < owned * supply.owned_usd:
        return usd / supply.owned_usd
    return owned + (usd - owned * supply.owned_usd) / supply.marginal_usd


def link_rate(long_bits: Array, link: LinkChoice) -> Array:
    """The rate at which the link is full, for every threshold."""
    with np.errstate(divide="ignore"):
        return np.asarray(link.bps / long_bits)


def _extended(rate: Array, usd: Array, usd_per_rps: Array, end: Array) -> Array:
    """The rate that more money adds at this price, up to `end`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        added = np.where(usd_per_rps > 0, np.maximum(usd, 0.0) / usd_per_rps, np.inf)
    return np.asarray(np.minimum(rate + added, end))
