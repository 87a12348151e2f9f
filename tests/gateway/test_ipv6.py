"""A deployment whose services listen on IPv6 addresses."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from prfaas.contracts.readiness import GatewayReady, KvdReady, NodeReady
from tests.gateway.backends import MODEL, THRESHOLD, deployment, prompt, written
from tests.gateway.conftest import QUICK
from tests.node.hosts import Process, call
from tests.waiting import wait_until


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback address; containers often have none."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_long_prompt_is_handed_off_over_ipv6(tmp_path: Path) -> None:
    with ExitStack() as stack:

        def start(*arguments: str) -> Process:
            process = Process(*arguments)
            stack.callback(process.kill)
            return process

        nodes, kvds = [], []
        for name, accelerator in (("home0", "h20"), ("home1", "h20"), ("far0", "h200")):
            path = str(tmp_path / f"{name}.sock")
            addresses = ("--listen", "[::1]:0", "--http", "[::1]:0")
            kvd = start("kvd", "--socket", path, "--node", name, *addresses)
            kvds.append(kvd.ready(KvdReady))
            options = ("--kvd", path, "--kvd-url", kvds[-1].http, "--accelerator", accelerator)
            nodes.append(start("node", *QUICK, *options, "--host", "::1"))
        assert all(kvd.data.startswith("[::1]:") for kvd in kvds)
        urls = [node.ready(NodeReady).http for node in nodes]
        assert all(url.startswith("http://[::1]:") for url in urls)
        listed = [{"url": url, "kvd_url": kvd.http} for url, kvd in zip(urls, kvds, strict=True)]
        raw = msgspec.to_builtins(deployment(listed[:2], listed[2:]))
        raw["gateway"] = {"host": "::1", "port": 0}
        gateway = start("gateway", str(written(raw, tmp_path / "deployment.toml")))
        url = gateway.ready(GatewayReady).http
        assert url.startswith("http://[::1]:")

        def all_in_use() -> bool:
            clusters = call("GET", f"{url}/prfaas/v1/state")[1]["clusters"]
            return all(node.get("in_use") for cluster in clusters for node in cluster["nodes"])

        wait_until(all_in_use)
        body = {"model": MODEL, "prompt": prompt(2 * THRESHOLD), "max_tokens": 2}
        status, answer = call("POST", f"{url}/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 2
        arrivals = [call("GET", f"{kvd.http}/v1/stats")[1]["arrivals"] for kvd in kvds]
        assert sum(counters["committed"] for counters in arrivals) == 1
