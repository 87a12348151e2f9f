"""`prfaas doctor pair`: the reports of two kvds over HTTP, and what the command makes of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from prfaas.contracts.kvd_api import KvdReport
from tests.cli.runner import Result
from tests.gateway.reports import SPEC, report

Run = Callable[..., Result]


@contextmanager
def serving(pages: dict[str, bytes]) -> Iterator[str]:
    """A server of these pages; any other path is HTTP 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            body = page or b'{"error": {"message": "no such page"}}'
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def kvd(found: KvdReport) -> dict[str, bytes]:
    return {"/v1/stats": msgspec.json.encode(found)}


def with_format(name: str, **fields: object) -> KvdReport:
    found = report(name)
    assert found.pool is not None
    compat = msgspec.structs.replace(found.pool.compat, **fields)
    return msgspec.structs.replace(found, pool=msgspec.structs.replace(found.pool, compat=compat))


def test_two_that_hand_over(prfaas: Run) -> None:
    with serving(kvd(report("a"))) as a, serving(kvd(report("b"))) as b:
        shown = prfaas("doctor", "pair", a, b)
        assert shown.code == 0, shown.err
        assert "They can hand over to each other, in the canonical form." in shown.out
        options = ["--tokens", 1000, "--gbps", 8, "--rtt-ms", 20, "--convert-gbytes", 2]
        found = prfaas("doctor", "pair", a, f"{b}/", *options, "--json").json
    assert found["can_hand_over"] and found["form"] == "canonical" and not found["differences"]
    assert (found["a"]["url"], found["b"]["url"]) == (a, b)
    canonical, native = found["costs"]
    assert canonical["nbytes"] == SPEC.kv_bytes(1000) and canonical["exact"]
    assert canonical["link_s"] == pytest.approx(canonical["nbytes"] / 1e9 + 0.02, abs=1e-6)
    assert canonical["convert_s"] == pytest.approx(canonical["nbytes"] / 2e9, abs=1e-6)
    assert native["form"] == "native" and native["nbytes"] > canonical["nbytes"]


def test_the_url_of_a_node_is_enough(prfaas: Run) -> None:
    """A node is not a kvd, but reports the URL of its own."""
    with serving(kvd(report("a"))) as a:
        card = {"id": "m", "prfaas": {"kvd_url": a}}
        with serving({"/v1/models": json.dumps({"data": [card]}).encode()}) as node:
            assert prfaas("doctor", "pair", node, a, "--json").json["can_hand_over"]


def test_each_difference_has_its_fix_and_the_exit_code_is_1(prfaas: Run) -> None:
    native = with_format("b", layout="vllm 0.32 cpu blocks 12", block_tokens=128)
    with serving(kvd(report("a"))) as a, serving(kvd(native)) as b:
        shown = prfaas("doctor", "pair", a, b)
        found = prfaas("doctor", "pair", a, b, "--json")
    assert shown.code == found.code == 1
    assert "After the changes below they can, in the canonical form." in shown.out
    assert "vllm 0.32 cpu blocks 12" in shown.out
    fix = f'set "form": "auto" in kv_connector_extra_config of {b}'
    assert found.json["fixes"] == [fix]
    assert f"- {fix}" in shown.out.replace("\n", " ")
    assert {one["field"] for one in found.json["differences"]} == {"layout", "block_tokens"}
    assert found.json["form"] is None and found.json["possible_form"] == "canonical"


def test_another_model_can_never_hand_over(prfaas: Run) -> None:
    with serving(kvd(report("a"))) as a, serving(kvd(report("b", revision="2"))) as b:
        shown = prfaas("doctor", "pair", a, b)
    assert shown.code == 1
    assert "their states mean different things" in shown.out
    assert "start both engines from the same checkpoint files" in shown.out


def test_a_peer_that_is_neither_or_has_no_engine_is_one_line(prfaas: Run) -> None:
    strange = {"/v1/models": b'{"data": [{"id": "m", "prfaas": {"kvd_url": 7}}]}'}
    with serving(kvd(report("a"))) as a:
        for pages, says in (
            ({}, "neither a kvd nor a prfaas node"),
            (strange, "neither a kvd nor a prfaas node"),
            ({"/v1/models": b'{"data": []}'}, "neither a kvd nor a prfaas node"),
            ({"/v1/models": b'{"data": [[]]}'}, "neither a kvd nor a prfaas node"),
            (kvd(report("b", registered=False)), "no engine has registered"),
            ({"/v1/stats": b'{"node": 7}'}, "HTTP 502"),
        ):
            with serving(pages) as b:
                refused = prfaas("doctor", "pair", a, b)
            assert refused.code == 2, pages
            assert says in refused.err and refused.err.count("\n") == 1, refused.err
    gone = prfaas("doctor", "pair", a, a)
    assert gone.code == 2 and "check that the process is running" in gone.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "0"), "--tokens: 0 is out of range"),
        (("--tokens", str(2**40)), "--tokens"),
        (("--gbps", "0"), "--gbps: 0 is out of range"),
        (("--gbps", "nan"), "--gbps: nan is out of range"),
        (("--gbps", "inf"), "--gbps: inf is out of range"),
        (("--rtt-ms", "-1"), "--rtt-ms: -1 is out of range"),
        (("--rtt-ms", "nan"), "--rtt-ms: nan is out of range"),
        (("--convert-gbytes", "0"), "--convert-gbytes: 0 is out of range"),
        (("--native-block-tokens", "0"), "--native-block-tokens: 0 is out of range"),
        (("--member-key-file", "/nowhere"), "/nowhere"),
        (("--tls-ca", "x"), "--tls"),
    ],
)
def test_bad_flags(prfaas: Run, arguments: tuple[str, ...], message: str) -> None:
    result = prfaas("doctor", "pair", "http://h:1", "http://h:1", *arguments)
    assert result.code == 2
    assert message in result.err and result.err.count("\n") == 1


def test_the_address_of_a_path_needs_no_subcommand(prfaas: Run) -> None:
    helped = prfaas("doctor", "--help")
    assert helped.code == 0 and "prfaas doctor pair A B" in helped.out
    for arguments in (("path", "nowhere"), ("nowhere",), ("--json", "nowhere")):
        refused = prfaas("doctor", *arguments)
        assert refused.code == 2 and "'nowhere' is not an address" in refused.err
    missing = prfaas("doctor")
    assert missing.code == 2 and "HOST:PORT" in missing.err
