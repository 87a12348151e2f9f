"""Each credential opens what it is for and nothing else; without credentials nothing is exposed."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from prfaas.contracts.kvd_api import (
    ArrivalCounters,
    Heartbeat,
    KvdReport,
    PullPrefix,
    PushPrefix,
    Role,
)
from prfaas.errors import RequestError
from prfaas.gateway.api.credentials import TenantKey
from prfaas.gateway.backend import BackendOptions, running
from prfaas.gateway.fleet.admission import Admission
from prfaas.http_client.client import open_client
from prfaas.security.shared_key import SharedKey
from prfaas.types import NodeId
from tests.cli.runner import run
from tests.gateway.api.api_server import api_server
from tests.gateway.backends import deployment, problem
from tests.kvd.hosts import COMPAT, begun, fill, kvd, names, prompt_of

TENANT = {"Authorization": "Bearer sk-acme"}
KEYS = (TenantKey("sk-acme", "acme"),)
PROMPT = prompt_of(40)


def heartbeat(kvd_url: str) -> Heartbeat:
    return Heartbeat(
        kvd_url,
        "pd",
        KvdReport(
            NodeId("fake"),
            "instance",
            "127.0.0.1:1",
            Role(),
            (),
            None,
            {},
            {},
            0,
            ArrivalCounters(0, 0, 0, 0, 0, 0),
            (),
            {},
        ),
    )


async def test_a_tenant_key_does_not_register_a_kvd() -> None:
    async with api_server(keys=KEYS) as server:
        body = msgspec.json.encode(heartbeat("http://203.0.113.7:7401"))
        status, _ = await server.post("/prfaas/v1/register", body, **TENANT)
        assert status in (401, 403) and not server.backend.heartbeats


async def test_a_gateway_without_a_member_key_registers_no_kvd() -> None:
    async with api_server() as server:
        body = msgspec.json.encode(heartbeat("http://203.0.113.7:7401"))
        status, _ = await server.post("/prfaas/v1/register", body)
        assert status == 403 and not server.backend.heartbeats


@pytest.mark.parametrize(
    "path", ["/prfaas/v1/state", "/prfaas/v1/plan", "/prfaas/v1/explain", "/metrics"]
)
async def test_a_tenant_key_opens_the_openai_paths_only(path: str) -> None:
    async with api_server(keys=KEYS) as server:
        assert (await server.get("/v1/models", **TENANT))[0] == 200
        if path.endswith("explain"):
            status, _ = await server.post(path, {"prompt": [1, 2, 3]}, **TENANT)
        else:
            status, _ = await server.get(path, **TENANT)
        assert status in (401, 403)


async def test_a_tenants_salt_cannot_be_computed_from_its_name() -> None:
    async with api_server(keys=KEYS) as one, api_server(keys=KEYS) as other:
        salts = set()
        for server in (one, other):
            status, _ = await server.post(
                "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1}, **TENANT
            )
            assert status == 200
            salts.add(server.backend.requests[0].salt)
        assert "" not in salts
        public = hmac.new(
            b"prfaas cache salt", msgspec.json.encode(["acme", ""]), "sha256"
        ).hexdigest()
        assert public not in salts
        assert len(salts) == 2, "deployments with different secrets have different salts"


# A kvd without a key ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "flag", "address"),
    [
        ("kvd", "--http", "0.0.0.0:0"),
        ("kvd", "--listen", "0.0.0.0:0"),
        ("kvd", "--http", "[::]:0"),
        ("node", "--host", "0.0.0.0"),
    ],
)
def test_a_service_without_key_and_tls_stays_on_loopback(
    command: str,
    flag: str,
    address: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise the service would start: a mistake that is found later ends it in any case.
    required = {
        "kvd": ("--socket", tmp_path / "no" / "such" / "folder" / "kvd.sock"),
        "node": ("--model", tmp_path / "no-such-model", "--kvd", tmp_path / "no-such-socket"),
    }
    result = run(capsys, monkeypatch, command, flag, address, *required[command])
    assert result.code == 2
    assert flag in result.err and "--insecure" in result.err and "TLS" in result.err


def test_a_kvd_without_a_key_sends_kv_to_loopback_only(tmp_path: Path) -> None:
    with kvd(tmp_path, name="a") as victim, kvd(tmp_path, name="b") as other:
        with victim.engine() as engine, other.engine():
            lease = begun(engine.begin(names(PROMPT), 40))
            fill(lease, PROMPT)
            lease.commit()
            grant = msgspec.structs.replace(other.grant(PROMPT), data_address="203.0.113.7:7400")
            status, body = victim.post("/v1/push", PushPrefix(tuple(names(PROMPT)), COMPAT, grant))
            assert status == 403, body
            assert json.loads(body)["code"] == "forbidden" and "203.0.113.7" in body.decode()
            assert victim.in_use() == (0, 0)


@contextmanager
def secret_service() -> Iterator[tuple[str, list[str]]]:
    """A service beside the kvd that answers every request; its URL, and the paths requested."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            body = b"the service's secret"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_pull_cannot_be_used_to_read_other_services(tmp_path: Path) -> None:
    with kvd(tmp_path) as host, host.engine(), secret_service() as (url, paths):
        hashes = tuple(names(PROMPT))
        for source in (
            f"{url}/admin#",
            f"{url}/admin?",
            f"{url}/a/b",
            "http://user:pw@127.0.0.1:1",
        ):
            status, body = host.post("/v1/pull", PullPrefix(source, hashes))
            assert status == 400 and "source" in body.decode(), body
        assert not paths
        status, body = host.post("/v1/pull", PullPrefix("http://203.0.113.7:80", hashes))
        assert status == 403, body
        # The answer of a service that is not a kvd is not shown to the caller.
        status, body = host.post("/v1/pull", PullPrefix(url, hashes))
        assert status == 502 and b"secret" not in body
        assert paths == ["/v1/match"]


async def test_the_member_key_is_not_sent_to_an_origin_that_has_not_proved_it() -> None:
    seen: list[str | None] = []

    async def record(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"code": "unknown", "message": "not a kvd"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", record)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        # The nodes of the file are addresses where nothing listens.
        listed = [
            {"url": "http://127.0.0.1:1", "kvd_url": f"http://127.0.0.1:{n}"} for n in (2, 3, 4)
        ]
        made = deployment(listed[:2], listed[2:])
        options = BackendOptions(member_key=SharedKey(["the-member-key-of-the-deployment"]))
        async with running(made, problem(made), options) as backend:
            with pytest.raises(RequestError) as refused:
                await backend.register(heartbeat(f"http://{host}:{port}"))
            assert refused.value.status == 403 and not backend.fleet.members.has(host)
        assert seen and not any(seen)
    finally:
        await runner.cleanup()


async def test_a_gateway_with_tls_does_not_send_the_member_key_in_the_clear() -> None:
    key = SharedKey(["the-member-key-of-the-deployment"])
    async with open_client() as http:
        with pytest.raises(RequestError, match="in the clear") as refused:
            await Admission(key, http, 1.0, has_tls=True).approve("http://203.0.113.7:7401")
        assert refused.value.status == 403 and refused.value.param == "kvd_url"
        for url in ("http://127.0.0.1:1", "https://127.0.0.1:1"):  # where nothing listens
            with pytest.raises(RequestError, match="did not answer the challenge"):
                await Admission(key, http, 1.0, has_tls=True).approve(url)
