"""`prfaas plan --sweep KEY=V1,V2`: plans a deployment again with each value of one key."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.config import Deployment, parse_deployment
from prfaas.errors import InputError
from prfaas.planner.comparison import DeploymentComparison
from prfaas.planner.problem import Problem
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import HERE, Workers
from prfaas.studies.problem_files import Study

# A value takes about so long: 15 ms where it shares its workload with others, up to 0.2 s if not.
SECONDS_PER_VALUE = 0.05


class SweepPoint(NamedTuple):
    value: Any
    plan: DeploymentComparison


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The problems of all values travel together, so that those which share a workload still do in
    a worker: most of the work of a plan is of its workload."""

    study: Study
    problems: tuple[Problem, ...]
    load: float | None

    def __call__(self, number: int) -> DeploymentComparison:
        return self.study.plan_problem(self.problems[number], self.load)


def run_sweep(
    study: Study,
    raw: dict[str, Any],
    file: Path,
    sweep: str,
    load: float | None,
    workers: Workers = HERE,
    progress: Callable[[float], None] | None = None,
) -> list[SweepPoint]:
    key, values = parse_sweep(sweep)
    problems = tuple(study.problem(_varied(raw, file, key, value)) for value in values)
    cases = {f"{key}={value}, value {n + 1}": n for n, value in enumerate(values)}
    plans = run_all(
        _Sweep(study, problems, load),
        cases,
        workers,
        progress=progress,
        expected_s=SECONDS_PER_VALUE * len(cases),
    )
    return [SweepPoint(value, plan) for value, plan in zip(values, plans.values(), strict=True)]


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Splits `links.0.gbps=5,8` into the key and its values, which are parsed as TOML."""
    key, equals, rest = text.partition("=")
    if not (key and equals and rest):
        raise InputError(
            f"{text!r} is not KEY=V1,V2,...", where="--sweep", fix="write KEY=V1,V2,..."
        )
    values = []
    for part in rest.split(","):
        try:
            values.append(tomllib.loads(f"value = {part}")["value"])
        except tomllib.TOMLDecodeError:
            values.append(part)  # a bare word is a name, such as that of a model
    return key, values


def _varied(raw: dict[str, Any], file: Path, key: str, value: Any) -> Deployment:
    raw = copy.deepcopy(raw)
    at: Any = raw
    *parents, last = key.split(".")
    for part in parents:
        at = _step(at, part, key)
    if isinstance(at, list):
        _step(at, last, key)
        at[int(last)] = value
    elif isinstance(at, dict):
        at[last] = value
    else:
        raise _no_such_key(key, last)
    return parse_deployment(raw, file)


def _step(at: Any, part: str, key: str) -> Any:
    if isinstance(at, dict):
        # A section may be absent from the file: its defaults apply.
        return at.setdefault(part, {})
    if isinstance(at, list) and part.isdigit() and int(part) < len(at):
        return at[int(part)]
    raise _no_such_key(key, part)


def _no_such_key(key: str, part: str) -> InputError:
    return InputError(
        f"{key!r} has no key {part!r} in the deployment file",
        where="--sweep",
        fix="write a path of the file, list entries counted from 0: links.0.gbps",
    )
