"""A deployment is broken in every way that has an alert. Each alert fires, and every query of the
dashboard returns data."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from prfaas.cache.checkpoints import DEFAULT_SPARE_TOKENS
from prfaas_lab.faults.catalogue import arenas_full, workers_killed
from prfaas_lab.faults.clusters.catalogue import cluster_drained
from prfaas_lab.faults.credentials import HOSTILE_TENANT
from prfaas_lab.faults.worker_processes import children_of
from tests.deploy.observed_deployment import (
    LONG,
    RANGE_S,
    SCRAPE_S,
    SHORT,
    ObservedDeployment,
    eager,
    observed_deployment,
    unreachable,
)
from tests.deploy.prometheus import (
    DASHBOARD,
    ROOT,
    complaints_about,
    dashboard_queries,
    families_of,
    needs_prometheus,
)

PAGES = ("gateway.md", "kvd.md", "nodes.md")
# Without a fault none of these fires, however busy the machine is.
CALM = {
    *("PrfaasNoPlan", "PrfaasNoPlanner", "PrfaasSeveralPlanners"),
    *("PrfaasTenantRefused", "PrfaasGrantsRefused", "PrfaasKvMemoryNearlyFull", "PrfaasReuseLost"),
    *("PrfaasWorkersReplaced", "PrfaasBodyWorkersLost", "PrfaasPlanNotFollowed"),
}
CRAWL = 0.002  # of the link's rate: three long hand-offs take longer than 10 s
STATELESS = DEFAULT_SPARE_TOKENS - 192  # shorter than what lies between two states


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_prometheus
async def test_every_alert_fires_and_every_query_returns_data(tmp_path: Path) -> None:
    async with observed_deployment(tmp_path) as observed, traffic(observed):
        for step in (
            no_fault,
            no_prefill_node,
            gateways_that_plan_too,
            a_plan_that_is_not_followed,
            a_tenant_that_floods,
            states_that_are_missing,
            a_slow_link,
            a_cut_link,
            full_memory,
            processes_that_end_or_stop,
            a_node_that_dies,
            a_planner_that_dies,
        ):
            began_s = time.monotonic()
            await step(observed)
            took_s = time.monotonic() - began_s
            sys.stdout.write(f"{step.__name__}: {took_s:.1f} s, {len(observed.fired)} alerts\n")
        await check_all_alerts(observed)
        await check_all_queries(observed)


@asynccontextmanager
async def traffic(observed: ObservedDeployment) -> AsyncIterator[None]:
    running = asyncio.create_task(observed.traffic())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


# The steps ----------------------------------------------------------------------------------------


async def no_fault(observed: ObservedDeployment) -> None:
    """Every process is scraped, promtool likes what it exposes, and the documents have it."""
    pages = await observed.pages()
    documented = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    for name, page in pages.items():
        assert complaints_about(page) == [], name
        for family, text in families_of(page).items():
            assert text.endswith("."), f"{family} of {name}: its help text is not a sentence"
            short = re.sub(r"^prfaas_(gateway|kvd)_", "", family)
            assert f"`{short}" in documented or f"`{family}" in documented, f"{family} of {name}"
    await observed.until("up == 1", len(pages))
    await observed.until('increase(prfaas_gateway_routed_prompts_total{route="remote"}[10s]) > 0')
    assert not CALM & await observed.look()


async def gateways_that_plan_too(observed: ObservedDeployment) -> None:
    """A second gateway that makes plans, and a third one that reaches no node."""
    await asyncio.gather(
        observed.add_gateway("gateway-2", eager), observed.add_gateway("gateway-3", unreachable)
    )
    await observed.expect(
        *("PrfaasSeveralPlanners", "PrfaasNoPlan", "PrfaasGatewayNotReady"),
        *("PrfaasHomeUnserved", "PrfaasPrefillClusterLost"),
    )
    await observed.remove_gateway("gateway-3")
    await observed.expect("PrfaasTargetDown")
    observed.write_targets()


async def a_plan_that_is_not_followed(observed: ObservedDeployment) -> None:
    """The traffic of one gateway makes a decode node a prefill node, which has to finish the
    answers of another gateway first."""

    async def ask() -> None:
        asked = (observed.new_prompt(8 * SHORT) for _ in range(10))
        await asyncio.gather(
            *(observed.ask(ids, gateway="gateway-2", output_tokens=1) for ids in asked)
        )

    async with observed.streams(await observed.served.with_role("decode")):
        await observed.expect("PrfaasPlanNotFollowed", while_doing=ask)


async def a_tenant_that_floods(observed: ObservedDeployment) -> None:
    async def flood() -> None:
        ids = observed.new_prompt(SHORT)
        await asyncio.gather(*(observed.ask(ids, tenant=HOSTILE_TENANT) for _ in range(8)))

    await observed.expect("PrfaasTenantRefused", while_doing=flood)


async def states_that_are_missing(observed: ObservedDeployment) -> None:
    """Pairs of prompts with a common beginning, where no prompt ended: its blocks are cached, and
    no state to resume from. The second prompt of a pair leaves one there."""

    async def ask_twice() -> None:
        common = observed.new_prompt(STATELESS)
        for _ in range(2):
            await observed.ask((*common, *observed.new_prompt(SHORT // 4)))

    async def ask() -> None:
        await asyncio.gather(*(ask_twice() for _ in range(4)))

    await observed.expect("PrfaasReuseLost", while_doing=ask)


async def a_slow_link(observed: ObservedDeployment) -> None:
    async def ask() -> None:
        await asyncio.gather(*(observed.ask(observed.new_prompt(LONG)) for _ in range(3)))

    observed.served.links.set_rates(CRAWL)
    try:
        await observed.expect("PrfaasLinkCongested", "PrfaasSlowFirstToken", while_doing=ask)
    finally:
        observed.served.links.set_rates(1.0)


async def a_cut_link(observed: ObservedDeployment) -> None:
    """The requests of one gateway are retried; the other one may not retry."""

    async def ask() -> None:
        asked = [
            observed.ask(observed.new_prompt(LONG // 4), gateway=gateway)
            for gateway in ("gateway-0", "gateway-2")
            for _ in range(2)
        ]
        await asyncio.gather(*asked)

    observed.served.links.order("outage")
    try:
        await observed.expect(
            *("PrfaasLinkCut", "PrfaasManyRetries", "PrfaasRetriesDenied", "PrfaasRequestsShed"),
            while_doing=ask,
        )
    finally:
        observed.served.links.order("restore")
    await observed.remove_gateway("gateway-2")
    observed.write_targets()


async def full_memory(observed: ObservedDeployment) -> None:
    """The memory is filled again and again: a node that becomes a decode node meanwhile is empty,
    and then no hand-off is refused."""
    async with AsyncExitStack() as given_back:

        async def fill() -> None:
            given_back.push_async_callback(await arenas_full(observed.served, ""))
            await asyncio.sleep(SCRAPE_S)

        await observed.expect("PrfaasGrantsRefused", "PrfaasKvMemoryNearlyFull", while_doing=fill)


async def processes_that_end_or_stop(observed: ObservedDeployment) -> None:
    served = observed.served
    decode = (await served.with_role("decode"))[0]
    mended = await workers_killed(served, decode)
    await observed.expect("PrfaasWorkersReplaced")
    await mended()
    gateway = served.processes["gateway-0"]

    async def kill_body_worker() -> None:
        """While it reads a body: the loss of an idle one costs no request."""
        asked = asyncio.create_task(observed.ask(observed.new_prompt(LONG)))
        while not asked.done():
            for worker in children_of(gateway):
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            await asyncio.sleep(0.01)

    await observed.expect("PrfaasBodyWorkersLost", while_doing=kill_body_worker)
    await _stopped(observed, f"kvd-{decode}", "PrfaasKvdLate", for_s=5.0)
    await _stopped(observed, "gateway-1", "PrfaasGatewayLag", for_s=1.5)


async def _stopped(observed: ObservedDeployment, name: str, alert: str, for_s: float) -> None:
    """The fault itself lasts for a time: this is not a wait for something."""
    observed.served.freeze(name)
    try:
        await asyncio.sleep(for_s)
    finally:
        observed.served.thaw(name)
    await observed.expect(alert)


async def no_prefill_node(observed: ObservedDeployment) -> None:
    """The PrfaaS cluster is drained and the local prefill nodes die. Decode nodes would take their
    role, but have to finish their answers first."""
    served = observed.served
    prefills, decodes = await served.with_role("prefill"), await served.with_role("decode")
    async with observed.streams(decodes):
        returned = await cluster_drained(served, served.layout.clusters("prfaas")[0])
        for name in prefills:
            await served.kill(name)
        await observed.expect("PrfaasHomeDegraded")
        assert "PrfaasHomeUnserved" not in await observed.look(), "one decode node is enough"
    for name in prefills:
        await served.restart(name)
    await returned()
    await served.until(served.in_use)


async def a_node_that_dies(observed: ObservedDeployment) -> None:
    decodes = await observed.served.with_role("decode")
    async with observed.streams(decodes):
        await observed.served.kill(decodes[0])
        await observed.expect("PrfaasNodeLost", "PrfaasRequestsFailing")
        await observed.until(f'ALERTS{{alertname="PrfaasNodeLost",node="{decodes[0]}"}}')


async def a_planner_that_dies(observed: ObservedDeployment) -> None:
    await observed.served.kill("gateway-0")
    await observed.expect("PrfaasNoPlanner")


# What was seen ------------------------------------------------------------------------------------


async def check_all_alerts(observed: ObservedDeployment) -> None:
    rules = await observed.prometheus.rules()
    assert {rule["name"] for rule in rules} == observed.fired.keys()
    assert all(rule["health"] == "ok" for rule in rules), rules
    for name, alerts in observed.fired.items():
        for alert in alerts:
            for text in alert["annotations"].values():
                assert "error expanding" not in text and "<no value>" not in text, (name, text)


async def check_all_queries(observed: ObservedDeployment) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    empty = []
    for panel, query in dashboard_queries(dashboard, RANGE_S):
        series = await observed.prometheus.query_range(query, observed.began, time.time(), SCRAPE_S)
        if not any(series):
            empty.append(f"{panel}: {query}")
    assert not empty, "\n".join(empty)
