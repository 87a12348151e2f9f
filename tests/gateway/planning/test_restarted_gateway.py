"""A gateway process that is killed and started again: the kvds keep its plan and its operator's
orders."""

from __future__ import annotations

import math
from base64 import b64decode
from pathlib import Path
from typing import Any

import msgspec

from prfaas.contracts.gateway_api import SharedPlan
from tests.gateway.backends import FAR, HOME, MODEL, THRESHOLD, prompt
from tests.gateway.conftest import Hosts
from tests.gateway.processes import GatewayProcess, gateway_process
from tests.node.hosts import Host, call
from tests.waiting import wait_until


def order(gateway: GatewayProcess, cluster: str, *, drained: bool) -> Any:
    return gateway.ask("POST", "/prfaas/v1/drain", {"cluster": cluster, "drained": drained})


def route(gateway: GatewayProcess) -> Any:
    """Of a long prompt, which is prefilled far away where that is possible."""
    body = {"model": MODEL, "prompt": prompt(3 * THRESHOLD, "restarted"), "max_tokens": 2}
    return gateway.ask("POST", "/prfaas/v1/explain", body)["chosen"]


def are_in_use(gateway: GatewayProcess) -> bool:
    return (len(gateway.in_use(HOME)), len(gateway.in_use(FAR))) == (3, 1)


def kept_age_s(host: Host) -> float:
    """The age of the plan that the host's kvd keeps."""
    status, found = call("GET", f"{host.kvd_url}/v1/records?name=plan")
    if status != 200:
        return math.inf
    plan = msgspec.json.decode(b64decode(found["data"]), type=SharedPlan)
    return float(found["age_s"]) + plan.homes[HOME].age_s


def test_restarts_of_the_only_gateway_forget_neither_the_plan_nor_an_order(
    unassigned: Hosts, tmp_path: Path
) -> None:
    made = unassigned.deployment()
    with gateway_process(tmp_path, made) as first:
        wait_until(lambda: are_in_use(first))

        def is_kept() -> bool:
            age_s = first.state()["plan"]["age_s"]
            return all(abs(kept_age_s(host) - age_s) < 1.0 for host in unassigned.all)

        wait_until(is_kept)
        before = first.state()["plan"]
    with gateway_process(tmp_path, made) as second:
        wait_until(lambda: are_in_use(second))
        plan = second.state()["plan"]
        assert plan["age_s"] > before["age_s"], "it is the plan of the first one"
        for field in ("threshold_tokens", "roles", "shares", "instances", "reason"):
            assert plan[field] == before[field]
        assert route(second)["cluster"] == FAR
        answer = order(second, FAR, drained=True)
        assert answer == {"cluster": FAR, "drained": True, "kept": True}
        assert second.cluster(FAR)["order_kept"] and not second.in_use(FAR)
    with gateway_process(tmp_path, made) as third:
        wait_until(lambda: len(third.in_use(HOME)) == 3)
        assert third.cluster(FAR)["drained"] and not third.in_use(FAR)
        assert route(third)["cluster"] == HOME
        assert order(third, FAR, drained=False)["kept"]
        wait_until(lambda: len(third.in_use(FAR)) == 1)
        assert third.state()["plan"]["threshold_tokens"] == THRESHOLD
    changed = unassigned.deployment(threshold_tokens=2 * THRESHOLD)
    with gateway_process(tmp_path, changed) as fourth:
        wait_until(lambda: are_in_use(fourth))
        assert not fourth.cluster(FAR)["drained"]
        wait_until(lambda: route(fourth)["cluster"] == FAR)
        message = "a plan for another deployment file is not followed"
        assert fourth.state()["plan"]["threshold_tokens"] == 2 * THRESHOLD, message
