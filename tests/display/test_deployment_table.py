from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from prfaas.display.deployment_table import (
    links_line,
    live_view,
    node_row,
    plan_lines,
    service_lines,
)
from prfaas.launch.request_outcomes import RequestOutcomes
from tests.launch.test_request_outcomes import line

NODE: dict[str, Any] = {
    "node": "pd-0", "kvd_url": "http://k", "alive": True, "incompatible": [], "role": "decode",
    "running": 3.0, "waiting": 1.0, "wait_s": 0.25, "cache": {"used_bytes": 3 << 20},
}  # fmt: skip
STATE: dict[str, Any] = {
    "policy": "paper",
    "homes": [
        {"cluster": "pd", "service": "degraded", "reason": "far is drained"},
        {"cluster": "west", "service": "served", "reason": ""},
    ],
    "plan": {
        "made": True, "threshold_tokens": 19412, "roles": {"pd-0": "decode", "pd-1": "prefill"},
        "age_s": 7.2, "reason": "threshold follows the traffic",
    },
    "advice": None,
    "clusters": [{"cluster": "pd", "nodes": [NODE]}],
    "links": [
        {"from": "far", "to": "pd", "up": True, "verdict": 2, "goodput_bps": 5e6,
         "capacity_bps": 1e9},
    ],
    "requests": {"in_flight": 4, "waiting": 2},
}  # fmt: skip


def test_a_node_in_use_and_others() -> None:
    assert node_row("pd", NODE) == ["pd-0", "pd decode", "3", "1", "0.2", "3.0 MiB"]
    assert node_row("pd", {**NODE, "alive": False})[1] == "not alive"
    assert node_row("pd", {**NODE, "incompatible": ["model"]})[1] == "incompatible: model"


def test_a_node_with_two_forms() -> None:
    pools = {"canonical": {"cache": {"used_bytes": 1 << 20}}, "native": {"cache": NODE["cache"]}}
    assert node_row("pd", {**NODE, "forms": pools})[-1] == "canonical 1.0 MiB, native 3.0 MiB"
    one = {"native": {"cache": NODE["cache"]}}
    assert node_row("pd", {**NODE, "forms": one})[-1] == "3.0 MiB"


def test_a_node_that_changes_its_role() -> None:
    going = {**NODE, "becomes": "prefill", "draining": False}
    assert node_row("pd", going)[1] == "pd decode, copies to become prefill"
    assert node_row("pd", {**going, "draining": True})[1] == "pd decode, drains to become prefill"


def test_plan_and_advice() -> None:
    said = "threshold 19,412 tokens, 1 prefill + 1 decode, 7 s ago: threshold follows the traffic"
    assert plan_lines(STATE) == [f"plan: {said}"]
    advised = {**STATE, "advice": {**STATE["plan"], "threshold_tokens": 7, "reason": "why"}}
    assert plan_lines(advised)[1].startswith("advice: threshold 7 tokens")
    assert plan_lines({**STATE, "plan": {"made": False}}) == []
    assert service_lines(STATE) == ["pd is degraded: far is drained"]


def test_links_in_words() -> None:
    assert links_line(STATE).splitlines() == [
        "far -> pd: congested, 5.0 of 1000 Mbit/s",
        "4 requests in flight, 2 waiting",
    ]
    down = {**STATE, "links": [{**STATE["links"][0], "up": False}]}
    assert "far -> pd: down" in links_line(down)


def test_the_whole_view() -> None:
    outcomes = RequestOutcomes()
    outcomes.read_line(line())
    outcomes.read_line(line("r2", outcome="cancelled"))
    outcomes.read_line(line("r3", form="native"))
    screen = Console(width=100, record=True, file=io.StringIO())
    screen.print(live_view(STATE, outcomes))
    shown = screen.export_text()
    assert "threshold 19,412 tokens" in shown and "1 cancelled" in shown and "0.500" in shown
    assert "cached: 120 of 300 prompt tokens (40%)" in shown and "1 native" in shown
