"""The probes of a node, and how it stops: it is not ready any more, then it refuses requests, then
it ends."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prfaas.contracts.readiness import KvdReady, NodeReady
from tests.descriptors import low_limit, soft_limit
from tests.node.hosts import Process, call, text_of
from tests.waiting import wait_until

EMULATED = (
    *("--engine", "emulated", "--model", "case-study-1t", "--accelerator", "h20"),
    *("--set", "node.emulated.byte_scale=1e-4", "--set", "node.emulated.time_scale=0.02"),
)
BODY = {"prompt": [1], "max_tokens": 1}


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    running = Process(*arguments)
    try:
        yield running
    finally:
        if running.popen.poll() is None:
            running.kill()


@contextmanager
def node(*options: str) -> Iterator[tuple[Process, str]]:
    """A node that starts its kvd."""
    with process("node", *EMULATED, *options, "--", "--memory", "16MiB") as running:
        yield running, running.ready(NodeReady).http


def probe(url: str, name: str) -> tuple[int, Any]:
    return call("GET", f"{url}/{name}")


def test_a_node_is_ready_while_it_has_its_kvd(tmp_path: Path) -> None:
    socket = str(tmp_path / "kvd.sock")
    with process("kvd", "--socket", socket, "--memory", "16MiB") as kvd:
        kvd.ready(KvdReady)
        with process("node", *EMULATED, "--kvd", socket) as running:
            url = running.ready(NodeReady).http
            assert probe(url, "ready") == (200, {"ready": True, "reason": ""})
            assert probe(url, "live")[0] == 200
            kvd.kill()
            wait_until(lambda: probe(url, "ready")[0] == 503)
            status, found = probe(url, "ready")
            assert not found["ready"] and "kvd" in found["reason"]
            assert probe(url, "live")[0] == 200
            # Requests are served without a cache meanwhile, so gateways go on using the node.
            assert call("POST", f"{url}/v1/completions", BODY)[0] == 200


def test_a_node_that_is_not_ready_any_more_still_takes_requests() -> None:
    """Gateways learn from /health that it leaves. What they send until then must succeed."""
    with node("--set", "node.timeouts.leave_s=600") as (running, url):
        running.popen.terminate()
        wait_until(lambda: probe(url, "health")[0] == 503)
        assert probe(url, "health")[1]["error"]["code"] == "draining"
        assert probe(url, "ready") == (503, {"ready": False, "reason": "this node is stopping"})
        assert probe(url, "live")[0] == 200
        assert call("POST", f"{url}/v1/completions", BODY)[0] == 200
        (card,) = call("GET", f"{url}/v1/models")[1]["data"]
        # Gateways copy hot prefixes away meanwhile.
        assert call("GET", f"{card['prfaas']['kvd_url']}/ready")[0] == 200
        running.popen.send_signal(signal.SIGTERM)  # again: it need not wait
        assert running.wait() == 0


def test_an_interrupted_node_finishes_what_runs_and_waits_for_nothing_else() -> None:
    pace = ("--set", "node.emulated.time_scale=1", "--set", "node.emulated.output_scale=1")
    with node("--set", "node.timeouts.leave_s=600", *pace) as (running, url):
        body = {"prompt": [1] * 64, "max_tokens": 30, "ignore_eos": True}
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(call, "POST", f"{url}/v1/completions", body)
            wait_until(lambda: is_running(url))
            running.popen.send_signal(signal.SIGINT)
            status, answer = asked.result()
        assert status == 200 and answer["usage"]["completion_tokens"] == 30
        assert running.wait() == 0


def is_running(url: str) -> bool:
    found = re.search(r"^vllm:num_requests_running\S* (\S+)$", text_of(f"{url}/metrics"), re.M)
    return found is not None and float(found[1]) > 0


def test_a_node_and_its_kvd_may_open_as_many_descriptors_as_the_system_allows() -> None:
    with low_limit() as hard, node() as (running, url):
        (card,) = call("GET", f"{url}/v1/models")[1]["data"]
        assert card["prfaas"]["kvd_url"]
        assert soft_limit(running.popen.pid) == hard
        children = Path(f"/proc/{running.popen.pid}/task/{running.popen.pid}/children")
        (kvd,) = children.read_text().split()
        assert soft_limit(int(kvd)) == hard
