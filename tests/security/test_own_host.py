"""A service without keys answers no web page: neither one of another site, nor one whose site has
resolved its own name to this host."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from prfaas.security.own_host import CROSS_SITE, UNKNOWN_HOST, OwnHost
from tests.service.services import SERVICES, running
from tests.studies.clusters.services import free_port
from tests.waiting import PATIENCE_S

HERE = "localhost:8080"
JSON = {"Content-Type": "application/json"}
OWN = OwnHost("127.0.0.1")
STRANGE = [
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "10.0.0.1",
    "",
    "[",
    "a b",
]


def code(method: str, headers: Mapping[str, str]) -> str | None:
    refusal = OWN.refusal(method, headers)
    return None if refusal is None else refusal.code


@pytest.mark.parametrize(
    "host", ["localhost", "localhost.:8080", "127.0.0.1:8080", "127.1.2.3", "[::1]:8080", None]
)
def test_programs_of_this_host_are_answered(host: str | None) -> None:
    headers = {} if host is None else {"Host": host}
    assert code("GET", headers) is None
    for kind in (JSON, {}, {"Content-Type": "text/plain"}):  # curl sends a form by itself
        assert code("POST", {**headers, **kind}) is None


@pytest.mark.parametrize("host", STRANGE)
def test_other_names_of_this_host_are_refused(host: str) -> None:
    """A site's name that resolves to 127.0.0.1 makes its pages the service's own to the browser."""
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert code("POST", {**headers, **JSON}) == UNKNOWN_HOST
    assert code("GET", {"Host": host}) == UNKNOWN_HOST


@pytest.mark.parametrize(
    "told",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "null"},
    ],
)
def test_pages_of_other_sites_are_refused(told: Mapping[str, str]) -> None:
    for kind in (JSON, {"Content-Type": "text/plain"}):
        assert code("POST", {"Host": HERE, **told, **kind}) == CROSS_SITE


@pytest.mark.parametrize("kind", ["text/plain", "Text/Plain;charset=UTF-8", "", None])
@pytest.mark.parametrize(
    "told",
    [
        {"Origin": f"http://{HERE}"},
        {"Sec-Fetch-Site": "same-origin"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},  # an old one, which tells no origin
    ],
)
def test_browsers_send_json(told: Mapping[str, str], kind: str | None) -> None:
    typed = {} if kind is None else {"Content-Type": kind}
    assert code("POST", {"Host": HERE, **told, **typed}) == CROSS_SITE
    assert code("POST", {"Host": HERE, **told, **JSON}) is None


def test_addresses_that_are_entered_are_answered() -> None:
    assert code("GET", {"Host": HERE, "Sec-Fetch-Site": "none"}) is None


@pytest.mark.parametrize("host", ["tunnel.example", "Tunnel.Example.:8080"])
def test_the_name_that_the_service_advertises_is_its_own(host: str) -> None:
    own = OwnHost.of("127.0.0.1", insecure=False, advertised="tunnel.example")
    assert own is not None and own.refusal("GET", {"Host": host}) is None
    assert own.refusal("GET", {"Host": f"evil.{host}"}) is not None
    page = {"Host": host, "Origin": "https://evil.example", **JSON}
    refused = own.refusal("POST", page)
    assert refused is not None and refused.code == CROSS_SITE


def test_only_services_on_loopback_know_their_names() -> None:
    assert OwnHost.of("127.0.0.1", insecure=False) == OWN
    assert OwnHost.of("10.0.0.1", insecure=False) is None
    assert OwnHost.of("127.0.0.1", insecure=True) is None


def ask(url: str, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


POSTED = {"gateway": "/prfaas/v1/drain", "kvd": "/v1/role", "node": "/v1/completions"}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_without_keys_refuses_web_pages(tmp_path: Path, service: str) -> None:
    path = POSTED[service]
    with running(service, tmp_path, subprocess.DEVNULL) as (_, url):
        page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        for headers in (page, {"Host": "evil.example", **JSON}):
            status, body = ask(url, "POST", path, headers)
            assert status == 403, body
            assert b"no key" in body and json.loads(body)
        assert ask(url, "GET", "/metrics", {"Host": "evil.example"})[0] == 403
        assert ask(url, "GET", "/live", {"Host": "evil.example"})[0] == 200  # probes
        assert ask(url, "POST", path, JSON)[0] not in (401, 403)
        assert ask(url, "GET", "/metrics", {})[0] == 200


@pytest.mark.parametrize(("service", "path"), [("kvd", "/v1/stats"), ("node", "/v1/models")])
def test_gateways_reach_a_service_by_the_name_that_it_advertises(
    tmp_path: Path, service: str, path: str
) -> None:
    name, port = "tunnel.example", free_port()
    settings = {
        "kvd": [f"kvd.http=127.0.0.1:{port}", f"kvd.advertise={name}"],
        "node": [f"node.port={port}", f"node.advertise=http://{name}:{port}"],
    }
    with running(service, tmp_path, subprocess.DEVNULL, settings[service]) as (_, url):
        assert url == f"http://{name}:{port}"
        here = f"http://127.0.0.1:{port}"
        assert ask(here, "GET", path, {"Host": f"{name}:{port}"})[0] == 200
        assert ask(here, "GET", path, {"Host": "evil.example"})[0] == 403
