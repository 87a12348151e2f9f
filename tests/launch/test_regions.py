"""Two PD clusters that share two PrfaaS clusters, as processes: each link has its own relay."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.cli.drain import DrainClient
from prfaas.clock import MonotonicClock
from prfaas.config import load_deployment
from prfaas.demo.shared import RelayReader, with_policy
from prfaas.engine.emulated.pace import Scales
from prfaas.gateway.generation import CLUSTER_HEADER
from prfaas.http_client.client import open_client
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import RunningDeployment, launched_gateway, launched_hosts
from prfaas.launch.preparation import LaunchOptions, LaunchPlan, prepare_launch
from prfaas.launch.request_outcomes import RequestOutcome, RequestOutcomes
from prfaas.measure.client import connect
from prfaas.measure.open_loop import RequestTemplate
from prfaas_lab.studies.regions_case import Link, carried_bytes
from tests.waiting import PATIENCE_S

TWO_BY_TWO = Path(__file__).parents[2] / "configs" / "two_by_two.toml"
INSTANCES = {"east": 2, "west": 2, "north": 1, "south": 1}
PROMPT = ",".join(str(n % 200) for n in range(3000)).encode()


def smallest(folder: Path) -> LaunchPlan:
    whole = with_policy(load_deployment(TWO_BY_TWO), "remote")
    clusters = [
        msgspec.structs.replace(cluster, gpus=8 * INSTANCES[cluster.name])
        for cluster in whole.clusters
    ]
    options = LaunchOptions("emulated", Scales(0.05, 0.002, 0.02))
    deployment = msgspec.structs.replace(whole, clusters=clusters)
    return prepare_launch(deployment, TWO_BY_TWO, options, folder)


@pytest.mark.slow  # it starts all clusters once more
async def test_one_gateway_for_all_sends_kv_over_the_links_of_each_home(tmp_path: Path) -> None:
    plan, reader = smallest(tmp_path), RelayReader()
    async with (
        launched_hosts(
            plan.deployment, plan.engines, tmp_path, attached_prefix(), on_line=reader.read_line
        ) as hosts,
        launched_gateway(hosts, plan.deployment, together=True) as live,
    ):
        assert set(live.gateway_urls) == {"east", "west"}
        assert len(set(live.gateway_urls.values())) == 1 and not live.deployment.gateways
        carried = await carried_bytes(hosts, reader)
        for home in ("east", "west"):
            headers = {CLUSTER_HEADER: home}
            async with connect(live.gateway_url, MonotonicClock(), headers=headers) as target:
                template = RequestTemplate(plan.deployment.model.name, salt=home)
                answer = await target.complete(template.body(PROMPT, 4), within_s=60.0)
            assert answer.error is None and answer.token_ids
            after = await carried_bytes(hosts, reader)
            assert used(carried, after) == {home}, "only links to its home have carried its KV"
            carried = after


def used(before: dict[Link, int], after: dict[Link, int]) -> set[str]:
    """The clusters to which links have carried KV, and not only the bytes of connections."""
    return {link[1] for link in after if after[link] - before[link] > 10_000}


@pytest.mark.slow
async def test_a_gateway_for_each_pd_cluster(tmp_path: Path) -> None:
    """Each serves its home, one of them plans, and both follow an order to drain."""
    plan, outcomes = smallest(tmp_path), RequestOutcomes()

    async def outcome_at(live: RunningDeployment, home: str, salt: str) -> RequestOutcome:
        async with connect(live.gateway_urls[home], MonotonicClock()) as target:
            template = RequestTemplate(plan.deployment.model.name, salt=salt)
            answer = await target.complete(template.body(PROMPT, 4), within_s=60.0)
        assert answer.error is None and answer.token_ids
        async with asyncio.timeout(PATIENCE_S):
            return await outcomes.of(answer.request_id)

    async with (
        launched_hosts(plan.deployment, plan.engines, tmp_path, attached_prefix()) as hosts,
        launched_gateway(hosts, plan.deployment, on_line=outcomes.read_line) as live,
    ):
        entries = {entry.cluster: entry.url for entry in live.deployment.gateways}
        assert live.gateway_urls == entries and len(set(entries.values())) == 2
        assert live.deployment.gateway.member_key_file == str(tmp_path / "member.key")
        for home in ("east", "west"):
            found = await outcome_at(live, home, home)
            assert found.outcome == "completed" and found.decode.startswith(f"{home}-")
        states = await live.states()
        assert len({state["planner"]["cluster"] for state in states.values()}) == 1
        assert [state["planner"]["here"] for state in states.values()].count(True) == 1

        await drain(live.gateway_urls["east"], "north")
        async with asyncio.timeout(PATIENCE_S):
            # Each look is a request to the gateway, which the next one waits for.
            while not is_drained((await live.states())["west"], "north"):
                pass
        found = await outcome_at(live, "west", "after the drain")
        assert found.outcome == "completed" and not found.prefill.startswith("north-")
    assert (tmp_path / "member.key").stat().st_mode & 0o777 == 0o600


async def drain(url: str, cluster: str) -> None:
    async with open_client() as http:
        order = DrainClient(http, url, cluster, MonotonicClock())
        await order.send(drained=True)
        found = await order.wait(PATIENCE_S, lambda _: None)
        assert found.finished


def is_drained(state: Mapping[str, Any], cluster: str) -> bool:
    return any(one["cluster"] == cluster and one["drained"] for one in state["clusters"])
