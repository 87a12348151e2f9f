"""Solves several PD and PrfaaS clusters: the largest total rate for given shares of traffic.

Three steps, each decides less and keeps what was decided before:

1. The total rate (`search`): the global optimum, or one that comes close to it with a prefill
   instance in a home that would have none (`optimise` prefers the same). Homes that are not at a
   limit then grow on, which decides their splits.
2. The thresholds: at these splits, where local prefill and PrfaaS clusters together are strongest
   (eq. 7), also where decode is the limit. One PD cluster has the same rule (`optimise`).
3. The flows: as balanced as possible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from prfaas.errors import InputError
from prfaas.kvspec import KVSpec
from prfaas.planner.curves import Array, Atoms, Reading, WorkCurves, cut_workload
from prfaas.planner.network.flows import FlowProgram
from prfaas.planner.network.plan import Binding, Flow, HomePlan, NetworkPlan, PrfaasPlan
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.search import GrowthSearch, Level, fits, grow_in_turn, serves
from prfaas.planner.network.work import HomeWork, ThresholdWork
from prfaas.planner.optimise import LOCAL_PREFILL_SHARE
from prfaas.planner.problem import Pool
from prfaas.planner.workload import Workload

# A resource that is busier than this is at its limit. Thresholds are whole tokens, so that local
# and remote prefill cannot both be busy to the last digit.
_BUSY = 0.999


class NetworkPlanner:
    """Solves problems under one reading. Problems may share workloads and profiles; the curves of
    each are computed once."""

    def __init__(self, reading: Reading) -> None:
        self.reading: Reading = reading
        self.programmes_solved = 0
        self._curves: dict[tuple[int, KVSpec], tuple[Workload, WorkCurves]] = {}
        self._works: dict[tuple[object, ...], ThresholdWork] = {}

    def __reduce__(self) -> tuple[type[NetworkPlanner], tuple[Reading]]:
        # What is kept belongs to ids of objects, which mean nothing in another process.
        return NetworkPlanner, (self.reading,)

    def solve(self, problem: NetworkProblem) -> NetworkPlan:
        program, level = self._best(problem)
        if level.factor <= 0:
            self._raise_for_no_rate(problem)
        rates = level.factor * _shares(problem)
        reached, _ = grow_in_turn(program, rates)
        splits = _splits(program, reached)
        _, rows = grow_in_turn(program, rates, splits)
        if not fits(program, rates, splits, rows):  # a search for thresholds gave up
            splits, rows = _splits(program, rates), level.rows
        flow_shares = program.balance(rows, rates)
        self.programmes_solved += program.solved
        writer = _PlanWriter(problem, program, splits, rows, flow_shares)
        return writer.plan(self.reading, level.factor, level.bound / level.factor - 1)

    def rate_rps(self, problem: NetworkProblem, at_least: float = 0.0) -> float:
        """The largest total rate alone, without a plan. `at_least` is known to be possible."""
        _, level = self._best(problem, known=at_least)
        return max(level.factor, at_least)

    def work(self, home: Home, least_prefill: int = 0) -> HomeWork:
        problem = home.problem
        profiles = tuple(remote.pool.profile for remote in problem.remotes)
        key = (id(problem.workload), problem.spec, problem.local.pool.profile, profiles)
        if key not in self._works:
            curves = self.curves(home)
            self._works[key] = ThresholdWork(curves, problem.local.pool.profile, profiles)
        return HomeWork(home, self._works[key], least_prefill)

    def curves(self, home: Home) -> WorkCurves:
        workload, spec = home.problem.workload, home.problem.spec
        key = (id(workload), spec)
        if key not in self._curves:
            made = WorkCurves(cut_workload(workload), Atoms(workload, spec), self.reading)
            # The planner keeps the workload, so that no other one gets its id.
            self._curves[key] = (workload, made)
        return self._curves[key][1]

    def _best(self, problem: NetworkProblem, known: float = 0.0) -> tuple[FlowProgram, Level]:
        """The programme and the largest factor of the shares. Every home has a prefill instance,
        unless all homes without one together cost too much: then the first of them have one."""
        shares = _shares(problem)
        all_homes = np.ones(len(shares), dtype=bool)
        program = self._program(problem)
        level = GrowthSearch(program, shares, all_homes).largest(known)
        if level.factor <= 0:
            self.programmes_solved += program.solved
            return program, level
        least_rps = LOCAL_PREFILL_SHARE * level.factor
        rates = level.factor * shares
        able = [number for number, home in enumerate(program.homes) if home.may_prefill]
        without = [n for n in able if program.homes[n].n_prefill(float(rates[n])) == 0]
        prefilling = {*able} - {*without}  # they have a prefill instance at this factor anyway
        for number in without:
            tried = self._program(problem, {*prefilling, number})
            found = GrowthSearch(tried, shares, all_homes).largest()
            self.programmes_solved += tried.solved
            if found.factor >= least_rps:
                prefilling.add(number)
                level = found
        self.programmes_solved += program.solved
        return self._program(problem, prefilling), level

    def _program(self, problem: NetworkProblem, prefilling: Collection[int] = ()) -> FlowProgram:
        """With at least one prefill instance in each of the homes `prefilling`."""
        homes = [
            self.work(home, least_prefill=int(number in prefilling))
            for number, home in enumerate(problem.homes)
        ]
        return FlowProgram(homes, problem.prfaas_pools)

    def _raise_for_no_rate(self, problem: NetworkProblem) -> None:
        stuck = []
        for home in problem.homes:
            alone = NetworkProblem((Home(1.0, home.problem),))
            if self.rate_rps(alone) <= 0:
                stuck.append(home)
        names = " and ".join(home.cluster for home in stuck) or "all pd clusters"
        fix = "a link from a prfaas cluster"
        if all(home.problem.remotes for home in stuck):  # the threshold keeps requests local
            fix = "remove scheduler.threshold_tokens"
        raise InputError(
            f"no instance can prefill for {names} with this split and threshold: the largest rate "
            "is 0",
            where="clusters",
            fix=f"give the pd cluster a prefill instance, or {fix}",
        )


def _splits(program: FlowProgram, rates: Array) -> list[int]:
    """Each home's prefill instances: what decode leaves. Where that is all but one, and one fewer
    serves the same rates, a second instance decodes; so it is with one PD cluster (`optimise`)."""
    splits = []
    for home, rate in zip(program.homes, rates, strict=True):
        split = home.n_prefill(float(rate))
        assert split is not None, "the search found a split for this rate"
        splits.append(split)
    for number, home in enumerate(program.homes):
        lone = splits[number] == home.local.pool.instances - 1
        if lone and splits[number] > home.least_prefill and home.local.fixed_prefill is None:
            fewer = [*splits[:number], splits[number] - 1, *splits[number + 1 :]]
            if serves(program, rates, fewer):
                splits = fewer
    return splits


class _PlanWriter:
    """Writes a solution down as a plan."""

    def __init__(
        self,
        problem: NetworkProblem,
        program: FlowProgram,
        splits: list[int],
        rows: tuple[int, ...],
        flow_shares: list[Array],
    ) -> None:
        self._pools: Mapping[str, Pool] = problem.prfaas_pools
        self._homes = program.homes
        self._splits = splits
        self._rows = rows
        self._flow_shares = flow_shares

    def plan(self, reading: Reading, rate_rps: float, gap: float) -> NetworkPlan:
        homes = tuple(self._home(number, rate_rps) for number in range(len(self._homes)))
        flows: list[Flow] = []
        for number, home in enumerate(homes):
            flows += self._flows(number, home)
        prfaas = tuple(self._prfaas(pool, homes, flows) for pool in self._pools.values())
        binding = _binding(homes, prfaas, flows)
        return NetworkPlan(reading, rate_rps, max(gap, 0.0), homes, prfaas, tuple(flows), binding)

    def _home(self, number: int, total_rps: float) -> HomePlan:
        home, row, n_prefill = self._homes[number], self._rows[number], self._splits[number]
        rate = home.home.share * total_rps
        return HomePlan(
            cluster=home.home.cluster,
            share=home.home.share,
            rate_rps=rate,
            threshold_tokens=int(home.work.threshold[row]) if home.remotes and n_prefill else None,
            n_prefill=n_prefill,
            n_decode=home.local.pool.instances - n_prefill,
            offload_fraction=float(home.work.p[row]),
            prefill_utilisation=rate / home.prefill_limit_rps(n_prefill, row),
            decode_utilisation=rate / home.decode_limit_rps(n_prefill),
        )

    def _flows(self, number: int, plan: HomePlan) -> list[Flow]:
        home, row = self._homes[number], self._rows[number]
        flows = []
        for remote, share in zip(home.remotes, self._flow_shares[number].tolist(), strict=True):
            flows.append(
                Flow(
                    source=remote.pool.cluster,
                    target=plan.cluster,
                    rps=plan.rate_rps * plan.offload_fraction * share,
                    share=share,
                    bps=plan.rate_rps * float(home.work.bits[row]) * share,
                    link_bps=remote.path.bps,
                )
            )
        return flows

    def _prfaas(self, pool: Pool, homes: tuple[HomePlan, ...], flows: list[Flow]) -> PrfaasPlan:
        busy = 0.0
        for number, home in enumerate(self._homes):
            for index, remote in enumerate(home.remotes):
                if remote.pool.cluster == pool.cluster:
                    seconds = float(home.work.remote_s[index][self._rows[number]])
                    share = float(self._flow_shares[number][index])
                    busy += homes[number].rate_rps * seconds * share
        rate = sum(flow.rps for flow in flows if flow.source == pool.cluster)
        used = busy / pool.instances if pool.instances else 0.0
        return PrfaasPlan(pool.cluster, pool.instances, rate, used)


def _binding(
    homes: tuple[HomePlan, ...], prfaas: tuple[PrfaasPlan, ...], flows: list[Flow]
) -> tuple[Binding, ...]:
    found = []
    for home in homes:
        if home.prefill_utilisation > _BUSY:
            found.append(Binding("PD-P prefill", home.cluster))
        if home.decode_utilisation > _BUSY:
            found.append(Binding("PD-D decode", home.cluster))
    found += [Binding("PrfaaS prefill", p.cluster) for p in prfaas if p.utilisation > _BUSY]
    found += [
        Binding("PrfaaS egress", flow.source, flow.target)
        for flow in flows
        if flow.utilisation > _BUSY
    ]
    return tuple(found)


def _shares(problem: NetworkProblem) -> Array:
    return np.array([home.share for home in problem.homes])
