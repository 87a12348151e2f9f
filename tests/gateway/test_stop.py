"""The probes of a gateway, and how it stops: it is not ready any more, then it closes its port,
then its running responses end."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.descriptors import low_limit, soft_limit
from tests.gateway.backends import HOME, MODEL, deployment
from tests.gateway.conftest import Hosts
from tests.gateway.processes import gateway_process
from tests.node.hosts import call
from tests.waiting import wait_until

NOWHERE = [  # ports that no process listens on
    {"url": "http://127.0.0.1:1", "kvd_url": f"http://127.0.0.1:{port}"} for port in (2, 3, 4)
]
BODY = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2}


def test_a_gateway_without_nodes_is_live_and_not_ready(tmp_path: Path) -> None:
    with gateway_process(tmp_path, deployment(NOWHERE[:2], NOWHERE[2:])) as gateway:
        url = gateway.url
        status, found = call("GET", f"{url}/ready")
        assert status == 503 and not found["ready"]
        problem = f"{HOME} has no plan yet, and no node of {HOME} is in use: both are lost"
        assert found["reason"] == problem
        assert call("GET", f"{url}/live")[0] == 200


def test_a_gateway_may_open_as_many_descriptors_as_the_system_allows(tmp_path: Path) -> None:
    nodes = deployment(NOWHERE[:2], NOWHERE[2:])
    with low_limit() as hard, gateway_process(tmp_path, nodes) as gateway:
        assert gateway.url and soft_limit(gateway.popen.pid) == hard


def test_a_gateway_that_is_not_ready_any_more_still_takes_requests(
    emulated: Hosts, tmp_path: Path
) -> None:
    """A load balancer sends requests until it has noticed; these must succeed."""
    leave = ("--set", "gateway.timeouts.leave_s=600")
    with gateway_process(tmp_path, emulated.deployment(), "--advise", *leave) as gateway:
        url = gateway.url
        wait_until(lambda: call("GET", f"{url}/ready") == (200, {"ready": True, "reason": ""}))
        gateway.popen.terminate()
        wait_until(lambda: call("GET", f"{url}/ready")[0] == 503)
        assert call("GET", f"{url}/ready")[1]["reason"] == "this gateway is stopping"
        assert call("GET", f"{url}/live")[0] == 200
        assert call("POST", f"{url}/v1/completions", BODY)[0] == 200
        gateway.popen.send_signal(signal.SIGINT)  # it need not wait any longer
        assert gateway.wait() == 0
    emulated.wait_until_idle()
