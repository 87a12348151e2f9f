"""The long-term loop over live nodes: what it has seen changes threshold and roles, or advice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.clock import MonotonicClock
from prfaas.config.deployment import Deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.planning.plan_history import PlanHistory
from prfaas.launch.scaling import scaled_catalog
from prfaas.scheduler.plan import Role
from prfaas.types import NodeId
from tests.gateway.backends import (
    HOME,
    THRESHOLD,
    answered,
    gateway_request,
    problem,
    prompt,
    serving,
    until,
    with_role,
)
from tests.gateway.conftest import EMULATED, Hosts, on_accelerators
from tests.gateway.fleets import PD
from tests.node.hosts import running_hosts

SOON = {"every_s": 0.2, "warmup_s": 0.0, "block_requests": 50, "dwell_s": 0.0}
SLOWER, TOKENS = 1.5, THRESHOLD


def free(made: Deployment, *, advise: bool) -> Deployment:
    """Threshold and split are the planner's to choose."""
    replace = msgspec.structs.replace
    clusters = [replace(cluster, prefill=None, decode=None) for cluster in made.clusters]
    section = replace(made.gateway, advise=advise)
    rules = replace(made.scheduler, threshold_tokens=None)
    return replace(made, clusters=clusters, gateway=section, scheduler=rules)


def chatter(backend: GatewayBackend) -> None:
    """Short prompts with long answers have been served: work for decode nodes."""
    for number in range(200):
        tokens = 300 + 7 * (number % 50)
        backend.dispatcher.traffic.observe(PD, MonotonicClock().now(), tokens, 0, 4000, 0.1)


def metric(backend: GatewayBackend, name: str) -> list[float]:
    return [s.value for m in backend.metrics() for s in m.samples if s.name == name]


def node(backend: GatewayBackend, name: str) -> dict[str, Any]:
    clusters = backend.state()["clusters"]
    return next(n for c in clusters for n in c["nodes"] if n["node"] == name)


async def test_threshold_and_roles_follow_the_traffic_and_show(
    unassigned: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = free(unassigned.deployment(replan=SOON), advise=False)

    async with serving(made) as backend:
        before = backend.plan()
        prefilling = with_role(backend, "prefill")
        listed = PlanHistory.record_conversion
        at_once: list[bool] = []

        def record(history: PlanHistory, name: NodeId, role: Role, at_s: float) -> None:
            at_once.append(name in with_role(backend, role))
            listed(history, name, role, at_s)

        monkeypatch.setattr(PlanHistory, "record_conversion", record)
        chatter(backend)
        await until(lambda: backend.state()["conversions"] != [])
        assert all(at_once), "a change is listed with its new role in force"
        state = backend.state()
        seen = state["traffic"]
        assert seen["requests"] == 200 and seen["output_tokens"] == 4000
        assert seen["wait_s"] == pytest.approx(0.1)
        done = state["conversions"][0]
        assert done["node"] in prefilling and done["role"] == "decode"
        assert done["node"] in with_role(backend, "decode")
        assert node(backend, done["node"])["becomes"] is None
        assert state["advice"] is None
        assert [plan["roles"] for plan in state["plans"]][0] == before["roles"]
        assert state["plans"][-1]["roles"] == backend.plan()["roles"] != before["roles"]
        assert backend.plan()["threshold_tokens"] != before["threshold_tokens"]
        assert f"{done['node']} to decode" in state["plans"][1]["reason"]
        assert metric(backend, "prfaas_gateway_plans_total")[0] >= 2
        assert sum(metric(backend, "prfaas_gateway_conversions_total")) >= 1


async def test_advice_is_said_and_not_followed(
    unassigned: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="prfaas.gateway.planning.plan_history")
    made = free(unassigned.deployment(replan=SOON), advise=True)

    async with serving(made) as backend:
        before = backend.plan()
        chatter(backend)
        await until(lambda: backend.state()["advice"] is not None)
        advice = backend.state()["advice"]
        assert list(advice["roles"].values()).count("prefill") < len(with_role(backend, "prefill"))
        assert metric(backend, "prfaas_gateway_advice_threshold_tokens") == [
            advice["threshold_tokens"]
        ]
        first_s = advised_s(backend)
        await until(lambda: advised_s(backend) > first_s + SOON["every_s"] / 2)  # found again
        after = backend.plan()
        assert (after["roles"], after["threshold_tokens"]) == (
            before["roles"],
            before["threshold_tokens"],
        )
        assert len(backend.state()["plans"]) == 1 and not backend.state()["conversions"]
    said = [message for message in caplog.messages if message.startswith("advice")]
    assert len(said) == 1 and "to decode" in said[0]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Hosts]:
    """Hosts at the pace of their accelerators."""
    with running_hosts(tmp_path, on_accelerators(EMULATED, home=2)) as hosts:
        yield Hosts(tmp_path, hosts[:2], hosts[2:])


@pytest.mark.slow
async def test_predictions_follow_nodes_that_are_slower_than_their_profile(
    slow: Hosts, tmp_path: Path
) -> None:
    """The gateway is given a profile that is too fast; what explain predicts comes to what nodes
    take. How near it comes on an idle machine is the business of `bench/agree.py`."""
    stated = slow.deployment()
    file = tmp_path / "catalog.toml"
    scales = Scales(time=1 / SLOWER)
    file.write_text(scaled_catalog(stated.model.name, [problem(stated)], scales))
    made = msgspec.structs.replace(stated, catalog=[str(file)])

    async with serving(made) as backend:
        first = predicted(backend)
        ttfts_s: list[float] = []
        while pace(backend) == 1.0:
            assert len(ttfts_s) < 40, "enough to learn from"
            trace = (
                await answered(backend, gateway_request(prompt(TOKENS, len(ttfts_s)), 1))
            ).trace
            assert trace.first_token_s is not None
            ttfts_s.append(trace.first_token_s - trace.arrived_s)
        found = predicted(backend)
        assert found["prefill_s"] == pytest.approx(pace(backend) * first["prefill_s"])
        # At least what the engine takes, and no more than what requests took: calls and threads
        # come on top of the engine, on a busy machine much, also behind the first token.
        assert 0.95 * SLOWER * first["prefill_s"] < found["prefill_s"] < 2 * max(ttfts_s)
        assert metric(backend, "prfaas_gateway_prefill_pace_ratio")[0] == pace(backend)


def advised_s(backend: GatewayBackend) -> float:
    state = backend.state()
    made_s: float = state["up_s"] - state["advice"]["age_s"]
    return made_s


def pace(backend: GatewayBackend) -> float:
    return next(c["prefill_pace"] for c in backend.state()["clusters"] if c["cluster"] == HOME)


def predicted(backend: GatewayBackend) -> dict[str, Any]:
    """Prefilled at home."""
    options = backend.explain(gateway_request(prompt(TOKENS, 10_000)))["alternatives"]
    return next(option for option in options if option["cluster"] == HOME)
