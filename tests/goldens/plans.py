"""`prfaas plan` of every deployment in `configs` with one PD cluster, in both readings, with its
options. `network_plans` has those with several PD clusters.

The pages that `--html` writes are recorded by their data, with few points of each curve.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.goldens.canonical import Golden, Precision
from tests.goldens.commands import page_data, prfaas, workplace

# The search for the best threshold and split stops at a tolerance, and its results go into others.
PRECISION = Precision(digits=7, absolute=1e-9)
NOT_DEPLOYMENTS = {"case_study.published.toml", "host.toml"}
SEVERAL_HOMES = ("two_by_two", "four_by_three")
# Equal gains are ordered by the last digits of floats, which differ between machines.
TIED = {"four_by_three"}
WITHOUT_PAGE = {"four_by_three"}  # its curves take seconds
EXACT_TEXTS = {"case_study", "qwen3.5_h200_h20"}
_CURVE_POINTS = 8


def goldens() -> Iterator[Golden]:
    with workplace() as place:
        files = sorted(path.name for path in (place / "configs").glob("*.toml"))
        for file in files:
            name = Path(file).stem
            if file in NOT_DEPLOYMENTS or name in SEVERAL_HOMES:
                continue
            yield from reports(f"configs/{file}")
            mapped = prfaas("plan", f"configs/{file}", "--map", "--workers", "1", "--json").data
            yield Golden(f"{name}.map.json", mapped["map"])
        case = "configs/case_study.toml"
        published = ("--compare", "configs/case_study.published.toml")
        yield Golden("case_study.compare.json", prfaas("plan", case, *published, "--json").data)
        swept = ("--sweep", "links.0.gbps=5,10,100", "--workers", "1")
        yield Golden("case_study.sweep.json", prfaas("plan", case, *swept, "--json").data)
        loaded = ("--reading", "exact", "--load", "2.5")
        yield Golden("case_study.load.json", prfaas("plan", case, *loaded, "--json").data)


def reports(file: str) -> Iterator[Golden]:
    name = Path(file).stem
    for reading in ("paper", "exact"):
        words = ("plan", file, "--reading", reading)
        yield Golden(f"{name}.{reading}.json", _in_order(prfaas(*words, "--json").data))
        if name not in TIED and (reading == "paper" or name in EXACT_TEXTS):
            yield Golden(f"{name}.{reading}.txt", prfaas(*words).text)
    if name in WITHOUT_PAGE:
        return
    page = Path(f"{name}.html")
    written = prfaas("plan", file, "--html", page)
    assert written.code == 0, written.err
    yield Golden(f"{name}.page.json", _thinned(page_data(page)))


def _in_order(plan: dict[str, Any]) -> dict[str, Any]:
    """With equal gains in the order of their other fields."""
    if "one_more" not in plan:
        return plan

    def place(gain: dict[str, Any]) -> tuple[float, list[str]]:
        others = [f"{key} {gain[key]}" for key in sorted(gain) if key != "gain_rps"]
        return -round(gain["gain_rps"], 6), others

    return {**plan, "one_more": sorted(plan["one_more"], key=place)}


def _thinned(value: Any) -> Any:
    """Long lists of numbers are curves: some of their points are enough."""
    if isinstance(value, dict):
        return {key: _thinned(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > _CURVE_POINTS and all(isinstance(v, int | float | list) for v in value):
        value = value[:: -(-len(value) // _CURVE_POINTS)]
    return [_thinned(inner) for inner in value]
