"""The connector's counters: each has a name and a help text after Prometheus' conventions."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

import prfaas.integrations.vllm
from prfaas.integrations.vllm.metrics import COUNTERS
from prfaas.service.exposition import render_metrics
from tests.deploy.prometheus import ROOT, complaints_about, needs_prometheus

SOURCE = Path(prfaas.integrations.vllm.__file__).parent
FORMS = {"native", "canonical"}


def test_what_the_connector_counts_is_exposed_and_documented() -> None:
    code = "".join(file.read_text() for file in SOURCE.rglob("*.py"))
    counted = set(re.findall(r'_count\("(\w+)"', code))
    counted |= {f"{form}_handoffs" for form in FORMS} | {"kept_answers"}
    assert counted == COUNTERS.keys()
    listed = re.search(r"prfaas_connector_\{([\w,]+)\}_total", (ROOT / "docs/vllm.md").read_text())
    assert listed is not None and set(listed[1].split(",")) == COUNTERS.keys()
    assert all(text.endswith(".") for text in COUNTERS.values())


@needs_prometheus
def test_promtool_accepts_the_counters() -> None:
    registry = CollectorRegistry()
    for name, text in COUNTERS.items():
        Counter(f"prfaas_connector_{name}", text, registry=registry)
    assert complaints_about(render_metrics(registry).decode()) == []
