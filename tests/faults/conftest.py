"""One deployment for all faults with an engine, because its start takes longer than a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from prfaas.launch.attached_process import attached_prefix
from prfaas_lab.faults.deployment import FaultDeployment, launched_fault_deployment
from prfaas_lab.faults.episode import Campaign, FaultResult
from prfaas_lab.faults.preparation import FaultEngine, prepare_fault_deployment
from prfaas_lab.faults.resource_usage import measure_usage, wait_until_idle
from tests.faults.report import written

T = TypeVar("T")
CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
# Of each connection of a link, in its kvd: itself, the pair that wakes its thread, and the socket
# to the worker that moves its bytes. The worker has the other end, and the connection, too.
LINK_SOCKETS, WORKER_SOCKETS = 4, 2
EACH = 3  # long requests under way when a fault strikes, and as many short ones


@dataclass(frozen=True, slots=True)
class FaultSetup:
    """A running deployment and the event loop that watches its processes. The loop runs only during
    tests."""

    runner: asyncio.Runner
    deployment: FaultDeployment
    campaign: Campaign
    folder: Path
    at_first: dict[str, int]  # sockets of each process after the warm-up

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(test)


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest) -> Iterator[dict[str, list[FaultResult]]]:
    """Results by engine. `--report FILE` writes them into the table of FILE."""
    found: dict[str, list[FaultResult]] = {}
    yield found
    file: Path | None = request.config.getoption("--report")
    if file is not None:
        file.write_text(written(file.read_text(), found))


async def sockets(deployment: FaultDeployment) -> dict[str, int]:
    """Sockets of each process, without those of links between kvds.

    A kvd has a link to every kvd that it has ever sent to. The first hand-off to another host opens
    one more link, and the connections of a link close when they have been idle.
    """
    found = {name: one.sockets for name, one in measure_usage(deployment.processes).items()}
    for name in deployment.names:
        links = (await deployment.stats(name))["links"]
        assert len(links) < len(deployment.names), "at most one to each other host"
        connections = sum(link["connections"] for link in links)
        found[f"kvd-{name}"] -= LINK_SOCKETS * connections
        found[f"worker-{name}-0"] -= WORKER_SOCKETS * connections
    return found


def make_setup(engine: FaultEngine, folder: Path, file: Path = CASE_STUDY) -> Iterator[FaultSetup]:
    # Not async fixtures and tests: the deployment outlives a test, and so does the event loop that
    # watches its processes.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        preparing = prepare_fault_deployment(engine, file, folder, folder / "cache", print)
        ready, lengths = runner.run(preparing)
        started = launched_fault_deployment(
            ready.deployment, ready.engines, folder, attached_prefix(), print
        )
        deployment = runner.run(started.__aenter__())
        try:
            campaign = Campaign(deployment, lengths, EACH)
            runner.run(campaign.warm_up())
            runner.run(wait_until_idle(deployment))
            yield FaultSetup(runner, deployment, campaign, folder, runner.run(sockets(deployment)))
        finally:
            runner.run(started.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def emulated_setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultSetup]:
    yield from make_setup("emulated", tmp_path_factory.mktemp("emulated-setup"))


@pytest.fixture(scope="session")
def hf_setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultSetup]:
    yield from make_setup("hf", tmp_path_factory.mktemp("hf-setup"))
