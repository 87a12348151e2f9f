"""A gateway that is stopped for a while, as by the migration of its virtual machine."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.contracts.readiness import GatewayReady
from tests.gateway.backends import MODEL, deployment, node, prompt, written
from tests.gateway.conftest import EMULATED
from tests.node.hosts import Host, Process, call
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

PAUSE_S = 15.0  # ten times `silent_s`, and more than `hung_s`
TOKENS = 900  # they are decoded for longer than the pause


def test_a_pause_of_the_gateway_is_not_taken_for_the_silence_of_its_nodes(tmp_path: Path) -> None:
    options = (*EMULATED, "--accelerator", "h20")
    hosts = [Host(tmp_path / f"h{n}", options, ("--node", f"h{n}")) for n in range(3)]
    try:
        raw = msgspec.to_builtins(deployment([node(h) for h in hosts[:2]], [node(hosts[2])]))
        raw["gateway"] = {"port": 0}
        gateway = Process("gateway", str(written(raw, tmp_path / "deployment.toml")))
        try:
            url = gateway.ready(GatewayReady).http

            def state() -> dict[str, Any]:
                found: dict[str, Any] = call("GET", f"{url}/prfaas/v1/state")[1]
                return found

            def all_in_use() -> bool:
                nodes = [n for cluster in state()["clusters"] for n in cluster["nodes"]]
                return all(n.get("in_use") for n in nodes)

            def complete(seed: int) -> int:
                """A request that waits for its first token when the gateway is stopped."""
                body = {"model": MODEL, "prompt": prompt(2000, seed), "max_tokens": 4}
                return call("POST", f"{url}/v1/completions", body)[0]

            wait_until(all_in_use)
            started = len(gateway.output)
            # With its ids, each token is an event of its own.
            body = {"model": MODEL, "prompt": prompt(200), "max_tokens": TOKENS}
            body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with (
                ThreadPoolExecutor(8) as threads,
                urllib.request.urlopen(request, timeout=PATIENCE_S) as stream,
            ):
                assert stream.readline().startswith(b"data: ")
                waiting = [threads.submit(complete, seed) for seed in range(8)]
                wait_until(lambda: state()["requests"]["in_flight"] > 1)
                gateway.popen.send_signal(signal.SIGSTOP)
                time.sleep(PAUSE_S)  # the fault itself
                gateway.popen.send_signal(signal.SIGCONT)
                assert [one.result(PATIENCE_S) for one in waiting] == [200] * 8
                rest = stream.read()
            assert rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest, rest[-500:]
            log = gateway.output[started:]
            assert "silent" not in log and "not in use" not in log, log
            assert state()["retries"]["spent"] == 0 and all_in_use()
        finally:
            gateway.kill()
    finally:
        for host in hosts:
            host.close()
