"""What passes through Envoy and what does not: ids, sizes, paths; and a new certificate."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import uuid
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from prfaas.security.certificates import CertificateAuthority
from tests.envoy.answers import (
    NUMBERS,
    ask,
    request_body,
    request_headers,
    request_id,
)
from tests.envoy.clients import HOST, Http1Client
from tests.envoy.deployment import CERTIFICATE_DAYS, Behind
from tests.envoy.proxy import Envoy
from tests.waiting import wait_until

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_ids_pass_through(envoy: Envoy, deployment: Behind) -> None:
    number = next(NUMBERS)
    client = Http1Client(envoy.port, deployment.trust)
    answer = await ask(client, deployment, number, headers={"traceparent": TRACE})
    assert answer.headers["x-request-id"] == request_id(number)
    assert answer.headers["content-type"] == "text/event-stream"
    nameless = next(NUMBERS)
    deployment.allow(nameless, 2)
    body = request_body(nameless, 2, stream=False)
    headers = request_headers(nameless)
    del headers["X-Request-Id"]
    async with client.post(body, headers) as response:
        whole = json.loads(b"".join([chunk async for chunk in response.chunks()]))
        made = response.headers["x-request-id"]
    assert whole["usage"]["completion_tokens"] == 2
    assert str(uuid.UUID(made)) == made  # Envoy's
    for identity, traceparent in ((request_id(number), TRACE), (made, None)):
        line = _line_of(envoy, deployment, identity)
        assert (line["status"], line["attempts"], line["traceparent"]) == (200, 1, traceparent)


def _line_of(envoy: Envoy, deployment: Behind, identity: str) -> dict[str, object]:
    """Of Envoy's access log, once the gateway and Envoy have logged the request."""
    wait_until(lambda: len(deployment.lines(identity)) == 1)
    wait_until(lambda: _logged(envoy, identity) is not None)
    line = _logged(envoy, identity)
    assert line is not None
    return line


def _logged(envoy: Envoy, identity: str) -> dict[str, object] | None:
    """The only line of Envoy's access log about the request; None: it is not written yet."""
    found = [line for line in envoy.access_log() if line["id"] == identity]
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.parametrize(
    "path", ["/prfaas/v1/state", "/metrics", "/", "/v1/../metrics", "/v1%2f..%2fmetrics"]
)
async def test_other_paths_are_closed(envoy: Envoy, deployment: Behind, path: str) -> None:
    client = Http1Client(envoy.port, deployment.trust)
    async with client.post(b"{}", request_headers(next(NUMBERS)), path) as response:
        assert response.status in (400, 404)
    assert envoy.counter("upstream_rq_total") == 0


async def test_a_new_certificate_is_used_without_a_restart(
    envoy: Envoy, deployment: Behind
) -> None:
    secret = yaml.safe_load((envoy.folder / "certificate.yaml").read_text())
    (resource,) = secret["resources"]
    chain = Path(resource["tls_certificate"]["certificate_chain"]["filename"])
    key = Path(resource["tls_certificate"]["private_key"]["filename"])
    authority = CertificateAuthority.new()
    kept = {file: file.read_bytes() for file in (chain, key)}
    issued = authority.issue(HOST, CERTIFICATE_DAYS)
    try:
        _replace(key, issued.key_pem)
        _replace(chain, issued.pem)
        trust = ssl.create_default_context(cadata=authority.pem.decode())
        await asyncio.to_thread(wait_until, lambda: _accepts(envoy.port, trust))
    finally:
        for file, content in kept.items():
            _replace(file, content)


def _replace(file: Path, content: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.rename(file)


def _accepts(port: int, trust: ssl.SSLContext) -> bool:
    """Whether a client that trusts only this CA can connect."""
    with socket.create_connection((HOST, port)) as plain:
        try:
            with trust.wrap_socket(plain, server_hostname=HOST):
                return True
        except ssl.SSLCertVerificationError:
            return False
