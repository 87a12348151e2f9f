"""What services expose follows Prometheus' conventions, as promtool checks them. The end-to-end
test checks the pages of running processes; this one needs none."""

from __future__ import annotations

import pytest

from prfaas.engine.api import EngineLimits, EngineStats, StepTiming
from prfaas.gateway.api.metrics import ApiMetrics
from prfaas.node.metrics import NodeMetrics
from tests.deploy.prometheus import complaints_about, families_of, needs_prometheus


def node_page() -> str:
    metrics = NodeMetrics("model", 64, EngineLimits(1000, 100, 4, 4))
    metrics.failed("code")
    metrics.succeeded("stop")
    metrics.computed(computed=1, local=2, external=3)
    return metrics.render(lambda: EngineStats(1, 1, 1, 1, StepTiming(1, 0.5, 0.1)), held=0).decode()


PAGES = {"gateway": ApiMetrics().render().decode(), "node": node_page()}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_help_texts_are_sentences(page: str) -> None:
    for name, text in families_of(page).items():
        assert text.endswith(".") and text[0].isupper(), f"{name}: {text}"


@needs_prometheus
@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_promtool_accepts_names_and_types(page: str) -> None:
    assert complaints_about(page) == []


@needs_prometheus
def test_promtool_finds_what_is_wrong() -> None:
    page = "# HELP requests Requests.\n# TYPE requests counter\nrequests 1\n"
    assert complaints_about(page)
