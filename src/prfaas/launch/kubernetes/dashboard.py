"""A dashboard for Grafana, whose sidecar reads ConfigMaps with a label. Pure."""

from __future__ import annotations

import json
from typing import NamedTuple

from prfaas.launch.kubernetes.pods import Manifest

FILE = "prfaas.json"
_WIDTH, _HEIGHT = 12, 8  # of a panel; a row has 24 columns


class Panel(NamedTuple):
    title: str
    unit: str
    queries: dict[str, str]  # PromQL by legend


def _quantile(share: float) -> str:
    name = "prfaas_gateway_time_to_first_token_seconds_bucket"
    return f"histogram_quantile({share:g}, sum by (le, route) (rate({name}[5m])))"


def _rate(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({name}[5m]))"


PANELS = (
    Panel(
        "Requests",
        "reqps",
        {"{{route}} {{outcome}}": _rate("prfaas_gateway_requests_total", "route, outcome")},
    ),
    Panel(
        "Time to first token",
        "s",
        {"{{route}} median": _quantile(0.5), "{{route}} P90": _quantile(0.9)},
    ),
    Panel("Requests in flight", "short", {"{{pod}}": "prfaas_gateway_in_flight"}),
    Panel("Retries", "short", {"{{pod}}": _rate("prfaas_gateway_retries_total", "pod")}),
    Panel(
        "Prompt tokens",
        "short",
        {
            "{{route}}": _rate("prfaas_gateway_prompt_tokens_total", "route"),
            "{{route}} cached": _rate("prfaas_gateway_cached_tokens_total", "route"),
        },
    ),
    Panel(
        "KV handed off",
        "Bps",
        {"{{route}}": _rate("prfaas_gateway_handed_off_bytes_total", "route")},
    ),
    Panel(
        "Requests at engines",
        "short",
        {
            "{{pod}} running": "vllm:num_requests_running",
            "{{pod}} waiting": "vllm:num_requests_waiting",
        },
    ),
    Panel("Event-loop lag", "s", {"{{pod}}": 'prfaas_gateway_loop_stall_max_seconds{part="own"}'}),
)


def dashboard_json() -> str:
    panels = [_panel(number, panel) for number, panel in enumerate(PANELS)]
    found = {
        "title": "prfaas",
        "uid": "prfaas",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(found, indent=2) + "\n"


def _panel(number: int, panel: Panel) -> Manifest:
    return {
        "id": number + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": number % 2 * _WIDTH,
            "y": number // 2 * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def config_map(text: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "prfaas-dashboard", "labels": {"grafana_dashboard": "1"}},
        "data": {FILE: text},
    }
