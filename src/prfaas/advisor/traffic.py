"""Simple descriptions of traffic, turned into the parameters of a workload section."""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import ndtr

from prfaas.errors import InputError


def mu_for_mean(mean: float, sigma: float, low: int, high: int) -> float:
    """The mu of a lognormal with this mean after its truncation to [low, high]."""
    if not low < mean < high:
        raise InputError(
            f"a mean of {mean:g} tokens is not between {low} and {high} tokens",
            where="--prompt-tokens",
            fix="change it, or --longest-prompt",
        )

    def excess(mu: float) -> float:
        return truncated_mean(mu, sigma, low, high) - mean

    # A wide distribution cut on both sides has a mean between the cuts, whatever its mu.
    first, last = math.log(low) - 8 * sigma, math.log(high) + 8 * sigma
    if excess(first) > 0 or excess(last) < 0:
        raise InputError(
            f"no lognormal with spread {sigma:g} between {low} and {high} tokens has a mean of "
            f"{mean:g}",
            where="--prompt-tokens",
            fix="change it, --spread or --longest-prompt",
        )
    return float(brentq(excess, first, last, xtol=1e-9))


def truncated_mean(mu: float, sigma: float, low: int, high: int) -> float:
    a, b = ((math.log(cut) - mu) / sigma for cut in (low, high))
    mass = _between(a, b)
    return math.exp(mu + sigma**2 / 2) * _between(a - sigma, b - sigma) / mass


def _between(a: float, b: float) -> float:
    """P(a < Z < b), from the nearer tail: a difference of large ones would lose its digits."""
    return float(ndtr(-a) - ndtr(-b) if a > 0 else ndtr(b) - ndtr(a))
