"""`prfaas probe` against real services."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.security.tls import server_context
from prfaas_lab.testing.certificates import CertificateSet, make_certificates
from tests.cli.runner import Result
from tests.secret_files import write_secret


class Service(http.server.BaseHTTPRequestHandler):
    pages: dict[str, tuple[int, str]] = {}

    def do_GET(self) -> None:
        status, body = self.pages.get(self.path, (404, "none"))
        if self.path == "/metrics" and self.headers["Authorization"] != "Bearer secret":
            status, body = 401, "no key"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving(pages: dict[str, tuple[int, str]], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    handler = type("Pages", (Service,), {"pages": pages})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertificateSet:
    return make_certificates(tmp_path_factory.mktemp("certs"))


def tls_flags(made: CertificateSet) -> list[str]:
    return [
        *("--tls-ca", str(made.ca), "--tls-cert", str(made.client)),
        *("--tls-key", str(made.client_key)),
    ]


def test_a_probe_has_the_hosts_certificate(
    prfaas: Callable[..., Result], made: CertificateSet
) -> None:
    context = server_context(made.ca, made.server, made.server_key)
    with serving({"/live": (200, "yes"), "/ready": (503, "no plan yet")}, context) as port:
        url = f"https://127.0.0.1:{port}"
        assert prfaas("probe", f"{url}/live", *tls_flags(made)).code == 0
        refused = prfaas("probe", f"{url}/ready", *tls_flags(made))
        assert refused.code == 1 and "HTTP 503: no plan yet" in refused.err
    gone = prfaas("probe", f"{url}/live", *tls_flags(made))
    assert gone.code == 1 and "no response" in gone.err


def test_a_probe_waits_until_a_service_has_ended(prfaas: Callable[..., Result]) -> None:
    with serving({}) as port:
        still = prfaas("probe", f"http://127.0.0.1:{port}/live", "--until-gone-s", "0.3")
        assert still.code == 0 and "still listens" in still.err
    done = prfaas("probe", f"http://127.0.0.1:{port}/live", "--until-gone-s", "60")
    assert (done.code, done.err) == (0, "")


def test_a_server_leaves_before_it_is_stopped(
    prfaas: Callable[..., Result], tmp_path: Path
) -> None:
    key, leaving = tmp_path / "operator.key", tmp_path / "leaving"
    write_secret(key, "secret\n")
    page = 'vllm:num_requests_running{{model="m"}} {}\nvllm:num_requests_waiting{{}} 0.0\n'
    pages = {"/metrics": (200, page.format("2.0"))}
    words = ["--leave-file", str(leaving), "--leave-s", "0", "--key-file", str(key)]
    with serving(pages) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        busy = prfaas("probe", url, *words, "--idle-s", "0.3")
        assert busy.code == 0 and "requests still run" in busy.err
        assert leaving.exists()
        pages["/metrics"] = (200, page.format("0.0"))
        assert prfaas("probe", url, *words, "--idle-s", "60").err == ""
    assert prfaas("probe", url, *words, "--idle-s", "60").err == ""  # the server has ended


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("ftp://x:1/",), "is not the URL of a service"),
        (("http://x/",), "is not the URL of a service"),
        (("https://127.0.0.1:1/",), "https needs all three"),
        (("http://127.0.0.1:1/", "--timeout-s", "9999"), "--timeout-s: 9999 is out of range"),
    ],
)
def test_wrong_arguments(
    prfaas: Callable[..., Result], words: tuple[str, ...], problem: str
) -> None:
    result = prfaas("probe", *words)
    assert result.code == 2 and problem in result.err


def test_no_port_is_taken_for_another(prfaas: Callable[..., Result]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/live"
        result = prfaas("probe", url, "--timeout-s", "0.3")
    assert result.code == 1 and "no response" in result.err
