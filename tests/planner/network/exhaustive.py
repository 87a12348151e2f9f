"""The best total rate by exhaustive search (2 x 2 clusters) and by a mixed-integer programme. They
share no code with the planner but the profile and the bytes of a prompt."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from prfaas.planner.curves import Reading
from prfaas.planner.network.problem import Home, NetworkProblem

Array = npt.NDArray[np.float64]


@dataclass
class Means:
    """One home: its thresholds, and the work per request that arrives there."""

    thresholds: list[float]
    local_s: Array
    remote_s: dict[str, Array]
    bits: Array
    link_bps: dict[str, float]
    decode_rps: float
    splits: list[int]
    instances: int


def means(home: Home, reading: Reading, prefilling: Collection[str]) -> Means:
    """The splits of the homes `prefilling` have at least one prefill instance."""
    problem = home.problem
    least = int(home.cluster in prefilling)
    work, local = problem.workload, problem.local
    atoms = list(zip(work.new.tolist(), work.cached.tolist(), work.weight.tolist(), strict=True))
    thresholds = [0.0, *sorted(set(work.new.tolist()))]
    if not problem.remotes:
        thresholds = thresholds[-1:]

    def work_of(part: list[tuple[float, float, float]], cost: object) -> float:
        share = math.fsum(w for _, _, w in part)
        if not part:
            return 0.0
        if reading == "paper":
            new = math.fsum(n * w for n, _, w in part) / share
            cached = math.fsum(c * w for _, c, w in part) / share
            return share * float(cost(new, cached))  # type: ignore[operator]
        return math.fsum(w * float(cost(n, c)) for n, c, w in part)  # type: ignore[operator]

    def bits(new: float, cached: float) -> float:
        return 8 * (1000 * new + 50_000)  # the groups of `builders.SPEC`

    longs = [[a for a in atoms if a[0] > t] for t in thresholds]
    shorts = [[a for a in atoms if a[0] <= t] for t in thresholds]
    fixed = local.fixed_prefill
    hold_s = local.decode.t_decode_s * work.output_tokens
    return Means(
        thresholds=thresholds,
        local_s=np.array([work_of(part, local.pool.profile.seconds) for part in shorts]),
        remote_s={
            r.pool.cluster: np.array([work_of(part, r.pool.profile.seconds) for part in longs])
            for r in problem.remotes
        },
        bits=np.array([work_of(part, bits) for part in longs]),
        link_bps={r.pool.cluster: r.path.bps for r in problem.remotes},
        decode_rps=local.decode.bs_max / hold_s,
        splits=list(range(least, local.pool.instances)) if fixed is None else [fixed],
        instances=local.pool.instances,
    )


def best_local(home: Means, share: float) -> Array:
    """The largest total rate that the home's own instances bear, per threshold, over all splits."""
    best = np.zeros(len(home.thresholds))
    for n_prefill in home.splits:
        decode = (home.instances - n_prefill) * home.decode_rps / share
        prefill = np.array([n_prefill / s if s > 0 else math.inf for s in home.local_s]) / share
        best = np.maximum(best, np.minimum(decode, prefill))
    return best


def brute_force(
    problem: NetworkProblem, reading: Reading, prefilling: Collection[str] = ()
) -> float:
    """At most 2 x 2 clusters: every pair of thresholds with every split."""
    homes = [means(home, reading, prefilling) for home in problem.homes]
    shares = [home.share for home in problem.homes]
    if len(homes) == 1:  # a second one without traffic
        homes, shares = [homes[0], homes[0]], [shares[0], 0.0]
    names = [*problem.prfaas_pools, "none", "none"][:2]
    sizes = [float(problem.prfaas_pools[n].instances) if n != "none" else 0.0 for n in names]
    local = [
        best_local(home, share) if share else np.full(len(home.thresholds), math.inf)
        for home, share in zip(homes, shares, strict=True)
    ]
    first, second = np.meshgrid(*[np.arange(len(h.thresholds)) for h in homes], indexing="ij")
    rows = [first.ravel(), second.ravel()]
    most = np.minimum(local[0][rows[0]], local[1][rows[1]])
    use = np.zeros((2, 2, len(most)))  # home, PrfaaS cluster: the part of it per total rate
    cap = np.zeros((2, 2, len(most)))  # the part of the home's requests per total rate on the link
    for i, (home, share) in enumerate(zip(homes, shares, strict=True)):
        for j, name in enumerate(names):
            if name in home.remote_s:
                use[i, j] = share * home.remote_s[name][rows[i]] / sizes[j]
                sent = share * home.bits[rows[i]]
                with np.errstate(divide="ignore"):
                    cap[i, j] = np.where(sent > 0, home.link_bps[name] / sent, math.inf)
    offers = np.stack([shares[i] * homes[i].bits[rows[i]] > 0 for i in range(2)])
    low, high = np.zeros(len(most)), most.copy()
    for _ in range(60):
        middle = (low + high) / 2
        fits = _fits(middle, use, cap, offers)
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return float(low.max())


def _fits(rate: Array, use: Array, cap: Array, offers: npt.NDArray[np.bool_]) -> Array:
    """Whether the flows of two homes fit two PrfaaS clusters. y is what a home sends to the first;
    the rest goes to the second. After the least y that the links force, the second cluster is
    relieved by what unburdens it most per second of the first: a knapsack of two items."""
    total = np.where(offers, rate, 0.0)
    least = np.maximum(0.0, total - cap[:, 1])
    most = np.minimum(total, cap[:, 0])
    fits = np.all(least <= most * (1 + 1e-12) + 1e-300, axis=0)
    room = 1 - (use[:, 0] * least).sum(axis=0)
    load = (use[:, 1] * (total - least)).sum(axis=0)
    fits &= room >= -1e-12
    with np.errstate(divide="ignore", invalid="ignore"):
        worth = np.where(use[:, 0] > 0, use[:, 1] / use[:, 0], math.inf)
        for item in (np.where(worth[0] >= worth[1], 0, 1), np.where(worth[0] >= worth[1], 1, 0)):
            at = (item, np.arange(len(rate)))
            per = use[:, 0][at]
            extra = np.maximum(most[at] - least[at], 0.0)
            taken = np.where(per > 0, np.minimum(extra, np.maximum(room, 0.0) / per), extra)
            room -= taken * per
            load -= taken * use[:, 1][at]
    return np.asarray(fits & (load <= 1 + 1e-12))


def mixed_integer(
    problem: NetworkProblem, reading: Reading, prefilling: Collection[str] = ()
) -> float:
    """Any number of clusters. Variables: the total rate; per home its prefill instances (integer),
    for each threshold whether it is used (binary) and the home's rate with it; per threshold and
    path the part of the home's requests that is sent there."""
    homes = [means(home, reading, prefilling) for home in problem.homes]
    pools = problem.prfaas_pools
    names: list[tuple[object, ...]] = [("total",)]
    for i, home in enumerate(homes):
        names.append(("prefill", i))
        for k in range(len(home.thresholds)):
            names += [("used", i, k), ("rate", i, k)]
            names += [("flow", i, k, name) for name in home.remote_s]
    place = {name: index for index, name in enumerate(names)}
    rows: list[Array] = []
    low: list[float] = []
    high: list[float] = []

    def require(terms: dict[tuple[object, ...], float], least: float, most: float) -> None:
        row = np.zeros(len(names))
        for name, factor in terms.items():
            row[place[name]] += factor
        rows.append(row)
        low.append(least)
        high.append(most)

    lower, upper = np.zeros(len(names)), np.full(len(names), np.inf)
    integral = np.zeros(len(names))
    for i, (home, stated) in enumerate(zip(homes, problem.homes, strict=True)):
        ks = range(len(home.thresholds))
        most = home.instances * home.decode_rps
        integral[place["prefill", i]] = 1
        lower[place["prefill", i]], upper[place["prefill", i]] = home.splits[0], home.splits[-1]
        for k in ks:
            integral[place["used", i, k]] = 1
            upper[place["used", i, k]] = 1
            require({("rate", i, k): 1, ("used", i, k): -most}, -np.inf, 0)
            if home.bits[k] > 0:
                flows = {("flow", i, k, name): 1.0 for name in home.remote_s}
                require({**flows, ("rate", i, k): -1}, 0, 0)
        require({("used", i, k): 1 for k in ks}, 1, 1)
        require({**{("rate", i, k): 1 for k in ks}, ("total",): -stated.share}, 0, 0)
        require({("total",): stated.share, ("prefill", i): home.decode_rps}, -np.inf, most)
        local = {("rate", i, k): float(home.local_s[k]) for k in ks}
        require({**local, ("prefill", i): -1}, -np.inf, 0)
        for name, bps in home.link_bps.items():
            require({("flow", i, k, name): float(home.bits[k]) / bps for k in ks}, -np.inf, 1)
    for name, pool in pools.items():
        seconds = {
            ("flow", i, k, name): float(home.remote_s[name][k]) / pool.instances
            for i, home in enumerate(homes)
            if name in home.remote_s
            for k in range(len(home.thresholds))
        }
        require(dict(seconds), -np.inf, 1)
    objective = np.zeros(len(names))
    objective[0] = -1
    found = milp(
        objective,
        constraints=LinearConstraint(np.stack(rows), low, high),
        bounds=Bounds(lower, upper),
        integrality=integral,
        options={"mip_rel_gap": 1e-6, "time_limit": 30},
    )
    assert found.status == 0, found.message
    return float(-found.fun)
