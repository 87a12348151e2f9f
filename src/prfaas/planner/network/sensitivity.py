"""What one more instance, or one more Gbit/s, would add to the total rate at each place.

Each addition is a new problem, solved from the known rate. The shares of traffic stay, so that the
total rate is often limited at several places at once, and one addition alone then buys nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Local, Pool, Remote


@dataclass(frozen=True, slots=True)
class Gain:
    """One addition, and the total rate that it would add."""

    added: Literal["instance", "gbps"]
    cluster: str  # of a link: the sender
    target: str | None  # of a link: the receiver
    gain_rps: float


def gains(planner: NetworkPlanner, problem: NetworkProblem, rate_rps: float) -> tuple[Gain, ...]:
    """`rate_rps` is the largest total rate of the problem. The largest gain comes first."""

    def gain(*changed: NetworkProblem) -> float:
        return max(planner.rate_rps(other, at_least=rate_rps) for other in changed) - rate_rps

    found = [
        Gain("instance", home.cluster, None, gain(*_with_local(problem, home)))
        for home in problem.homes
    ]
    found += [
        Gain("instance", name, None, gain(_with_prfaas(problem, name)))
        for name in problem.prfaas_pools
    ]
    for home in problem.homes:
        for remote in home.problem.remotes:
            name = remote.pool.cluster
            faster = _with_faster_path(problem, name, home.cluster)
            found.append(Gain("gbps", name, home.cluster, gain(faster)))
    return tuple(sorted(found, key=lambda gain: -gain.gain_rps))


def _with_local(problem: NetworkProblem, home: Home) -> Iterator[NetworkProblem]:
    """One more instance of a PD cluster. Where the split is fixed, it may prefill or decode."""
    local = home.problem.local
    larger = replace(local, pool=_larger(local.pool))
    options: list[Local] = [larger]
    if local.fixed_prefill is not None:
        options.append(replace(larger, fixed_prefill=local.fixed_prefill + 1))
    for option in options:
        yield NetworkProblem(
            tuple(
                replace(h, problem=replace(h.problem, local=option)) if h is home else h
                for h in problem.homes
            )
        )


def _with_prfaas(problem: NetworkProblem, name: str) -> NetworkProblem:
    def change(home: Home, remote: Remote) -> Remote:
        same = remote.pool.cluster == name
        return replace(remote, pool=_larger(remote.pool)) if same else remote

    return problem.with_remotes(change)


def _with_faster_path(problem: NetworkProblem, source: str, target: str) -> NetworkProblem:
    def change(home: Home, remote: Remote) -> Remote:
        if (remote.pool.cluster, home.cluster) != (source, target):
            return remote
        return replace(remote, path=replace(remote.path, bps=remote.path.bps + 1e9))

    return problem.with_remotes(change)


def _larger(pool: Pool) -> Pool:
    return replace(pool, instances=pool.instances + 1)
