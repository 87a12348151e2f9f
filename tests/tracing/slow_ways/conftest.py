from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop

from tests.tracing.slow_ways.deployment import SlowHosts, slow_hosts


@dataclass(frozen=True, slots=True)
class Stage:
    """Running hosts, and the event loop that watches their processes. The loop runs only during
    tests."""

    runner: asyncio.Runner
    hosts: SlowHosts

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        self.runner.run(test)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("slow")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        context = slow_hosts(folder)
        hosts = runner.run(context.__aenter__())
        try:
            yield Stage(runner, hosts)
        finally:
            runner.run(context.__aexit__(None, None, None))
