"""A gateway that is stopped for a while, as by the migration of its virtual machine."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest

from prfaas.contracts.readiness import GatewayReady
from tests.gateway.backends import MODEL, deployment, node, prompt, written
from tests.gateway.conftest import EMULATED
from tests.node.hosts import Host, Process, call
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

HUNG_S = 2.0
TOKENS = 600  # they are decoded for longer than the pause


def test_a_pause_of_the_gateway_is_not_taken_for_the_silence_of_its_nodes(tmp_path: Path) -> None:
    options = (*EMULATED, "--accelerator", "h20")
    hosts = [Host(tmp_path / f"h{n}", options, ("--node", f"h{n}")) for n in range(3)]
    try:
        raw = msgspec.to_builtins(deployment([node(h) for h in hosts[:2]], [node(hosts[2])]))
        raw["gateway"] = {"port": 0, "timeouts": {"hung_s": HUNG_S, "unresponsive_s": HUNG_S / 2}}
        gateway = Process("gateway", str(written(raw, tmp_path / "deployment.toml")))
        try:
            url = gateway.ready(GatewayReady).http

            def all_in_use() -> bool:
                clusters = call("GET", f"{url}/prfaas/v1/state")[1]["clusters"]
                return all(n.get("in_use") for cluster in clusters for n in cluster["nodes"])

            wait_until(all_in_use)
            # With its ids, each token is an event of its own.
            body = {"model": MODEL, "prompt": prompt(200), "max_tokens": TOKENS}
            body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as stream:
                assert stream.readline().startswith(b"data: ")
                gateway.popen.send_signal(signal.SIGSTOP)
                time.sleep(3 * HUNG_S)  # the fault itself
                gateway.popen.send_signal(signal.SIGCONT)
                rest = stream.read()
            assert rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest, rest[-500:]
            assert "has been silent" not in gateway.output
        finally:
            gateway.kill()
    finally:
        for host in hosts:
            host.close()
