"""`prfaas simulate`: policies, baselines, several PD clusters, a trace, a link that is cut.

The pages that `--html` writes have the route of every request, and what the router compared for
it. All of it comes from fixed seeds. Where the last digit of a float decides a route, everything
after it differs, so runs are short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.goldens.canonical import Golden, Precision
from tests.goldens.commands import MEASURED, page_data, prfaas, workplace
from tests.goldens.draws import Draws

# Pages cut their figures off after three decimals.
PRECISION = Precision(digits=6, absolute=0.00101)
REQUESTS = 300
POLICIES = ("--policy", "paper", "adaptive", "local", "remote")
BASELINES = ("--baseline", "homogeneous", "equal_cost", "naive")
CASE = "configs/case_study.toml"
WITHOUT_PAGE = {"many_homes"}  # its many nodes are idle
_MOMENTS = 8  # of the frames of a page
_COMPARED_EVERY = 15  # so often a row has what the router compared


def goldens() -> Iterator[Golden]:
    with workplace():
        _write_trace(Path("trace.jsonl"))
        Path("cut.csv").write_text("20,0\n40,100\n", encoding="utf-8")
        runs: dict[str, tuple[object, ...]] = {
            "case_study": (CASE, *POLICIES, *BASELINES, "--requests", REQUESTS, "--seed", 1),
            "crowded": (CASE, *POLICIES[:3], "--requests", REQUESTS, "--load", 4.5, "--seed", 2),
            "cut": (CASE, *POLICIES[:3], "--requests", REQUESTS, "--link-trace", "cut.csv"),
            "trace": (CASE, *POLICIES[:3], "--trace", "trace.jsonl", "--seed", 3),
            "two_homes": ("configs/two_by_two.toml", *POLICIES, "--requests", REQUESTS),
            "many_homes": ("configs/four_by_three.toml", *POLICIES[:3], "--requests", REQUESTS),
        }
        for name in ("kimi_linear_b200_rtxpro", "mimo_mi300x_h200", "qwen3.5_h200_h20"):
            runs[name] = (f"configs/{name}.toml", *POLICIES[:3], "--requests", 100)
        for name, words in runs.items():
            page = Path(f"{name}.html")
            command = ("simulate", *words, "--workers", 1, "--html", page)
            yield Golden(f"{name}.json", prfaas(*command, "--json").data)
            data = page_data(page)
            if REQUESTS in words or "--trace" in words:
                for run in data["runs"]:
                    kind = str(run["name"]).replace(" ", "_")
                    yield Golden(f"{name}.routes.{kind}.json", _routes(run["requests"]))
            if name not in WITHOUT_PAGE:
                yield Golden(f"{name}.page.json", _page(data))
        words = ("simulate", CASE, "--requests", 60, "--seed", 1, "--workers", 1)
        yield Golden("timeline.txt", _without_duration(prfaas(*words, "--timeline", "t.json").text))
        yield Golden("timeline.json", _spans(json.loads(Path("t.json").read_text("utf-8"))))


def _write_trace(file: Path) -> None:
    """Conversations whose turns share prefixes, in Mooncake's format."""
    draws, rows, fresh = Draws(7), [], 0
    for conversation in range(24):
        blocks: list[int] = [0, 1] if conversation % 3 else []  # a system prompt
        at_ms = draws.whole(0, 40) * 1000
        for _ in range(draws.whole(2, 6)):
            added = draws.whole(2, 40)
            blocks = [*blocks, *range(1000 + fresh, 1000 + fresh + added)]
            fresh += added
            length = len(blocks) * 512 - draws.whole(0, 500)
            output = draws.whole(20, 400)
            rows.append((at_ms, {"input_length": length, "output_length": output}, list(blocks)))
            at_ms += draws.whole(2, 20) * 1000
    with file.open("w", encoding="utf-8") as out:
        for at_ms, lengths, blocks in sorted(rows, key=lambda row: row[0]):
            out.write(json.dumps({"timestamp": at_ms, **lengths, "hash_ids": blocks}) + "\n")


def _routes(requests: dict[str, Any]) -> dict[str, Any]:
    """A row for each request, with names instead of numbers."""
    columns, names = dict(requests["columns"]), requests["names"]
    compared = columns.pop("alternatives")
    for column, kind in (("prefill", "node"), ("decode", "node")):
        columns[column] = [None if n < 0 else names[kind][n] for n in columns[column]]
    for column in ("home", "route", "outcome"):
        columns[column] = [names[column][number] for number in columns[column]]
    order = sorted(columns)
    rows = [list(row) for row in zip(*(columns[name] for name in order), strict=True)]
    explained = {
        columns["id"][at]: [[names["node"][int(way[0])], *way[1:]] for way in ways]
        for at, ways in enumerate(compared)
        if ways is not None and at % _COMPARED_EVERY == 0
    }
    return {
        "columns": order,
        "rows": rows,
        "reasons": names["reason"],
        "compared": explained,
        "of": requests["of"],
    }


def _page(data: dict[str, Any]) -> dict[str, Any]:
    """The page's data without the requests, at a few of its moments."""
    runs = []
    for run in data["runs"]:
        frames = len(run["times_s"])
        rest = {key: value for key, value in run.items() if key != "requests"}
        runs.append(_at_moments(rest, frames))
    return {**data, "runs": runs}


def _at_moments(value: Any, frames: int) -> Any:
    if isinstance(value, dict):
        return {key: _at_moments(inner, frames) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    if frames > _MOMENTS and len(value) == frames:
        return [value[at * (frames - 1) // (_MOMENTS - 1)] for at in range(_MOMENTS)]
    return [_at_moments(inner, frames) for inner in value]


def _spans(trace: Any) -> dict[str, Any]:
    """The events of a Chrome trace as rows."""
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    columns = sorted({key for event in events for key in event} - {"args"})
    rows = [[*(event.get(key) for key in columns), *_arguments(event)] for event in events]
    return {"columns": [*columns, "args"], "rows": rows}


def _arguments(event: dict[str, Any]) -> list[str]:
    return ["; ".join(f"{k}: {v}" for k, v in sorted(event.get("args", {}).items()))]


def _without_duration(text: str) -> str:
    """The report says how long the simulation took."""
    short, found = re.subn(r"[\d.]+ s in all", f"{MEASURED} in all", text)
    assert found == 1, text
    return short
