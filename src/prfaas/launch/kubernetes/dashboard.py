"""The dashboard for Grafana, whose sidecar reads ConfigMaps with a label.

`deploy/grafana/prfaas.json` is its home (`make dashboard` writes it). A wheel has a copy of it
beside this module.
"""

from __future__ import annotations

from pathlib import Path

from prfaas.errors import InputError
from prfaas.launch.kubernetes.pods import Manifest

FILE = "prfaas.json"
_PLACES = (
    Path(__file__).with_name(FILE),
    Path(__file__).parents[4] / "deploy" / "grafana" / FILE,
)


def dashboard_json() -> str:
    for place in _PLACES:
        if place.exists():
            return place.read_text(encoding="utf-8")
    raise InputError(
        "the Grafana dashboard is not installed",
        file=_PLACES[0],
        fix="install prfaas from a wheel or a checkout, or give --no-monitoring",
    )


def config_map(text: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "prfaas-dashboard", "labels": {"grafana_dashboard": "1"}},
        "data": {FILE: text},
    }
