"""Builds the input of `prfaas simulate`: requests, and deployments with one policy each.

A policy routes on the given hardware. A baseline is other hardware: the homogeneous and equal-cost
baselines have no remote cluster, and the naive baseline sends every prefill to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from prfaas.config import Deployment
from prfaas.config.deployment import SchedulerSection
from prfaas.config.link_trace import read_link_trace
from prfaas.config.trace import TRACE_BLOCK_TOKENS, TraceRow, read_trace
from prfaas.errors import InputError
from prfaas.planner import baselines
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.planner.workload import TraceRequest, empirical
from prfaas.scheduler.homes.plans import as_network
from prfaas.scheduler.view import LinkId
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import CacheConfig, RateChange, SimConfig, link_id
from prfaas.types import BlockHash

Policy: TypeAlias = Literal["paper", "adaptive", "local", "remote"]
POLICIES: tuple[Policy, ...] = ("paper", "adaptive", "local", "remote")
# Baseline -> its policy. A baseline has one possible route, so the policy decides nothing.
BASELINES: dict[str, Policy] = {"homogeneous": "local", "naive": "remote", "equal_cost": "local"}


class Case(NamedTuple):
    problem: Problem | NetworkProblem
    config: SimConfig


def read_requests(path: Path, deployment: Deployment) -> list[TraceRow]:
    rows = list(read_trace(path))
    limit = deployment.model.max_tokens
    for number, row in enumerate(rows, start=1):
        if row.input_length + row.output_length > limit:
            raise InputError(
                f"{row.input_length} + {row.output_length} tokens exceed the {limit} of the model",
                file=path,
                where=f"row {number}",
                fix="remove the request, or raise max_tokens under [model]",
            )
    if len(rows) < 2:
        raise InputError(
            "the trace has fewer than two requests", file=path, fix="give a longer trace"
        )
    return rows


def planned_for(problem: Problem, arrivals: Arrivals) -> Problem:
    """Plans for these requests: for the lengths that remain uncached with an infinite cache that is
    empty at first, like the simulated caches."""
    assert arrivals.hashes is not None, "only a trace has block hashes"
    seen: set[BlockHash] = set()
    requests = []
    columns = (arrivals.prompt_tokens.tolist(), arrivals.output_tokens.tolist(), arrivals.hashes)
    for prompt_tokens, output_tokens, hashes in zip(*columns, strict=True):
        known = sum(1 for _ in itertools.takewhile(seen.__contains__, hashes))
        seen.update(hashes)
        cached = min(known * TRACE_BLOCK_TOKENS, prompt_tokens - 1)
        requests.append(TraceRequest(prompt_tokens - cached, cached, output_tokens))
    return replace(problem, workload=empirical(requests))


def make_cases(
    deployment: Deployment,
    problem: Problem | NetworkProblem,
    policies: Sequence[Policy],
    others: Sequence[str],
    base: SimConfig,
) -> dict[str, Case]:
    """Returns one case per policy, in the given order, then one per baseline."""
    cases: dict[str, Case] = {}
    if others and isinstance(problem, NetworkProblem):
        raise InputError(
            "baselines have one pd cluster, and the deployment has several",
            where="--baseline",
            fix="leave it out, or simulate each pd cluster on its own",
        )
    for policy in policies:
        cases[policy] = Case(problem, routed_by(policy, deployment.scheduler, base))
    for name in others:
        assert isinstance(problem, Problem)
        made: Problem | None = getattr(baselines, name)(problem)
        if made is None:
            why = {
                "naive": ("there is no prfaas cluster", "leave the baseline out"),
                "equal_cost": ("a price is unknown", "give usd_per_gpu_hour"),
            }
            problem_words, fix = why.get(name, ("fewer than two instances", "add GPUs"))
            raise InputError(f"{name}: {problem_words}", where="--baseline", fix=fix)
        # A baseline does not have this link, so changes of its rate do not apply.
        links = base.links if made.remotes else {}
        config = replace(routed_by(BASELINES[name], deployment.scheduler, base), links=links)
        cases[name] = Case(made, config)
    return cases


def routed_by(policy: Policy, rules: SchedulerSection, base: SimConfig) -> SimConfig:
    return replace(base, scheduler=msgspec.structs.replace(rules, policy=policy))


def cache_config(deployment: Deployment) -> CacheConfig:
    return CacheConfig(bytes_per_node=deployment.cache.gb_per_node * 1e9)


def link_changes(
    path: Path, problem: Problem | NetworkProblem
) -> dict[LinkId, tuple[RateChange, ...]]:
    """Reads a file of link rates. A line without a link applies to all links of PrfaaS clusters."""
    bps = {
        link_id(home.problem, index): remote.path.bps
        for home in as_network(problem).homes
        for index, remote in enumerate(home.problem.remotes)
    }
    changes: dict[LinkId, list[RateChange]] = {link: [] for link in bps}
    for speed in read_link_trace(path):
        named = [link for link in bps if speed.link in (None, link)]
        if not named:
            named_link = "" if speed.link is None else f" {','.join(speed.link)}"
            raise InputError(
                f"there is no link{named_link} from a prfaas cluster",
                file=path,
                fix=f"name one of these as from,to: {'; '.join(map(','.join, bps)) or 'none'}",
            )
        for link in named:
            changes[link].append(RateChange(speed.at_s, speed.gbps * 1e9 / bps[link]))
    return {link: tuple(made) for link, made in changes.items() if made}
