"""Builds the Grafana dashboard: `python deploy/grafana/build.py > deploy/grafana/prfaas.json`.

`make dashboard` does the same. The panels are listed in Python: their JSON is mostly layout.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from panels import Panel
from system_rows import SYSTEM_ROWS
from traffic_rows import TRAFFIC_ROWS

_WIDTH, _HEIGHT = 24, 8  # of the grid, and of a panel
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def build() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row in (*TRAFFIC_ROWS, *SYSTEM_ROWS):
        panels.append(_row(row.title, len(panels) + 1, y))
        y += 1
        # Two or three in a line, so that no line has a gap.
        in_line = 3 if len(row.panels) % 3 == 0 else 2
        for at, panel in enumerate(row.panels):
            column, line = at % in_line, at // in_line
            width = _WIDTH // in_line
            if at == len(row.panels) - 1:
                width = _WIDTH - column * width  # the last one fills its line
            place = {
                "x": column * (_WIDTH // in_line),
                "y": y + line * _HEIGHT,
                "w": width,
                "h": _HEIGHT,
            }
            panels.append(_panel(panel, len(panels) + 1, place))
        y += -(-len(row.panels) // in_line) * _HEIGHT
    return {
        "uid": "prfaas",
        "title": "prfaas",
        "description": "Prefill-as-a-Service: requests, offloading, links, cache, plan, tenants.",
        "tags": ["prfaas", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _VARIABLES},
        "panels": panels,
    }


_VARIABLES = [
    {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    },
    {
        "name": "deployment",
        "label": "Deployment",
        "type": "query",
        "datasource": _SOURCE,
        "definition": "label_values(prfaas_gateway_ready, deployment)",
        "query": {
            "query": "label_values(prfaas_gateway_ready, deployment)",
            "refId": "deployment",
        },
        "current": {"selected": True, "text": "All", "value": "$__all"},
        "hide": 0,
        # Also matches series without the label.
        "allValue": ".*",
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    },
]


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        defaults["min"] = 0
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        colours = {"0": ("clear", "green"), "1": ("building", "yellow"), "2": ("congested", "red")}
        mapped = {
            value: {"text": text, "color": colour, "index": int(value)}
            for value, (text, colour) in colours.items()
        }
        defaults["mappings"] = [{"type": "value", "options": mapped}]
        options = {"showValue": "auto", "mergeValues": True, "legend": {"showLegend": False}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": True,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(build(), indent=1) + "\n")
