"""The long-term loop over live nodes: what it has seen changes threshold and roles, or advice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.catalog import Catalog
from prfaas.clock import MonotonicClock
from prfaas.config.deployment import Deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.gateway.backend import GatewayBackend
from prfaas.launch.scaling import scaled_catalog
from tests.gateway.backs import (
    HOME,
    THRESHOLD,
    answered,
    ask,
    problem,
    prompt,
    serving,
    until,
    with_role,
)
from tests.gateway.conftest import EMULATED, Hosts
from tests.node.hosts import Host

SOON = {"every_s": 0.2, "warmup_s": 0.0, "block_requests": 50, "dwell_s": 0.0}
SLOWER, TOKENS = 1.5, THRESHOLD


def free(made: Deployment, *, advise: bool) -> Deployment:
    """Threshold and split are the planner's to choose."""
    replace = msgspec.structs.replace
    clusters = [replace(cluster, prefill=None, decode=None) for cluster in made.clusters]
    section = replace(made.gateway, advise=advise)
    rules = replace(made.scheduler, threshold_tokens=None)
    return replace(made, clusters=clusters, gateway=section, scheduler=rules)


def chatter(back: GatewayBackend) -> None:
    """Short prompts with long answers have been served: work for decode nodes."""
    for number in range(200):
        tokens = 300 + 7 * (number % 50)
        back.dispatcher.traffic.observe(MonotonicClock().now(), tokens, 0, 4000, 0.1)


def metric(back: GatewayBackend, name: str) -> list[float]:
    return [s.value for m in back.metrics() for s in m.samples if s.name == name]


def node(back: GatewayBackend, name: str) -> dict[str, Any]:
    clusters = back.state()["clusters"]
    return next(n for c in clusters for n in c["nodes"] if n["node"] == name)


async def test_threshold_and_roles_follow_the_traffic_and_show(unassigned: Hosts) -> None:
    made = free(unassigned.deployment(replan=SOON), advise=False)

    async with serving(made) as back:
        before = back.plan()
        prefilling = with_role(back, "prefill")
        chatter(back)
        await until(lambda: back.state()["conversions"] != [])
        state = back.state()
        seen = state["traffic"]
        assert seen["requests"] == 200 and seen["output_tokens"] == 4000
        assert seen["wait_s"] == pytest.approx(0.1)
        done = state["conversions"][0]
        assert done["node"] in prefilling and done["role"] == "decode"
        assert done["node"] in with_role(back, "decode")
        assert node(back, done["node"])["becomes"] is None
        assert state["advice"] is None
        assert [plan["roles"] for plan in state["plans"]][0] == before["roles"]
        assert state["plans"][-1]["roles"] == back.plan()["roles"] != before["roles"]
        assert back.plan()["threshold_tokens"] != before["threshold_tokens"]
        assert f"{done['node']} to decode" in state["plans"][1]["reason"]
        assert metric(back, "prfaas_gateway_plans_total")[0] >= 2
        assert sum(metric(back, "prfaas_gateway_conversions_total")) >= 1


async def test_advice_is_said_and_not_followed(
    unassigned: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="prfaas.gateway.planning.plan_history")
    made = free(unassigned.deployment(replan=SOON), advise=True)

    async with serving(made) as back:
        before = back.plan()
        chatter(back)
        await until(lambda: back.state()["advice"] is not None)
        advice = back.state()["advice"]
        assert list(advice["roles"].values()).count("prefill") < len(with_role(back, "prefill"))
        assert metric(back, "prfaas_gateway_advice_threshold_tokens") == [
            advice["threshold_tokens"]
        ]
        first_s = advised_s(back)
        await until(lambda: advised_s(back) > first_s + SOON["every_s"] / 2)  # found again
        after = back.plan()
        assert (after["roles"], after["threshold_tokens"]) == (
            before["roles"],
            before["threshold_tokens"],
        )
        assert len(back.state()["plans"]) == 1 and not back.state()["conversions"]
    said = [message for message in caplog.messages if message.startswith("advice")]
    assert len(said) == 1 and "to decode" in said[0]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Hosts]:
    """Hosts at the pace of their accelerators."""
    near, far = ((*EMULATED, "--accelerator", name) for name in ("h20", "h200"))
    home = [Host(tmp_path / f"home{i}", near, ("--node", f"home{i}")) for i in range(2)]
    hosts = Hosts(tmp_path, home, [Host(tmp_path / "far", far, ("--node", "far0"))])
    try:
        yield hosts
    finally:
        for host in hosts.all:
            host.close()


async def test_predictions_follow_nodes_that_are_slower_than_their_profile(
    slow: Hosts, tmp_path: Path
) -> None:
    """The gateway is given a profile that is too fast; what explain predicts comes to what nodes
    take. How near it comes on an idle machine is the business of `prfaas bench agree`."""
    stated = slow.deployment()
    file = tmp_path / "catalog.toml"
    spec = problem(stated).spec
    file.write_text(scaled_catalog(stated, Catalog.builtin(), spec, Scales(time=1 / SLOWER)))
    made = msgspec.structs.replace(stated, catalog=[str(file)])

    async with serving(made) as back:
        first = predicted(back)
        ttfts_s: list[float] = []
        while pace(back) == 1.0:
            assert len(ttfts_s) < 40, "enough to learn from"
            story = (await answered(back, ask(prompt(TOKENS, len(ttfts_s)), 1))).story
            assert story.first_token_s is not None
            ttfts_s.append(story.first_token_s - story.arrived_s)
        found = predicted(back)
        assert found["prefill_s"] == pytest.approx(pace(back) * first["prefill_s"])
        # At least what the engine takes, and no more than what requests took: calls and threads
        # come on top of the engine, on a busy machine much, also behind the first token.
        assert 0.95 * SLOWER * first["prefill_s"] < found["prefill_s"] < 2 * max(ttfts_s)
        assert metric(back, "prfaas_gateway_prefill_pace")[0] == pace(back)


def advised_s(back: GatewayBackend) -> float:
    state = back.state()
    made_s: float = state["up_s"] - state["advice"]["age_s"]
    return made_s


def pace(back: GatewayBackend) -> float:
    return next(c["prefill_pace"] for c in back.state()["clusters"] if c["cluster"] == HOME)


def predicted(back: GatewayBackend) -> dict[str, Any]:
    """Prefilled at home."""
    options = back.explain(ask(prompt(TOKENS, 10_000)))["alternatives"]
    return next(option for option in options if option["cluster"] == HOME)
