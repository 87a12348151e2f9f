from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from prfaas.display.regions_table import (
    ALL,
    cluster_row,
    distinct_gateways,
    peers,
    plans_here,
    regions_view,
    thresholds,
)
from prfaas.launch.request_outcomes import RequestOutcomes
from tests.display.test_deployment_table import NODE, STATE

PREFILLS = {**NODE, "role": "prefill", "in_use": True, "running": 1, "waiting": 2}
DECODES = {**NODE, "role": "decode", "in_use": True, "running": 5, "waiting": 0}
EAST = {
    "cluster": "east",
    "kind": "pd",
    "drained": False,
    "nodes": [PREFILLS, DECODES, {**DECODES, "alive": False, "in_use": False}],
}


def state(here: bool, link: str) -> dict[str, Any]:
    return {
        **STATE,
        "clusters": [EAST, {"cluster": "north", "nodes": []}],
        "links": [{**STATE["links"][0], "from": "north", "to": link, "waited_s": 0.5}],
        "plan": {"homes": {"east": {"threshold_tokens": 19412}, "west": {"made": False}}},
        "gateways": [
            {"cluster": "east", "here": True, "alive": True, "plans": here},
            {"cluster": "west", "url": "http://b", "alive": True, "plans": not here},
        ],
        "planner": {"cluster": "east", "epoch": 3, "here": here},
    }


def test_a_cluster() -> None:
    row = ["east", "pd", "1 decode + 1 prefill, 1 not alive", "2 of 3", "no", "2", "6"]
    assert cluster_row(EAST) == row
    assert cluster_row({**EAST, "drained": True})[4] == "yes"
    assert cluster_row({"cluster": "north"}) == ["north", "-", "none", "0 of 0", "-", "0", "0"]


def test_a_gateway() -> None:
    seen = state(True, "east")
    assert thresholds("east", seen) == "east 19,412"
    assert thresholds("east", STATE) == "east 19,412" and thresholds("east", {}) == "no plan yet"
    assert peers(seen) == "1 of 1 alive" and peers(STATE) == "-"
    assert plans_here("east", seen) == "yes, epoch 3"
    assert plans_here("west", state(False, "east")) == "no (east)"
    assert plans_here(ALL, STATE) == "yes" and plans_here("east", STATE) == "-"


def test_one_gateway_over_all_is_shown_once() -> None:
    one = state(True, "east")
    assert list(distinct_gateways({"east": one, "west": one})) == [ALL]
    assert list(distinct_gateways({"east": one, "west": state(False, "west")})) == ["east", "west"]


def test_the_whole_view_has_every_link_and_gateway() -> None:
    screen = Console(width=120, record=True, file=io.StringIO())
    screen.print(
        regions_view({"east": state(True, "east"), "west": state(False, "west")}, RequestOutcomes())
    )
    shown = screen.export_text()
    for text in ("north -> east", "north -> west", "congested", "yes, epoch 3", "no (east)"):
        assert text in shown
