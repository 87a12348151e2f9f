"""Traffic as the planner sees it: the uncached tokens of a prompt, after its cached tokens.

Every workload, smooth or empirical, is a finite set of weighted atoms sorted by uncached length. So
each conditional mean of the model is a cumulative sum, and each useful threshold is an atom. A
truncated lognormal becomes one atom per token count, exact to better than 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from prfaas.config.trace import TraceRow, known_blocks
from prfaas.errors import InputError

Array = npt.NDArray[np.float64]

# With more distinct lengths than this, neighbours share an atom (in a 1M-token range: 4 each).
_MAX_ATOMS = 262_144


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """`new` ascending; `weight` sums to 1."""

    new: Array
    cached: Array
    weight: Array
    output_tokens: float
    output_cv2: float = 0.0  # squared coefficient of variation of the output length

    @property
    def mean_new_tokens(self) -> float:
        return weighted_sum(self.new, self.weight)

    @property
    def max_new_tokens(self) -> int:
        return int(self.new[-1])

    def divided(self, threshold: int) -> tuple[slice, slice]:
        """The atoms that stay local, and those that are offloaded."""
        first_long = int(np.searchsorted(self.new, threshold, "right"))
        return slice(0, first_long), slice(first_long, len(self.new))


def weighted_sum(values: Array, weight: Array) -> float:
    """Not a dot product: BLAS would start threads, and on a busy machine their synchronisation
    costs more than the sum. Numpy's pairwise sum is also more exact."""
    return float((values * weight).sum())


def lognormal(
    mu: float,
    sigma: float,
    min_tokens: int,
    max_tokens: int,
    *,
    output_tokens: float,
    cached_tokens: int = 0,
) -> Workload:
    """exp(N(mu, sigma)) truncated to [min_tokens, max_tokens] (paper, section 4.1)."""
    new, weight = _lognormal_atoms(mu, sigma, min_tokens, max_tokens)
    return Workload(new, np.full_like(new, cached_tokens), weight, output_tokens)


class Part(NamedTuple):
    share: float
    workload: Workload


def mixture(parts: Sequence[Part], *, output_tokens: float) -> Workload:
    """A weighted mixture. Shares are relative; all parts have the same output length."""
    total = sum(part.share for part in parts)
    new = np.concatenate([part.workload.new for part in parts])
    order = np.argsort(new, kind="stable")
    cached = np.concatenate([part.workload.cached for part in parts])
    weight = np.concatenate([part.workload.weight * (part.share / total) for part in parts])
    return Workload(new[order], cached[order], weight[order], output_tokens)


class TraceRequest(NamedTuple):
    new_tokens: int
    cached_tokens: int
    output_tokens: int


def empirical(requests: Sequence[TraceRequest], *, output_tokens: float | None = None) -> Workload:
    """The requests themselves with equal weights, without smoothing."""
    table = np.asarray(requests, dtype=float)
    table = table[np.argsort(table[:, 0], kind="stable")]
    mean, variance = float(table[:, 2].mean()), float(table[:, 2].var())
    weight = np.full(len(table), 1 / len(table))
    if output_tokens is not None:
        return Workload(table[:, 0], table[:, 1], weight, output_tokens)
    return Workload(table[:, 0], table[:, 1], weight, mean, variance / mean**2)


def uncached_requests(rows: Iterable[TraceRow], block_tokens: int) -> list[TraceRequest]:
    """The requests of a trace with their uncached lengths. Each prompt is matched against all
    earlier ones: an infinite cache, and the longest run of known blocks from the start. At least
    one token is always computed."""
    seen: set[int] = set()
    requests = []
    for row in rows:
        cached = min(known_blocks(row, seen) * block_tokens, row.input_length - 1)
        requests.append(TraceRequest(row.input_length - cached, cached, row.output_length))
    if not requests:
        raise InputError("the trace has no requests")
    return requests


def _lognormal_atoms(mu: float, sigma: float, low: int, high: int) -> tuple[Array, Array]:
    step = -(-(high - low + 1) // _MAX_ATOMS)
    first = np.arange(low, high + 1, step, dtype=float)
    last = np.minimum(first + step - 1, high)
    # A cell extends half a token beyond its integers, but never beyond the truncation.
    edges = np.concatenate([[low], last[:-1] + 0.5, [high]])
    if low == high:
        return first, np.ones(1)
    z = (np.log(edges) - mu) / sigma
    # Above the median, count from the right tail: a difference of ndtr loses its digits there.
    mass = np.where(z[:-1] > 0, ndtr(-z[:-1]) - ndtr(-z[1:]), ndtr(z[1:]) - ndtr(z[:-1]))
    total = float(mass.sum())
    if total <= 0:
        raise InputError(
            f"no probability between {low} and {high} tokens for mu = {mu:g}, sigma = {sigma:g}",
            where="workload",
            fix="mu is the mean of the natural logarithm of the length",
        )
    return (first + last) / 2, mass / total
