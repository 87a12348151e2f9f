"""A node that changes its role or leaves: its hot prefixes are at another one by then."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import pytest

from prfaas.gateway.backend import GatewayBackend
from prfaas.types import NodeId
from tests.gateway.backs import in_use, is_clean, moved, prompt, serving, until, with_role
from tests.gateway.conftest import Hosts
from tests.gateway.hot import SHARED_TOKENS, Crowd, deployment


def other(back: GatewayBackend, name: str) -> str:
    (found,) = set(with_role(back, "prefill")) - {name}
    return found


def running(back: GatewayBackend, name: str) -> int:
    """Requests at that engine, as it last said."""
    (found,) = [node for node in in_use(back) if node["node"] == name]
    requests: int = found["running"]
    return requests


async def test_before_a_node_changes_its_role(
    unassigned: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas.gateway")

    async with serving(deployment(unassigned, replicate=False)) as back:
        crowd = Crowd(unassigned, back, "converting")
        holder = await crowd.warm()
        name = holder.stats()["node"]
        keeper = unassigned.named(other(back, name))
        (decodes,) = with_role(back, "decode")
        plan = back.router.plan
        assert plan is not None and crowd.held_by(keeper) == 0
        swapped = {**plan.roles, NodeId(name): "decode", NodeId(decodes): "prefill"}
        back.router.follow(replace(plan, roles=swapped))
        await until(lambda: name in with_role(back, "decode"))
        assert moved(back, "evacuate") == (1, 0)
        assert crowd.held_by(keeper) == SHARED_TOKENS
        await until(lambda: len(with_role(back, "prefill")) == 2)
        hits = keeper.hit_tokens()
        assert await crowd.ask() == keeper.stats()["node"]
        assert keeper.hit_tokens() - hits == SHARED_TOKENS
        await until(lambda: is_clean(back))
    await asyncio.to_thread(unassigned.wait_until_idle)
    said = [record.getMessage() for record in caplog.records]
    (saved,) = [at for at, line in enumerate(said) if line.startswith("evacuate:")]
    assert f"{name}: prefill, in use" in said[:saved], "first the copy, ..."
    assert f"{name}: prefill, not in use" in said[saved:], "... then the drain"


async def test_when_it_is_told_to_stop(unassigned: Hosts) -> None:
    """It finishes what it has, and says so at /health: prefixes are saved meanwhile."""
    async with serving(deployment(unassigned, replicate=False)) as back:
        crowd = Crowd(unassigned, back, "leaving")
        holder = await crowd.warm()
        name = holder.stats()["node"]
        keeper = unassigned.named(other(back, name))
        assert crowd.held_by(keeper) == 0
        busy = asyncio.create_task(
            asyncio.to_thread(holder.ask, prompt(70), max_tokens=100_000, ignore_eos=True)
        )
        try:
            await until(lambda: running(back, name) > 0)
            holder.node.popen.send_signal(signal.SIGTERM)
            await until(lambda: moved(back, "evacuate") == (1, 0))
            assert holder.node.popen.poll() is None, "it is still there"
            assert name not in [node["node"] for node in in_use(back)]
            assert crowd.held_by(keeper) == SHARED_TOKENS
            hits = keeper.hit_tokens()
            assert await crowd.ask() == keeper.stats()["node"]
            assert keeper.hit_tokens() - hits == SHARED_TOKENS
            await until(lambda: is_clean(back))
        finally:
            holder.node.kill()
            await asyncio.wait([busy])
            busy.exception()  # its connection broke
            holder.begin_node()
            holder.wait_until_ready()
    await asyncio.to_thread(unassigned.wait_until_idle)
