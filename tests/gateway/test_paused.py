"""A gateway that is stopped for a while, as by the migration of its virtual machine."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gateway.backends import MODEL, deployment, node, prompt
from tests.gateway.conftest import EMULATED, on_accelerators
from tests.gateway.processes import gateway_process
from tests.node.hosts import call, running_hosts
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

PAUSE_S = 15.0  # ten times `silent_s`, and more than `hung_s`
TOKENS = 900  # they are decoded for longer than the pause


def test_a_pause_of_the_gateway_is_not_taken_for_the_silence_of_its_nodes(tmp_path: Path) -> None:
    with running_hosts(tmp_path, on_accelerators(EMULATED, home=2)) as hosts:
        made = deployment([node(h) for h in hosts[:2]], [node(hosts[2])])
        with gateway_process(tmp_path, made) as gateway:

            def complete(seed: int) -> int:
                """A request that waits for its first token when the gateway is stopped."""
                body = {"model": MODEL, "prompt": prompt(2000, seed), "max_tokens": 4}
                return call("POST", f"{gateway.url}/v1/completions", body)[0]

            gateway.wait_until_all_in_use()
            started = len(gateway.output)
            # With its ids, each token is an event of its own.
            body = {"model": MODEL, "prompt": prompt(200), "max_tokens": TOKENS}
            body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
            request = urllib.request.Request(
                f"{gateway.url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with (
                ThreadPoolExecutor(8) as threads,
                urllib.request.urlopen(request, timeout=PATIENCE_S) as stream,
            ):
                assert stream.readline().startswith(b"data: ")
                waiting = [threads.submit(complete, seed) for seed in range(8)]
                wait_until(lambda: gateway.state()["requests"]["in_flight"] > 1)
                gateway.popen.send_signal(signal.SIGSTOP)
                time.sleep(PAUSE_S)  # the fault itself
                gateway.popen.send_signal(signal.SIGCONT)
                assert [one.result(PATIENCE_S) for one in waiting] == [200] * 8
                rest = stream.read()
            assert rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest, rest[-500:]
            log = gateway.output[started:]
            assert "silent" not in log and "not in use" not in log, log
            assert gateway.state()["retries"]["spent"] == 0
            assert len(gateway.in_use()) == len(hosts)
