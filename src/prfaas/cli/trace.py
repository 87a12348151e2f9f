"""`prfaas trace`: follows one request through gateway, nodes and kvds, and names what took long."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import click
import msgspec

from prfaas.cli.shared_options import as_input_error, read_key
from prfaas.cli.trace_display import print_followed, print_kept
from prfaas.config.address import parse_peer_url
from prfaas.config.gateway import GatewaySection
from prfaas.config.tls import TlsSection
from prfaas.contracts.trace_api import REQUESTS_PATH, FollowedRequest, KeptRequests
from prfaas.display.console import console, print_json
from prfaas.errors import InputError, PeerError, PeerHttpError
from prfaas.http_client.client import HttpClient, open_client
from prfaas.security.tls import load_identity
from prfaas.tracing.perfetto import trace_events

REQUEST_S = 30.0  # for one response of the gateway, which asks nodes and kvds meanwhile
MOST_BYTES = 16 << 20
T = TypeVar("T")


@click.command()
@click.argument("request_id", metavar="[ID]", required=False)
@click.option(
    "--gateway",
    "url",
    metavar="URL",
    default=f"http://127.0.0.1:{GatewaySection().port}",
    show_default=True,
    help="The gateway that served the request.",
)
@click.option("--slowest", is_flag=True, help="Follow the slowest request that the gateway keeps.")
@click.option("--failed", is_flag=True, help="Follow the latest request that failed.")
@click.option("--latest", is_flag=True, help="Follow the latest request.")
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the request to this file, which https://ui.perfetto.dev opens.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's answer as JSON.")
@click.option(
    "--operator-key-file",
    type=click.Path(path_type=Path),
    help="File with the key that opens the gateway's operator paths.",
)
@click.option("--tls-ca", metavar="FILE", help="CA certificate of the deployment.")
@click.option("--tls-cert", metavar="FILE", help="Certificate of this host.")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate.")
def trace(
    request_id: str | None,
    url: str,
    slowest: bool,
    failed: bool,
    latest: bool,
    perfetto: Path | None,
    as_json: bool,
    operator_key_file: Path | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
) -> None:
    """Follow one request: where its time went, in which process, and why.

    ID is the request's id, which the client receives in the header X-Request-Id, or its trace id;
    the gateway's log has both. Without ID, the command lists the requests that the gateway keeps:
    the latest ones, the slowest ones, and those that failed.

    \b
    Each row is a span: a piece of work of one process for the request.
      read body, tokenize   the gateway receives the request
      wait for a node       routing, and the wait for a free node
      attempt               one attempt to serve the request; a failed one has its error below it
      grant                 the decode node's kvd reserves memory for the state
      copy prefixes         cached prefixes are copied to the prefill node
      prefill               the call of the prefill node; below it are the spans of the node
      wait for commit       from the grant until the state is in place at the decode node
      decode                the call of the decode node, until the end of the answer

    The sentences below the rows name the causes of the time to first token; the first one took the
    most time. Spans of nodes and kvds come from their memory: a process that has restarted, has
    served many requests since, or is a vLLM server has none, and is named. No collector is needed.

    \b
      prfaas trace --latest
      prfaas trace --gateway http://gw:8080
      prfaas trace req-5f0c1a --gateway http://gw:8080 --operator-key-file operator.key
      prfaas trace --slowest --gateway http://gw:8080 --perfetto slowest.json
    """
    at = parse_peer_url(url, "--gateway")
    lists = {"slowest": slowest, "failed": failed, "latest": latest}
    chosen = [name for name, given in lists.items() if given]
    if len(chosen) + (request_id is not None) > 1:
        raise InputError(
            "more than one request is chosen",
            where="ID",
            fix="give an ID, or one of --slowest, --failed and --latest",
        )
    which = chosen[0] if chosen else None
    if perfetto is not None and request_id is None and which is None:
        fix = "give an ID, or one of --slowest, --failed and --latest"
        raise InputError("no request is chosen", where="--perfetto", fix=fix)
    key = read_key(operator_key_file)
    tls = load_identity(TlsSection(tls_ca, tls_cert, tls_key), "--tls")

    async def run() -> KeptRequests | FollowedRequest:
        async with open_client(key, tls=None if tls is None else tls.client) as http:
            return await look(http, at, request_id, which)

    try:
        found = asyncio.run(run())
    except PeerError as error:
        raise _explained(error, request_id) from None
    if isinstance(found, FollowedRequest) and perfetto is not None:
        _write_perfetto(perfetto, found)
    if as_json:
        print_json(msgspec.to_builtins(found))
    elif isinstance(found, KeptRequests):
        print_kept(console(), found)
    else:
        print_followed(console(), found)


async def look(
    http: HttpClient, url: str, request_id: str | None, which: str | None
) -> KeptRequests | FollowedRequest:
    """One request, or the lists of them when none is chosen. Raises `PeerError`, and `InputError`
    when the list in question is empty."""
    if request_id is None:
        kept = await _get(http, f"{url}{REQUESTS_PATH}", KeptRequests)
        if which is None:
            return kept
        requests = getattr(kept, which)
        if not requests:
            raise InputError(f"the gateway keeps no {which} request", where=f"--{which}")
        request_id = str(requests[0].id)
    return await _get(http, f"{url}{REQUESTS_PATH}/{quote(request_id, safe='')}", FollowedRequest)


async def _get(http: HttpClient, url: str, kind: type[T]) -> T:
    return await http.request_json("GET", url, kind, timeout_s=REQUEST_S, max_bytes=MOST_BYTES)


def _write_perfetto(file: Path, found: FollowedRequest) -> None:
    events = trace_events(found.request, found.spans, found.causes)
    try:
        file.write_text(json.dumps(events), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where="--perfetto") from None
    click.echo(f"{file}: open it with https://ui.perfetto.dev", err=True)


def _explained(error: PeerError, request_id: str | None) -> InputError:
    """The error of a gateway, with what to do about it."""
    if isinstance(error, PeerHttpError):
        if error.status in (401, 403):
            fix = "give the gateway's operator key with --operator-key-file"
            return InputError(f"the gateway refused: {error}", where="--gateway", fix=fix)
        if error.status == 404 and request_id is not None:
            fix = "list what it keeps with prfaas trace --gateway URL; each gateway has its own"
            return InputError(f"the gateway does not keep {request_id}", where="ID", fix=fix)
    return as_input_error(error)
