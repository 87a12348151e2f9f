"""One deployment for all faults of a kind of engine: starting it takes longer than most of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from prfaas.faults.deployment import FaultDeployment, staged
from prfaas.faults.episode import Campaign, Seen
from prfaas.faults.fault_deployment import FireEngine, fire
from prfaas.faults.resource_usage import held, settled
from prfaas.launch.attached_process import tether
from tests.faults.report import written

T = TypeVar("T")
CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
LINK_SOCKETS = 3  # of each connection of a link: itself, and the pair that wakes its thread
EACH = 3  # long requests under way when a fault strikes, and as many short ones


@dataclass(frozen=True, slots=True)
class Fire:
    """A deployment, and the loop that its processes are watched on; it stands still between
    tests."""

    runner: asyncio.Runner
    stage: FaultDeployment
    campaign: Campaign
    folder: Path
    at_first: dict[str, int]  # sockets, when everything had been used once

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(test)


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest) -> Iterator[dict[str, list[Seen]]]:
    """By engine; `--report FILE` puts it into the file's table."""
    found: dict[str, list[Seen]] = {}
    yield found
    file: Path | None = request.config.getoption("--report")
    if file is not None:
        file.write_text(written(file.read_text(), found))


async def sockets(stage: FaultDeployment) -> dict[str, int]:
    """Of each process, without those of links between kvds.

    A kvd has a link to every kvd that it has ever sent to: the first hand-off to a host that stands
    in for another one makes one more, and their connections close when they have been idle.
    """
    found = {name: one.sockets for name, one in held(stage.processes).items()}
    for name in stage.names:
        links = (await stage.stats(name))["links"]
        assert len(links) < len(stage.names), "at most one to each other host"
        found[f"kvd-{name}"] -= LINK_SOCKETS * sum(link["connections"] for link in links)
    return found


def burning(engine: FireEngine, folder: Path) -> Iterator[Fire]:
    ready, lengths = fire(engine, CASE_STUDY, folder, folder / "cache", print)
    # Not async fixtures and tests: the stage outlives a test, and with it its event loop, which is
    # that of the services.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        started = staged(ready.deployment, ready.engines, folder, tether(), print)
        stage = runner.run(started.__aenter__())
        try:
            campaign = Campaign(stage, lengths, EACH)
            runner.run(campaign.warm_up())
            runner.run(settled(stage))
            yield Fire(runner, stage, campaign, folder, runner.run(sockets(stage)))
        finally:
            runner.run(started.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def emulated_fire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fire]:
    yield from burning("emulated", tmp_path_factory.mktemp("emulated-fire"))


@pytest.fixture(scope="session")
def hf_fire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fire]:
    yield from burning("hf", tmp_path_factory.mktemp("hf-fire"))
