"""What commands share: the options of logging, `--set`, keys and TLS, and errors of peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from prfaas.errors import ConnectionLost, InputError, PeerError, PeerHttpError
from prfaas.security.shared_key import SharedKey
from prfaas.service.logging import FORMATS

F = TypeVar("F", bound=Callable[..., Any])

log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severe messages that are logged to standard error.",
)

log_format_option = click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="Format of the log: lines of text, or one JSON object per line.",
)

otlp_endpoint_option = click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Collector that spans are sent to by OTLP over HTTP, such as http://localhost:4318; needs "
    "the extra `otel`.  [default: the variable OTEL_EXPORTER_OTLP_ENDPOINT]",
)

set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one key of docs/configuration.md; repeatable, and wins over the file.",
)


def security_options(command: F) -> F:
    """Key files (`--member-key-file` and so on), `--tls-*` and `--insecure`. SIGHUP makes the
    process read the files again."""
    for option in reversed(_SECURITY_OPTIONS):
        command = option(command)
    return command


_SECURITY_OPTIONS = (
    click.option(
        "--member-key-file",
        metavar="FILE",
        help="File with the key that gateways, nodes and kvds of the deployment share.",
    ),
    click.option(
        "--metrics-key-file",
        metavar="FILE",
        help="File with the key that opens /metrics and nothing else.",
    ),
    click.option("--tls-ca", metavar="FILE", help="CA certificate of the deployment."),
    click.option("--tls-cert", metavar="FILE", help="Certificate of this service."),
    click.option("--tls-key", metavar="FILE", help="Private key of the certificate."),
    click.option(
        "--insecure",
        is_flag=True,
        default=None,
        help="Listen on more than loopback without key and TLS.",
    ),
)


def read_key(file: str | Path | None) -> SharedKey | None:
    return None if file is None else SharedKey.read(Path(file))


def as_input_error(error: PeerError) -> InputError:
    """The one line that a command prints when a process that it asked has failed."""
    if isinstance(error, ConnectionLost):
        return InputError(f"no response: {error}", fix="check that the process is running")
    if isinstance(error, PeerHttpError):
        return InputError(f"HTTP {error.status}: {error}")
    return InputError(str(error))
