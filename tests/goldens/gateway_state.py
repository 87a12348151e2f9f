"""The keys of what a gateway tells operators: its state and its plan, as JSON.

The gateway has just started and knows nothing of its nodes. Values are recorded by their types.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from prfaas.gateway.backend import running
from tests.goldens.canonical import Golden
from tests.goldens.metrics import small_deployment


def goldens() -> Iterator[Golden]:
    state, plan = asyncio.run(_state_and_plan())
    yield Golden("state.json", _shape(state))
    yield Golden("plan.json", _shape(plan))


async def _state_and_plan() -> tuple[dict[str, Any], dict[str, Any]]:
    deployment, problem = small_deployment()
    async with running(deployment, problem) as backend:
        return backend.state(), backend.plan()


def _shape(value: Any) -> Any:
    """A list has the shape of its first entry."""
    if isinstance(value, dict):
        return {str(key): _shape(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shape(inner) for inner in value[:1]]
    return "none" if value is None else type(value).__name__
