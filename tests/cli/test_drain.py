"""`prfaas drain` at a server that speaks the gateway's two paths."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli.drain import nodes_of, requests_left
from tests.cli.runner import Result
from tests.secret_files import write_secret

Run = Callable[..., Result]
KEY = "operator-key-of-a-test-0123456789abcdef"


class Gateway(ThreadingHTTPServer):
    """Clusters `north` (two nodes) and `east`. Each look at the state ends one request of north."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.orders: list[dict[str, Any]] = []
        self.left = 3
        self.stuck = False
        self.key: str | None = None
        self.looks = 0
        self.copies = 0  # prefixes that are being copied away from north; each look ends one
        self.follows_at = 0  # the look from which on the gateway of west follows the orders
        self.kept_at = 0  # the look from which on a majority of the kvds keeps the order
        self.silent = range(0)  # looks without an answer

    def state(self) -> dict[str, Any]:
        self.looks += 1
        busy = {"node": "north-0", "alive": True, "running": self.left, "waiting": 0, "queued": 0}
        dead = {"node": "north-1", "alive": False, "running": 7, "waiting": 7}
        if not self.stuck:
            self.left = max(0, self.left - 1)
        other = {"node": "east-0", "alive": True, "running": 5, "waiting": 0}
        copies = [{"from": "north-0", "to": "south-0"}] * self.copies
        self.copies = max(0, self.copies - 1)
        drained = ["north"] if self.orders and self.orders[-1]["drained"] else []
        before = [] if drained else ["north"]
        return {
            "moves": {"under_way": [*copies, {"from": "east-0", "to": "north-0"}]},
            "gateways": [
                {"cluster": "east", "alive": True, "drained": drained},
                {
                    "cluster": "west",
                    "alive": True,
                    "drained": drained if self.looks >= self.follows_at else before,
                },
                {"cluster": "gone", "alive": False, "drained": before},
            ],
            "clusters": [
                {
                    "cluster": "north",
                    "nodes": [busy, dead],
                    "order_kept": self.looks >= self.kept_at,
                },
                {"cluster": "east", "nodes": [other]},
            ],
        }


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        if self.server.looks + 1 in self.server.silent:
            self.server.looks += 1
            return self._answer({"error": {"message": "not now"}}, 503)
        self._answer(self.server.state() if self.path == "/prfaas/v1/state" else None)

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.server.key
        if self.headers.get_all("Content-Type") != ["application/json"]:
            return self._answer({"error": {"message": "one Content-Type is expected"}}, 415)
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            return self._answer({"error": {"message": "needs the operator key"}}, 401)
        if order["cluster"] not in ("north", "east"):
            why = f"no cluster is named {order['cluster']!r}; there are: north, east"
            return self._answer({"error": {"message": why, "code": "unknown_cluster"}}, 400)
        self.server.orders.append(order)
        self._answer({} if self.path == "/prfaas/v1/drain" else None)

    def _answer(self, found: dict[str, Any] | None, status: int = 200) -> None:
        body = json.dumps(found or {"error": {"message": "no such page"}}).encode()
        self.send_response(404 if found is None else status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(import_module("prfaas.cli.drain"), "POLL_S", 0.01)
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_it_waits_until_no_node_that_is_alive_has_a_request(gateway: Gateway, prfaas: Run) -> None:
    result = prfaas("drain", "north", "--gateway", gateway.url)
    assert result.code == 0, result.err
    assert gateway.orders == [{"cluster": "north", "drained": True}]
    assert "north is drained: none of its 1 nodes has a request" in result.out
    assert "3 requests are left on 1 of 1 nodes" in result.err
    assert gateway.looks == 5, "three with requests, and two in a row without"


def test_it_waits_until_no_prefix_is_copied_from_the_cluster(gateway: Gateway, prfaas: Run) -> None:
    gateway.left, gateway.copies = 0, 4
    result = prfaas("drain", "north", "--gateway", gateway.url)
    assert result.code == 0 and "4 prefixes are being copied" in result.err
    assert gateway.looks == 6, "four with copies, and two in a row without"


def test_it_waits_until_every_living_gateway_follows_the_order(
    gateway: Gateway, prfaas: Run
) -> None:
    gateway.left, gateway.follows_at = 0, 3
    result = prfaas("drain", "north", "--gateway", gateway.url)
    assert result.code == 0 and "do not follow the order yet: west" in result.err
    assert gateway.looks == 4, "two at which west was behind, and two more"
    gateway.follows_at = gateway.looks + 3
    result = prfaas("drain", "north", "--return", "--gateway", gateway.url)
    assert result.code == 0 and "north returns: gateways that do not follow" in result.err
    assert gateway.looks == 8


def test_it_says_that_no_majority_of_the_kvds_keeps_the_order(
    gateway: Gateway, prfaas: Run
) -> None:
    gateway.left, gateway.kept_at = 0, 10**9
    run = ("drain", "north", "--gateway", gateway.url)
    result = prfaas(*run)
    assert result.code == 1, "although there is nothing to wait for"
    assert "north is drained" in result.out
    assert "no majority of the kvds keeps the order yet" in result.out
    result = prfaas(*run, "--no-wait", "--json")
    assert result.code == 0 and result.json["kept"] is False
    gateway.left, gateway.kept_at = 2, gateway.looks + 3
    result = prfaas(*run)
    assert result.code == 0 and "no majority of the kvds keeps the order yet" in result.err
    assert "keeps the order" not in result.out


def test_gateways_that_do_not_follow_are_named_when_the_time_is_up(
    gateway: Gateway, prfaas: Run
) -> None:
    gateway.left, gateway.follows_at = 0, 10**9
    run = ("drain", "north", "--gateway", gateway.url, "--timeout-s", "0.05")
    result = prfaas(*run)
    assert result.code == 1 and "do not follow the order yet: west" in result.out
    assert prfaas(*run, "--json").json["behind"] == ["west"]


def test_a_failed_look_does_not_end_the_wait(gateway: Gateway, prfaas: Run) -> None:
    gateway.left, gateway.silent = 0, range(2, 4)
    result = prfaas("drain", "north", "--gateway", gateway.url)
    assert result.code == 0 and "north is drained" in result.out
    assert "the order was accepted, but the gateway does not answer now" in result.err
    assert gateway.looks == 5, "a quiet one, two without an answer, and two quiet ones in a row"


def test_a_gateway_that_no_longer_answers_has_accepted_the_order(
    gateway: Gateway, prfaas: Run
) -> None:
    gateway.silent = range(10**9)
    run = ("drain", "north", "--gateway", gateway.url)
    result = prfaas(*run, "--timeout-s", "0.05")
    assert result.code == 1 and "the order was accepted" in result.out
    result = prfaas(*run, "--no-wait", "--json")
    assert result.code == 0 and "not now" in result.json["problem"]


def test_the_cluster_returns_with_its_requests(gateway: Gateway, prfaas: Run) -> None:
    gateway.stuck = True
    result = prfaas("drain", "north", "--return", "--gateway", gateway.url)
    assert result.code == 0 and "in use again" in result.out
    assert gateway.orders == [{"cluster": "north", "drained": False}] and gateway.looks == 2


def test_requests_that_do_not_end(gateway: Gateway, prfaas: Run) -> None:
    gateway.stuck = True
    run = ("drain", "north", "--gateway", gateway.url, "--json")
    result = prfaas(*run, "--timeout-s", "0.05")
    assert result.code == 1 and not result.json["finished"]
    assert result.json["requests_left"] == {"north-0": 3} and result.err == ""
    result = prfaas(*run, "--no-wait")
    assert result.code == 0 and result.json["requests_left"] == {"north-0": 3}


def test_the_operator_key(gateway: Gateway, prfaas: Run, tmp_path: Path) -> None:
    gateway.key = KEY
    refused = prfaas("drain", "north", "--gateway", gateway.url)
    assert refused.code == 2 and "--operator-key-file" in refused.err and not gateway.orders
    file = tmp_path / "operator.key"
    write_secret(file, f"{KEY}\n")
    file.chmod(0o600)
    accepted = prfaas("drain", "north", "--gateway", gateway.url, "--operator-key-file", file)
    assert accepted.code == 0, accepted.err


def test_errors_that_help(gateway: Gateway, prfaas: Run) -> None:
    unknown = prfaas("drain", "nroth", "--gateway", gateway.url)
    assert unknown.code == 2 and "there are: north, east" in unknown.err
    assert "--gateway" in prfaas("drain", "north", "--gateway", "gw:8080").err
    assert "--timeout-s" in prfaas("drain", "x", "--gateway", gateway.url, "--timeout-s", "0").err
    nowhere = prfaas("drain", "north", "--gateway", "http://127.0.0.1:9")
    assert nowhere.code == 2 and "check that the process is running" in nowhere.err


def test_requests_that_a_node_has_not_reported_yet_count() -> None:
    node = {"node": "a", "alive": True, "running": 1, "waiting": 1, "queued": 0, "active": 3}
    assert requests_left([node]) == {"a": 3}
    assert requests_left([{"kvd_url": "http://k", "alive": True}]) == {}
    assert nodes_of({}, "north") == []
