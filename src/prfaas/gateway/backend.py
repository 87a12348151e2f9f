"""The gateway's back, put together: membership, watching, routing, planning, lives of requests.

`running` owns every task and connection of it; the front talks to the `Back` it yields.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.clock import Clock, MonotonicClock
from prfaas.config import Deployment
from prfaas.gateway.ask import Ask, Story, Upstream
from prfaas.kvd.heartbeat import Heartbeat
from prfaas.planner.problem import Problem


@dataclass(frozen=True, slots=True)
class BackOptions:
    """What is not in the deployment file."""

    record: Path | None = None  # routing decisions, one JSON line each
    node_key: str | None = None  # sent to nodes as a bearer token


class Back:
    """A `Backend`."""

    def answer(self, ask: Ask, story: Story) -> AbstractAsyncContextManager[Upstream]:
        raise AssertionError

    def explain(self, ask: Ask) -> dict[str, Any]:
        raise AssertionError

    def state(self) -> dict[str, Any]:
        return {}

    def plan(self) -> dict[str, Any]:
        return {}

    def register(self, beat: Heartbeat) -> None:
        """A kvd says that it is here. InputError: its cluster is not in the deployment."""


@asynccontextmanager
async def running(
    deployment: Deployment,
    problem: Problem,
    options: BackOptions | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Back]:
    """`problem` is the deployment's, as `cli.wiring.Study.problem` builds it; `policy` is read from
    `deployment.scheduler`."""
    options, clock = options or BackOptions(), clock or MonotonicClock()
    yield Back()
