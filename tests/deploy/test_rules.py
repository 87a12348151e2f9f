"""The alert rules: each fires on what it is for, and on nothing else; each has a runbook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.deploy.prometheus import ROOT, RULES, SCRAPES, needs_prometheus, promtool

OPERATIONS = ROOT / "docs" / "operations.md"


class Case(NamedTuple):
    """Series in promtool's notation, one value every 15 s; when they are judged."""

    fires: dict[str, str]
    quiet: dict[str, str]
    after: str = "10m"


NODE = 'prfaas_gateway_node_state{cluster="pd",node="pd-0",state="%s"}'
HOME = 'prfaas_gateway_home_service{home="pd",level="%s"}'
USABLE = 'prfaas_gateway_prefill_cluster_usable{home="pd",cluster="far",instance="%s"}'
LINK = '{source="far",target="near"}'
REQUESTS = 'prfaas_gateway_requests_total{outcome="%s",path="/v1/completions",route="local"}'
TTFT = 'prfaas_gateway_time_to_first_token_seconds_bucket{route="remote",le="%s"}'
MEMORY = 'prfaas_kvd_pool_memory_bytes{instance="a:7401",form="native",state="%s"}'
CASES = {
    "PrfaasTargetDown": Case(
        {'up{job="prfaas-kvd",instance="a"}': "1x4 0x40"},
        {'up{job="prfaas-kvd",instance="a"}': "1x50", 'up{job="other"}': "0x50"},
    ),
    "PrfaasGatewayNotReady": Case(
        {"prfaas_gateway_ready": "0x50"}, {"prfaas_gateway_ready": "1x50"}
    ),
    "PrfaasHomeUnserved": Case(
        {HOME % "unserved": "0x4 1x50", HOME % "served": "1x4 0x50"},
        {HOME % "unserved": "0x50", HOME % "degraded": "1x50"},
    ),
    "PrfaasHomeDegraded": Case(
        {HOME % "degraded": "1x50"},
        # For the minutes that a new plan takes.
        {HOME % "degraded": "1x12 0x40", HOME % "unserved": "0x50"},
    ),
    "PrfaasPrefillClusterLost": Case(
        # One of two gateways does not reach it.
        {USABLE % "a": "1x50", USABLE % "b": "1x4 0x50"},
        {USABLE % "a": "1x50", USABLE % "b": "1x4 0x4 1x50"},
    ),
    "PrfaasNodeLost": Case(
        {NODE % "lost": "1x50", NODE % "in_use": "0x50"},
        {NODE % "lost": "0x50", NODE % "leaving": "1x50"},
    ),
    "PrfaasNoPlan": Case(
        {'prfaas_gateway_plan_in_force{cluster="pd"}': "0x50"},
        {
            'prfaas_gateway_plan_in_force{cluster="pd"}': "0x4 1x50",
            "prfaas_gateway_plan_outdated": "0x50",
        },
    ),
    "PrfaasPlanNotFollowed": Case(
        {'prfaas_gateway_roles_pending{cluster="pd"}': "1x100"},
        # A node drains for ten minutes, and another one a little later.
        {'prfaas_gateway_roles_pending{cluster="pd"}': "1x40 0x4 1x50"},
        after="20m",
    ),
    "PrfaasNoPlanner": Case(
        {'prfaas_gateway_planner{instance="a"}': "0x50"},
        {'prfaas_gateway_planner{instance="a"}': "0x50", 'prfaas_gateway_planner{i="b"}': "1x50"},
    ),
    "PrfaasSeveralPlanners": Case(
        {'prfaas_gateway_planner{instance="a"}': "1x50", 'prfaas_gateway_planner{i="b"}': "1x50"},
        # Two deployments.
        {
            'prfaas_gateway_planner{deployment="a"}': "1x50",
            'prfaas_gateway_planner{deployment="b"}': "1x50",
        },
    ),
    "PrfaasLinkCut": Case(
        {
            f"prfaas_gateway_link_cuts_total{LINK}": "0x36 1x10",
            f"prfaas_gateway_link_up{LINK}": "1x50",
        },
        {
            f"prfaas_gateway_link_cuts_total{LINK}": "3x50",
            f"prfaas_gateway_link_up{LINK}": "1x50",
        },
    ),
    "PrfaasLinkCongested": Case(
        {f"prfaas_gateway_link_verdict{LINK}": "2x5 1x1 2x50"},
        {f"prfaas_gateway_link_verdict{LINK}": "0x20 2x8 1x50"},
        after="12m",
    ),
    "PrfaasSlowFirstToken": Case(
        {TTFT % "10": "0+1x60", TTFT % "20": "0+10x60", TTFT % "+Inf": "0+10x60"},
        {TTFT % "10": "0+9.5x60", TTFT % "20": "0+10x60", TTFT % "+Inf": "0+10x60"},
        after="12m",
    ),
    "PrfaasRequestsFailing": Case(
        {REQUESTS % "completed": "0+98x50", REQUESTS % "broken": "0+2x50"},
        {REQUESTS % "completed": "0+999x50", REQUESTS % "failed": "0+1x50"},
    ),
    "PrfaasRequestsShed": Case(
        {REQUESTS % "completed": "0+98x50", REQUESTS % "shed": "0+2x50"},
        {REQUESTS % "completed": "0+98x50", REQUESTS % "rejected": "0+2x50"},
    ),
    "PrfaasManyRetries": Case(
        {REQUESTS % "completed": "0+10x50", "prfaas_gateway_retries_total": "0+1x50"},
        {REQUESTS % "completed": "0+100x50", "prfaas_gateway_retries_total": "0+1x50"},
    ),
    "PrfaasRetriesDenied": Case(
        {"prfaas_gateway_denied_retries_total": "0x38 1x10"},
        {"prfaas_gateway_denied_retries_total": "7x50"},
    ),
    "PrfaasTenantRefused": Case(
        {'prfaas_gateway_tenant_refused_requests_total{tenant="a"}': "0+10x60"},
        {'prfaas_gateway_tenant_refused_requests_total{tenant="a"}': "0+1x60"},
        after="12m",
    ),
    "PrfaasGrantsRefused": Case(
        {"prfaas_gateway_refused_grants_total": "0+10x50"},
        {"prfaas_gateway_refused_grants_total": "0x20 10x30"},
    ),
    "PrfaasKvMemoryNearlyFull": Case(
        {MEMORY % "held": "95x50", MEMORY % "idle": "5x50", MEMORY % "free": "0x50"},
        {MEMORY % "held": "20x50", MEMORY % "idle": "80x50", MEMORY % "free": "0x50"},
    ),
    "PrfaasReuseLost": Case(
        {
            'prfaas_gateway_stateless_tokens_total{route="local"}': "0+30x240",
            'prfaas_gateway_prompt_tokens_total{route="local"}': "0+100x240",
        },
        {
            'prfaas_gateway_stateless_tokens_total{route="local"}': "0+10x240",
            'prfaas_gateway_prompt_tokens_total{route="local"}': "0+100x240",
        },
        after="55m",
    ),
    "PrfaasGatewayLag": Case(
        {"prfaas_gateway_loop_lag_max_seconds": "0.6x50"},
        # One lag stays the largest for two minutes.
        {"prfaas_gateway_loop_lag_max_seconds": "0.01x20 0.6x8 0.01x30"},
    ),
    "PrfaasKvdLate": Case(
        {"prfaas_kvd_late_ratio": "0.2x50"}, {"prfaas_kvd_late_ratio": "0.01x40 0.2x10"}
    ),
    "PrfaasWorkersReplaced": Case(
        {"prfaas_kvd_replaced_workers_total": "0x20 1x30"},
        {"prfaas_kvd_replaced_workers_total": "1x50"},
    ),
    "PrfaasBodyWorkersLost": Case(
        {'prfaas_gateway_body_workers_lost_total{instance="a",reason="died"}': "0x20 1x30"},
        {'prfaas_gateway_body_workers_lost_total{instance="a",reason="died"}': "0x50"},
    ),
}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@needs_prometheus
def test_promtool_accepts_rules_and_scrapes(tmp_path: Path) -> None:
    code, printed = promtool("check", "rules", RULES)
    assert code == 0, printed
    # Without the certificates, which promtool looks for.
    example = yaml.safe_load(SCRAPES.read_text())
    for scrape in example["scrape_configs"]:
        assert set(scrape.pop("tls_config")) == {"ca_file", "cert_file", "key_file"}
        assert scrape.pop("authorization").keys() == {"credentials_file"}
    example["rule_files"] = [str(RULES)]
    file = tmp_path / "prometheus.yaml"
    file.write_text(json.dumps(example))
    code, printed = promtool("check", "config", file)
    assert code == 0, printed


def test_every_alert_has_a_severity_a_text_and_a_runbook() -> None:
    headings = re.findall(r"^### (\w+)$", OPERATIONS.read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in rules()] == headings, "in the order of the rules"
    for rule in rules():
        name = rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        texts = rule["annotations"]
        assert set(texts) == {"summary", "description", "runbook_url"}, name
        assert texts["summary"].endswith(".") and texts["description"].endswith("."), name
        assert texts["runbook_url"] == f"docs/operations.md#{name.lower()}"


# Other ways to the same alerts.
MORE_CASES = (
    (
        "PrfaasNoPlan",
        Case(
            {
                'prfaas_gateway_plan_in_force{cluster="pd"}': "1x50",
                "prfaas_gateway_plan_outdated": "0x10 1x40",
            },
            {},
        ),
    ),
    (
        "PrfaasLinkCut",
        Case({f"prfaas_gateway_link_up{LINK}": "1x20 0x30"}, {}),
    ),
)


@needs_prometheus
def test_every_alert_fires_on_its_fault_alone(tmp_path: Path) -> None:
    assert CASES.keys() == {rule["alert"] for rule in rules()}
    tests = []
    for name, case in (*CASES.items(), *MORE_CASES):
        fires = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
        for series, found in ((case.fires, [{"labels": "{}", "value": 1}]), (case.quiet, [])):
            tests.append(
                {
                    "interval": "15s",
                    "input_series": [
                        {"series": one, "values": values} for one, values in series.items()
                    ],
                    "promql_expr_test": [
                        {"expr": fires, "eval_time": case.after, "exp_samples": found}
                    ],
                }
            )
    file = tmp_path / "tests.yaml"
    suite = {"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests}
    file.write_text(json.dumps(suite))
    code, printed = promtool("test", "rules", file)
    assert code == 0, printed


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_rules_group_by_the_deployment(rule: dict[str, Any]) -> None:
    """A sum over several deployments would hide the fault of one."""
    for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
        assert "deployment" in labels.split(", "), rule["expr"]
