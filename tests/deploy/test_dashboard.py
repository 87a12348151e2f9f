"""The dashboard: Grafana can import it, and its queries are PromQL."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.prometheus import (
    DASHBOARD,
    dashboard_queries,
    needs_prometheus,
    promtool,
)

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def test_the_file_is_what_the_script_builds() -> None:
    script = DASHBOARD.parent / "build.py"
    built = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, timeout=60
    )
    assert built.stdout == DASHBOARD.read_text(), "run: make dashboard"


def test_grafana_can_import_it(dashboard: dict[str, Any]) -> None:
    """What an import needs: no id of another Grafana, a uid, and a data source to choose."""
    assert "id" not in dashboard and dashboard["uid"] == "prfaas"
    assert dashboard["schemaVersion"] >= 36
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["deployment"]["datasource"] == SOURCE
    assert variables["deployment"]["allValue"] == ".*"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and all(number > 0 for number in ids)
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["datasource"] == SOURCE
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(references) == len(set(references))
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE and target["legendFormat"]


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(0 <= at["x"] and at["x"] + at["w"] <= 24 for at in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_every_query_selects_the_deployment(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            assert 'deployment=~"$deployment"' in target["expr"], target["expr"]


@needs_prometheus
def test_every_query_is_promql(dashboard: dict[str, Any], tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": expression}
        for number, (_, expression) in enumerate(dashboard_queries(dashboard, 60))
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    code, printed = promtool("check", "rules", file)
    assert code == 0 and f"{len(rules)} rules found" in printed, printed
