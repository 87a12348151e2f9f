"""`prfaas probe`: asks a service of this pod whether it is alive or ready, with its certificate."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import click

from prfaas.clock import MonotonicClock
from prfaas.errors import InputError
from prfaas.security.secret_file import read_secrets
from prfaas.security.tls import client_context

POLL_S = 0.2  # between two attempts to connect to a service that is to end
LONGEST_S = 3600.0
_SHOWN_BYTES = 2000  # of a response
_METRICS_BYTES = 4 << 20
_REQUESTS = re.compile(
    r"^vllm:num_requests_(?:running|waiting)(?:{[^}\n]*})? ([0-9.e+]+)$", re.MULTILINE
)


@click.command()
@click.argument("url", metavar="URL")
@click.option("--timeout-s", default=4.0, show_default=True, help="Time for the response.")
@click.option(
    "--until-gone-s",
    type=float,
    metavar="S",
    help="Wait until no process listens at URL, for at most S seconds; no request is sent.",
)
@click.option(
    "--leave-file",
    type=click.Path(path_type=Path),
    help="Create this file, which makes a vLLM server tell gateways that it leaves; then wait "
    "until the metrics at URL show no request.",
)
@click.option(
    "--leave-s", default=2.5, show_default=True, help="Minimum time to wait after --leave-file."
)
@click.option(
    "--idle-s", default=30.0, show_default=True, help="Longest time to wait after --leave-s."
)
@click.option("--key-file", type=click.Path(path_type=Path), help="File with a key that opens URL.")
@click.option("--tls-ca", metavar="FILE", help="CA certificate of the deployment.")
@click.option("--tls-cert", metavar="FILE", help="Certificate of this host.")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate.")
def probe(
    url: str,
    timeout_s: float,
    until_gone_s: float | None,
    leave_file: Path | None,
    leave_s: float,
    idle_s: float,
    key_file: Path | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
) -> None:
    """Send GET to URL: exit code 0 for status 200, and 1 otherwise with the reason.

    Over mutual TLS a kvd or node answers only clients with a certificate of the deployment's CA, so
    orchestrators run this command in the container, with the host's certificate. It sends no key
    without --key-file.

    Two options are for the hooks that Kubernetes runs before it stops a container: a kvd waits with
    --until-gone-s until its engine has ended, and a vLLM server leaves with --leave-file.

    \b
      prfaas probe http://127.0.0.1:8000/ready
      prfaas probe https://127.0.0.1:7401/live --tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem
      prfaas probe https://127.0.0.1:8000/live --until-gone-s 40
    """
    at = _parse(url)
    for value, where in (
        (timeout_s, "--timeout-s"),
        (until_gone_s, "--until-gone-s"),
        (leave_s, "--leave-s"),
        (idle_s, "--idle-s"),
    ):
        if value is not None and not 0 <= value <= LONGEST_S:
            fix = f"give seconds from 0 to {LONGEST_S:.0f}"
            raise InputError(f"{value:g} is out of range", where=where, fix=fix)
    if until_gone_s is not None:
        if not wait_until_gone(at, until_gone_s):
            click.echo(f"a process still listens after {until_gone_s:g} s", err=True)
        return
    key = read_secrets(key_file)[0] if key_file is not None else None
    service = Asked(at, timeout_s, _context(at, tls_ca, tls_cert, tls_key), key)
    if leave_file is not None:
        leave_file.touch()
        time.sleep(leave_s)
        if not wait_until_idle(service, idle_s):
            click.echo(f"requests still run after {idle_s:g} s", err=True)
        return
    try:
        status, body = service.get()
    except (OSError, http.client.HTTPException) as error:
        click.echo(f"no response: {error}", err=True)
        sys.exit(1)
    if status != http.client.OK:
        click.echo(f"HTTP {status}: {body}", err=True)
        sys.exit(1)


def _parse(url: str) -> SplitResult:
    try:
        at = urlsplit(url)
        known = at.scheme in ("http", "https") and at.hostname and at.port
    except ValueError:
        known = False
    if not known:
        fix = "give http://HOST:PORT/PATH or https://HOST:PORT/PATH"
        raise InputError(f"{url!r} is not the URL of a service", where="URL", fix=fix)
    return at


def _context(
    at: SplitResult, ca: str | None, cert: str | None, key: str | None
) -> ssl.SSLContext | None:
    if at.scheme == "http":
        return None
    if ca is None or cert is None or key is None:
        raise InputError(
            "https needs all three", where="--tls-ca, --tls-cert, --tls-key", fix="give them"
        )
    return client_context(Path(ca), Path(cert), Path(key))


@dataclass(frozen=True, slots=True)
class Asked:
    """A service, and how it is asked."""

    at: SplitResult
    timeout_s: float
    context: ssl.SSLContext | None = None
    key: str | None = None

    def get(self, most_bytes: int = _SHOWN_BYTES) -> tuple[int, str]:
        """Status and body. Raises OSError and http.client.HTTPException."""
        host, port = self.at.hostname or "", self.at.port
        connection = (
            http.client.HTTPConnection(host, port, timeout=self.timeout_s)
            if self.context is None
            else http.client.HTTPSConnection(
                host, port, timeout=self.timeout_s, context=self.context
            )
        )
        try:
            headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
            connection.request("GET", self.at.path or "/", headers=headers)
            response = connection.getresponse()
            return response.status, response.read(most_bytes).decode(errors="replace")
        finally:
            connection.close()


def wait_until_idle(service: Asked, within_s: float) -> bool:
    """Whether the metrics show no request, or the server has ended."""
    clock = MonotonicClock()
    until_s = clock.now() + within_s
    while True:
        try:
            status, page = service.get(_METRICS_BYTES)
        except ConnectionRefusedError:
            return True
        except (OSError, http.client.HTTPException):
            status, page = 0, ""  # a busy process
        counts = [float(value) for value in _REQUESTS.findall(page)]
        if status == http.client.OK and counts and not any(counts):
            return True
        if clock.now() >= until_s:
            return False
        time.sleep(POLL_S)


def wait_until_gone(at: SplitResult, within_s: float) -> bool:
    """Whether no process listens there any more."""
    clock = MonotonicClock()
    until_s = clock.now() + within_s
    while clock.now() < until_s:
        try:
            socket.create_connection((at.hostname or "", at.port or 0), timeout=POLL_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # a busy process
        time.sleep(POLL_S)
    return False
