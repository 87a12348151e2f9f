"""A source of scenes that tests change by hand, and pages that need no assets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from prfaas.console.page import Asset, PageParts
from prfaas.console.scene import ClusterScene, HomeScene, LinkScene, NodeScene, Scene
from prfaas.gateway.console.events import Moves
from prfaas.gateway.console.recent import Counts
from prfaas.scheduler.explain import Explanation

HOSTILE = "<img/src=x/onerror=alert(1)>\"'&</script>\u2028"
PARTS = PageParts(
    {
        "page.html": "<!doctype html><html><head><title><!--title--></title><!--style-->"
        "<!--importmap--></head><body><!--data--><!--entry--></body></html>",
        "login.html": "<!doctype html><html><head><title><!--title--></title><!--style--></head>"
        '<body><form id="login"><!--problem--></form></body></html>',
    },
    {
        "console.css": Asset(b"main { color: red }", "text/css", "0123456789abcdef"),
        "live.js": Asset(b'import "prfaas/dom";', "text/javascript", "1123456789abcdef"),
        "dom.js": Asset(b"export const a = '</script>';", "text/javascript", "2123456789abcdef"),
        "report.js": Asset(b'import "prfaas/dom";', "text/javascript", "3123456789abcdef"),
    },
)


def node(number: int = 0, **fields: Any) -> NodeScene:
    return NodeScene(id=f"http://n{number}:2", name=f"n{number}", **fields)


def scene(**fields: Any) -> Scene:
    made = Scene(
        at_s=100.0,
        model="made-up",
        policy="paper",
        clusters=(
            ClusterScene("pd", "pd", (node(0, role="prefill"), node(1, role="decode"))),
            ClusterScene("far", "prfaas", (node(2, role="prefill"),)),
        ),
        links=(LinkScene("far", "pd", capacity_bps=1e9),),
        homes=(HomeScene("pd", planned_threshold_tokens=1000.0),),
    )
    return replace(made, **fields)


@dataclass
class MadeScenes:
    """A `SceneSource`."""

    now: Scene = field(default_factory=scene)
    wanted: Callable[[], bool] = lambda: False
    made: int = 0

    def scene(self, at_s: float, counts: Counts) -> Scene:
        self.made += 1
        return replace(self.now, at_s=at_s, ttft=counts.ttft)

    def moves(self) -> Mapping[str, Moves]:
        return {}

    def describe(self, explanation: Explanation | None) -> dict[str, Any]:
        return {"threshold_tokens": None if explanation is None else explanation.threshold_tokens}

    def explain_routes(self, wanted: Callable[[], bool]) -> None:
        self.wanted = wanted
