"""A gateway process that is killed and started again: the kvds keep its plan and its operator's
orders."""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from prfaas.contracts.gateway_api import SharedPlan
from prfaas.contracts.readiness import GatewayReady
from tests.gateway.backends import FAR, HOME, MODEL, THRESHOLD, prompt, written
from tests.gateway.conftest import Hosts
from tests.node.hosts import Host, Process, call
from tests.waiting import wait_until


class Started:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = process.ready(GatewayReady).http

    def state(self) -> Any:
        status, found = call("GET", f"{self.url}/prfaas/v1/state")
        assert status == 200
        return found

    def cluster(self, name: str) -> Any:
        (found,) = [one for one in self.state()["clusters"] if one["cluster"] == name]
        return found

    def in_use(self, name: str) -> int:
        return sum(bool(node.get("in_use")) for node in self.cluster(name)["nodes"])

    def order(self, cluster: str, *, drained: bool) -> Any:
        body = {"cluster": cluster, "drained": drained}
        status, found = call("POST", f"{self.url}/prfaas/v1/drain", body)
        assert status == 200
        return found

    def route(self) -> Any:
        """Of a long prompt, which is prefilled far away where that is possible."""
        body = {"model": MODEL, "prompt": prompt(3 * THRESHOLD, "restarted"), "max_tokens": 2}
        status, found = call("POST", f"{self.url}/prfaas/v1/explain", body)
        assert status == 200
        return found["chosen"]


@contextmanager
def gateway(file: Path) -> Iterator[Started]:
    """It is killed at the end, if it still runs."""
    process = Process("gateway", str(file))
    try:
        yield Started(process)
    finally:
        process.kill()


def test_a_restart_of_the_only_gateway_forgets_no_order(unassigned: Hosts, tmp_path: Path) -> None:
    raw = {**msgspec.to_builtins(unassigned.deployment()), "gateway": {"port": 0}}
    file = written(raw, tmp_path / "d.toml")
    with gateway(file) as first:
        wait_until(lambda: (first.in_use(HOME), first.in_use(FAR)) == (3, 1))
        assert first.route()["cluster"] == FAR
        answer = first.order(FAR, drained=True)
        assert answer == {"cluster": FAR, "drained": True, "kept": True}
        assert first.cluster(FAR)["order_kept"] and first.in_use(FAR) == 0
    with gateway(file) as second:
        wait_until(lambda: second.in_use(HOME) == 3)
        assert second.cluster(FAR)["drained"] and second.in_use(FAR) == 0
        assert second.route()["cluster"] == HOME
        assert second.order(FAR, drained=False)["kept"]
        wait_until(lambda: second.in_use(FAR) == 1)
    with gateway(file) as third:
        wait_until(lambda: (third.in_use(HOME), third.in_use(FAR)) == (3, 1))
        assert not third.cluster(FAR)["drained"]
        wait_until(lambda: third.route()["cluster"] == FAR)


def test_a_restart_of_the_only_gateway_does_not_forget_the_plan(
    unassigned: Hosts, tmp_path: Path
) -> None:
    raw = {**msgspec.to_builtins(unassigned.deployment()), "gateway": {"port": 0}}
    file = written(raw, tmp_path / "d.toml")
    with gateway(file) as first:
        wait_until(lambda: (first.in_use(HOME), first.in_use(FAR)) == (3, 1))

        def is_kept() -> bool:
            age_s = first.state()["plan"]["age_s"]
            return all(abs(kept_age_s(host) - age_s) < 1.0 for host in unassigned.all)

        wait_until(is_kept)
        before = first.state()["plan"]
    with gateway(file) as second:
        wait_until(lambda: (second.in_use(HOME), second.in_use(FAR)) == (3, 1))
        plan = second.state()["plan"]
        assert plan["age_s"] > before["age_s"], "it is the plan of the first one"
        for field in ("threshold_tokens", "roles", "shares", "instances", "reason"):
            assert plan[field] == before[field]


def kept_age_s(host: Host) -> float:
    """The age of the plan that the host's kvd keeps."""
    status, found = call("GET", f"{host.kvd_url}/v1/records?name=plan")
    if status != 200:
        return math.inf
    plan = msgspec.json.decode(b64decode(found["data"]), type=SharedPlan)
    return float(found["age_s"]) + plan.homes[HOME].age_s


def test_a_plan_for_another_deployment_file_is_not_followed(
    unassigned: Hosts, tmp_path: Path
) -> None:
    raw = {**msgspec.to_builtins(unassigned.deployment()), "gateway": {"port": 0}}
    file = written(raw, tmp_path / "d.toml")
    with gateway(file) as first:
        wait_until(lambda: first.in_use(HOME) == 3)
        assert first.state()["plan"]["threshold_tokens"] == THRESHOLD
    raw["scheduler"]["threshold_tokens"] = 2 * THRESHOLD
    written(raw, file)
    with gateway(file) as second:
        wait_until(lambda: second.in_use(HOME) == 3)
        assert second.state()["plan"]["threshold_tokens"] == 2 * THRESHOLD
