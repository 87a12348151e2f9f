"""Requests of strangers, tenants and hosts without a key to every port of a deployment."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from prfaas.gateway.api.app import GatewayApi
from prfaas.kvd.http_api import HttpApi
from prfaas.node.server import NodeApi
from prfaas.security.certificates import CertificateAuthority
from prfaas.security.tls import client_context, trust_context
from prfaas.service.stopping import Stopping
from tests.secret_files import write_secret
from tests.security.deployments import (
    NO_HEADERS,
    Answer,
    RunningDeployment,
    completion,
    member_context,
    raw_bytes,
    send,
)

_FOR_PROBES = {("GET", path) for path in ("/health", "/live", "/ready", "/openapi.json")}
OPEN = {
    "kvd": _FOR_PROBES | {("POST", "/v1/prove")},
    "node": _FOR_PROBES,
    "gateway": _FOR_PROBES,
}
FOR_TENANTS = {
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
}
FOR_MEMBERS = {("POST", "/prfaas/v1/register"), ("GET", "/prfaas/v1/gateway")}
BODY = completion([1, 2, 3], 1)


def paths(service: str) -> Iterator[tuple[str, str]]:
    """Every route that a service has, and one that it does not have."""
    nothing: Any = None
    app: web.Application
    if service == "kvd":
        app = HttpApi(*[nothing] * 7).app()
    elif service == "node":
        served = NodeApi.__new__(NodeApi)
        served._stopping, served._problem = Stopping(), str
        app = served.application()
    else:
        made = GatewayApi.__new__(GatewayApi)
        made._backend = made._body_reader = nothing
        app = made.application()
    for route in app.router.routes():
        if route.method != "HEAD" and route.resource is not None:
            path = route.resource.canonical.replace("{model}", "x").replace("{id}", "x")
            yield route.method, path
    yield "GET", "/no/such/path"


def foreign_context(folder: Path, ca: Path) -> ssl.SSLContext:
    """The identity of a host of another deployment, which trusts this deployment's CA."""
    other = CertificateAuthority.new().issue("127.0.0.1", 1)
    cert, key = folder / "foreign.pem", folder / "foreign.key"
    cert.write_bytes(other.pem)
    write_secret(key, other.key_pem)
    return client_context(ca, cert, key)


def assert_nothing_is_open(deployment: RunningDeployment, scratch: Path) -> None:
    """Asserts that no port answers with content without the right credentials."""
    ca = deployment.folder / "client" / "ca.pem"
    stranger, foreign = trust_context(ca), foreign_context(scratch, ca)
    host = member_context(Path(deployment.summary["hosts"][0]["folder"]))
    monitor = member_context(deployment.folder / "operator")
    tenant, operator = deployment.key("client/tenant.key"), deployment.key("operator/operator.key")
    metrics = deployment.key("operator/metrics.key")
    keys = (NO_HEADERS, tenant, operator, metrics)
    for service, url in deployment.services:
        for method, path in paths(service):
            where = f"{method} {url}{path}"

            ask = partial(_ask, url, method, path, _body(method, path))

            assert ask(None) is None, f"{where} answers without TLS"
            for certificate in (stranger, foreign):
                for key in keys:
                    answer = ask(certificate, key)
                    if service != "gateway":
                        assert answer is None, f"{where} answers without a certificate: {answer}"
                    else:
                        opens = {"tenant": tenant, "operator": operator, "metrics": metrics}
                        _check_gateway(method, path, key, opens, answer)
            if service != "gateway":
                for certificate in (host, monitor):
                    for key in keys:
                        is_open = (method, path) in OPEN[service]
                        if key == metrics and path == "/metrics":
                            is_open = True
                        _check_member_service(where, ask(certificate, key), is_open=is_open)
    for address in data_addresses(deployment):
        for tls in (None, stranger, foreign):
            for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
                found = raw_bytes(*address, sent, tls)
                # Without TLS, the answer to bytes that are no handshake is at most an alert.
                assert len(found) <= 7 and found[:1] in (b"", b"\x15"), (address, found)
        # A host's certificate lets a peer speak; without a grant it gets no answer.
        assert raw_bytes(*address, bytes(range(256)) * 64, host) == b""


def _ask(
    url: str,
    method: str,
    path: str,
    body: Any,
    tls: ssl.SSLContext | None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Answer | None:
    return send(url, path, tls, method=method, headers=headers, body=body)


def _body(method: str, path: str) -> Any:
    if method != "POST":
        return None
    return {"challenge": 32 * "0"} if path == "/v1/prove" else BODY


def data_addresses(deployment: RunningDeployment) -> Iterator[tuple[str, int]]:
    """The port for KV is the one before the HTTP port of the kvd."""
    for service, url in deployment.services:
        parts = urlsplit(url)
        if service == "kvd":
            assert parts.hostname is not None and parts.port is not None
            yield parts.hostname, parts.port - 1


def _check_gateway(
    method: str, path: str, key: Any, opens: Mapping[str, Any], answer: Answer | None
) -> None:
    where = f"{method} {path}: {answer}"
    assert answer is not None, where
    if (method, path) in OPEN["gateway"]:
        assert answer.status == 200, where
    elif key == opens["tenant"] and (method, path) in FOR_TENANTS:
        assert answer.status not in (401, 403), where
    elif key == opens["operator"] and (method, path) not in FOR_TENANTS | FOR_MEMBERS:
        assert answer.status not in (401, 403), where
    elif key == opens["metrics"] and path == "/metrics":
        assert answer.status == 200, where
    else:
        _assert_refused(answer, where)


def _check_member_service(where: str, answer: Answer | None, *, is_open: bool) -> None:
    assert answer is not None, where
    if is_open:
        assert answer.status == 200, f"{where}: {answer}"
    else:
        _assert_refused(answer, f"{where}: {answer}")


def _assert_refused(answer: Answer, where: str) -> None:
    assert answer.status == 401, where
    problem = answer.json.get("error", answer.json)
    assert set(problem) <= {"code", "message", "type", "param", "differences"}, where
    assert problem["code"] in ("unauthorized", "invalid_api_key"), where
    assert len(answer.body) < 300, where
