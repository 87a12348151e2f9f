"""Whole clusters and gateways of two by two clusters are struck with requests under way. Only those
fail whose gateway or decode node was killed, nothing is left behind, and every gateway offloads
long prompts again without help."""

from __future__ import annotations

from functools import partial

import pytest

from prfaas_lab.faults.catalogue import FAULTS, Fault
from prfaas_lab.faults.clusters.catalogue import (
    CLUSTER_FAULTS,
    cluster_drained,
    faults_of,
    is_drained,
)
from prfaas_lab.faults.deployment import FaultDeployment, planning_gateways
from tests.complaints import check_output
from tests.faults.conftest import EACH, FaultSetup

# Others strike the same parts, or drain the same way.
IN_GRID = ("follower-killed", "gateways-cut", "prfaas-cluster-drained")


def test_every_fault_has_a_name_of_its_own() -> None:
    names = [fault.name for fault in (*FAULTS, *CLUSTER_FAULTS)]
    assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.grid if one.name in IN_GRID else ())
        for one in CLUSTER_FAULTS
    ],
)
def test_emulated(two_by_two: FaultSetup, fault: Fault) -> None:
    assert fault in faults_of(len(two_by_two.deployment.layout.homes))
    found = two_by_two.run(two_by_two.campaign.run(fault))
    assert found.unexcused == [] and sum(found.verdicts.values()) == 2 * EACH
    logs = "\n".join(path.read_text() for path in two_by_two.folder.glob("*.log"))
    assert "Traceback" not in logs and "internal_error" not in logs
    check_output(logs)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", ["north", "east"])
def test_a_drained_cluster_is_out_of_use_until_it_returns(
    two_by_two: FaultSetup, cluster: str
) -> None:
    deployment = two_by_two.deployment

    async def main() -> None:
        mend = await cluster_drained(deployment, cluster)
        try:
            await deployment.until(partial(is_out_of_use, deployment, cluster))
        finally:
            await mend()
        for gateway in range(len(deployment.gateways)):
            assert not await is_drained(deployment, gateway, cluster)
        await deployment.until(deployment.in_use)

    two_by_two.run(main())


async def is_out_of_use(deployment: FaultDeployment, cluster: str) -> bool:
    nodes = set(deployment.layout.nodes_of(cluster))
    gateways = range(len(deployment.gateways))
    return all(
        [
            await is_drained(deployment, gateway, cluster)
            and not nodes & await deployment.used_by(gateway)
            for gateway in gateways
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_gateway_plans_while_the_one_that_did_is_gone(two_by_two: FaultSetup) -> None:
    deployment = two_by_two.deployment

    async def main() -> None:
        await deployment.until(deployment.in_use)
        (lost,) = await planning_gateways(deployment)
        (other,) = (n for n, name in enumerate(deployment.gateways) if name != lost)
        before = (await deployment.state(other))["planner"]

        async def plans() -> bool:
            return bool((await deployment.state(other))["planner"]["here"])

        await deployment.kill(lost)
        try:
            await deployment.until(plans)
            assert (await deployment.state(other))["planner"]["epoch"] > before["epoch"]
        finally:
            await deployment.restart(lost)
        await deployment.until(deployment.in_use)

    two_by_two.run(main())
