"""`prfaas plan --sweep KEY=V1,V2`: plans a deployment again with each value of one key."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.config import Deployment, parse_deployment
from prfaas.errors import InputError
from prfaas.planner.comparison import DeploymentComparison
from prfaas.studies.problem_files import Study

Point = tuple[Any, Deployment]


class SweepPoint(NamedTuple):
    value: Any
    plan: DeploymentComparison


def run_sweep(
    study: Study,
    raw: dict[str, Any],
    file: Path,
    sweep: str,
    load: float | None,
    with_progress: Callable[[Sequence[Point], str], Iterable[Point]],
) -> list[SweepPoint]:
    key, values = parse_sweep(sweep)
    deployments = [(value, _varied(raw, file, key, value)) for value in values]
    return [
        SweepPoint(value, study.plan(deployment, load))
        for value, deployment in with_progress(deployments, f"sweep of {key}")
    ]


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
