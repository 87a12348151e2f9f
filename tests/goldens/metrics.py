"""The metrics of gateway, node and kvd: names, types, help texts and labels. No values."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from prfaas.config import parse_deployment
from prfaas.config.deployment import Deployment
from prfaas.contracts.openai import Usage
from prfaas.engine.api import EngineLimits, EngineStats, StepTiming
from prfaas.gateway.api.metrics import ApiMetrics, RequestRecord
from prfaas.gateway.backend import running
from prfaas.gateway.request import RequestTrace
from prfaas.node.metrics import NodeMetrics
from prfaas.planner.problem import Problem
from prfaas.scheduler.short_term import LONG
from prfaas.studies.problem_files import Study
from tests.goldens.canonical import Golden
from tests.kvd.hosts import Host, begun, fill, kvd, names, prompt_of
from tests.waiting import wait_until

NOWHERE = "http://127.0.0.1:1"  # no service listens there


def goldens() -> Iterator[Golden]:
    yield Golden("gateway.json", _families(asyncio.run(_gateway_page())))
    yield Golden("node.json", _families(_node_page()))
    yield Golden("kvd.json", _families(_kvd_pages()))


def _kvd_pages() -> str:
    """Of two kvds, after a hand-off from one to the other."""
    prompt = prompt_of(42)
    with tempfile.TemporaryDirectory(prefix="prfaas-") as folder, ExitStack() as stack:
        here, there = (stack.enter_context(kvd(Path(folder), name=name)) for name in "pd")
        sender = stack.enter_context(here.engine())
        stack.enter_context(there.engine())
        grant = there.grant(prompt)
        lease = begun(sender.begin(names(prompt), len(prompt), grant=grant))
        fill(lease, prompt)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        # The series of the link come with its first report.
        wait_until(lambda: "prfaas_kvd_link_rtt_seconds{" in _page(here))
        return _page(here) + _page(there)


def _page(host: Host) -> str:
    status, page = host.get("/metrics")
    assert status == 200
    return page.decode()


def _families(page: str) -> dict[str, Any]:
    """Of the labels, their names; of a histogram, also its bounds. A family without a series shows
    no labels. The page may be several pages, one after the other."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(page):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        labels.update(found.get(family.name, {}).get("labels", ()))
        known: dict[str, Any] = {"type": family.type, "help": family.documentation}
        if labels:
            known["labels"] = sorted(labels)
        bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
        if bounds:
            known["bounds"] = sorted(bounds)
        found[family.name] = known
    return found


async def _gateway_page() -> str:
    metrics = ApiMetrics()
    trace = RequestTrace(arrived_s=10.0, home="pd", cluster="far", offloaded=True, reason=LONG)
    trace.attempts, trace.form, trace.nbytes = 1, "native", 5000
    trace.routed_s, trace.prefilled_s, trace.committed_s = 10.25, 12.0, 12.5
    trace.first_token_s = 13.0
    usage = Usage(prompt_tokens=1000, completion_tokens=7)
    record = RequestRecord("id", "/v1/completions", "tenant", trace, 1000, usage, stream=True)
    metrics.count(record, "completed", 14.0)
    deployment, problem = small_deployment()
    async with running(deployment, problem) as backend:
        metrics.include(backend.metrics)
        return metrics.render().decode()


def small_deployment() -> tuple[Deployment, Problem]:
    node = {"url": NOWHERE, "kvd_url": NOWHERE}
    raw: dict[str, Any] = {
        "model": {"name": "case-study-1t"},
        "workload": {
            **{"kind": "lognormal", "mu": 7.0, "sigma": 1.0, "min_tokens": 128},
            **{"max_tokens": 131072, "output_tokens": 64},
        },
        "slo": {"output_tokens_per_s": 40},
        "clusters": [
            {
                **{"name": "pd", "kind": "pd", "accelerator": "h20", "gpus": 16},
                **{"gpus_per_instance": 8, "nodes": [node, {**node, "url": f"{NOWHERE}0"}]},
            },
            {
                **{"name": "far", "kind": "prfaas", "accelerator": "h200", "gpus": 8},
                **{"gpus_per_instance": 8, "nodes": [{**node, "url": f"{NOWHERE}1"}]},
            },
        ],
        "links": [{"from": "far", "to": "pd", "gbps": 10, "rtt_ms": 1}],
    }
    made = parse_deployment(raw, "deployment.toml")
    return made, Study(Path("deployment.toml"), "exact").problem(made)


def _node_page() -> str:
    metrics = NodeMetrics("model", 64, EngineLimits(1000, 100, 4, 4))
    metrics.failed("code")
    metrics.succeeded("stop")
    metrics.computed(computed=1, local=2, external=3)
    stats = EngineStats(1, 1, 1, 1, StepTiming(1, 0.5, 0.1))
    return metrics.render(lambda: stats, held=0).decode()
