"""A node that changes its role or leaves: its hot prefixes are at another one by then."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from prfaas.gateway.backend import GatewayBackend
from prfaas.types import NodeId
from tests.gateway.backends import in_use, is_clean, moved, prompt, serving, until, with_role
from tests.gateway.conftest import Hosts
from tests.gateway.fleets import PD
from tests.gateway.hot import SHARED_TOKENS, Crowd, deployment


def other(backend: GatewayBackend, name: str) -> str:
    (found,) = set(with_role(backend, "prefill")) - {name}
    return found


def running(backend: GatewayBackend, name: str) -> int:
    """Requests at that engine, as it last said."""
    (found,) = [node for node in in_use(backend) if node["node"] == name]
    requests: int = found["running"]
    return requests


@pytest.mark.slow
async def test_before_a_node_changes_its_role(
    unassigned: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas.gateway")

    async with serving(deployment(unassigned, replicate=False)) as backend:
        crowd = Crowd(unassigned, backend, "converting")
        holder = await crowd.warm()
        name = holder.stats()["node"]
        keeper = unassigned.named(other(backend, name))
        (decodes,) = with_role(backend, "decode")
        plan = backend.router.plans[PD]
        assert crowd.held_by(keeper) == 0
        swapped = {**plan.roles, NodeId(name): "decode", NodeId(decodes): "prefill"}
        backend.router.follow({PD: replace(plan, roles=swapped)})
        await until(lambda: name in with_role(backend, "decode"))
        assert moved(backend, "evacuate") == (1, 0)
        assert crowd.held_by(keeper) == SHARED_TOKENS
        await until(lambda: len(with_role(backend, "prefill")) == 2)
        hits = keeper.hit_tokens()
        assert await crowd.send() == keeper.stats()["node"]
        assert keeper.hit_tokens() - hits == SHARED_TOKENS
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(unassigned.wait_until_idle)
    said = [record.getMessage() for record in caplog.records]
    (saved,) = [at for at, line in enumerate(said) if line.startswith("evacuate:")]
    assert f"{name}: prefill, in use" in said[:saved], "first the copy, ..."
    assert f"{name}: prefill, not in use" in said[saved:], "... then the drain"


@pytest.mark.slow
async def test_when_it_is_told_to_stop(unassigned: Hosts) -> None:
    """It finishes what it has, and says so at /health: prefixes are saved meanwhile."""
    async with serving(deployment(unassigned, replicate=False)) as backend:
        crowd = Crowd(unassigned, backend, "leaving")
        holder = await crowd.warm()
        name = holder.stats()["node"]
        keeper = unassigned.named(other(backend, name))
        assert crowd.held_by(keeper) == 0
        busy = asyncio.create_task(
            asyncio.to_thread(holder.ask, prompt(70), max_tokens=100_000, ignore_eos=True)
        )
        try:
            await until(lambda: running(backend, name) > 0)
            holder.node.popen.send_signal(signal.SIGTERM)
            await until(lambda: moved(backend, "evacuate") == (1, 0))
            assert holder.node.popen.poll() is None, "it is still there"
            assert name not in [node["node"] for node in in_use(backend)]
            assert crowd.held_by(keeper) == SHARED_TOKENS
            hits = keeper.hit_tokens()
            assert await crowd.send() == keeper.stats()["node"]
            assert keeper.hit_tokens() - hits == SHARED_TOKENS
            await until(lambda: is_clean(backend))
        finally:
            holder.node.kill()
            await asyncio.wait([busy])
            busy.exception()  # its connection broke
            holder.begin_node()
            holder.wait_until_ready()
    await asyncio.to_thread(unassigned.wait_until_idle)
