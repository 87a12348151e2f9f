"""`prfaas drain`: takes a cluster out of use without a failed request, and back into use."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from prfaas.cli.shared_options import as_input_error, read_key
from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import parse_peer_url
from prfaas.config.tls import TlsSection
from prfaas.contracts.gateway_api import DRAIN_PATH, SetDrain
from prfaas.display.console import print_json
from prfaas.errors import InputError, PeerError, PeerHttpError
from prfaas.http_client.client import HttpClient, open_client
from prfaas.security.tls import load_identity
from prfaas.supervision import one_line

REQUEST_S = 30.0  # for one response of the gateway
# Between two looks at the gateway's state. It is longer than the gateway's own polls of a node, so
# that two looks in a row without a request are two reports of every node.
POLL_S = 1.0
QUIET_POLLS = 2  # a request may be on its way from one node to the other at the first of them
LONGEST_S = 86_400.0
_NOT_KEPT = (
    "no majority of the kvds keeps the order yet: other gateways do not learn it, and a restart of "
    "this one forgets it"
)


@dataclass(frozen=True, slots=True)
class Drained:
    """How far a cluster is drained."""

    cluster: str
    drained: bool
    nodes: int  # of the cluster that are alive
    requests_left: dict[str, int]  # by node, where there are any
    copies_left: int  # prefixes that are being copied from the cluster to others
    behind: list[str]  # gateways that are alive and do not follow the order yet, by their cluster
    waited_s: float
    kept: bool = True  # a majority of the kvds keeps the order
    quiet: int = 0  # looks in a row at which nothing was left to wait for
    problem: str = ""  # why the latest look failed; nothing above is known then

    @property
    def is_quiet(self) -> bool:
        """Whether nothing was left to wait for at this look."""
        busy = self.drained and (self.requests_left or self.copies_left)
        return not (busy or self.behind or self.problem)

    @property
    def finished(self) -> bool:
        return self.quiet >= QUIET_POLLS


@click.command()
@click.argument("cluster", metavar="CLUSTER")
@click.option(
    "--gateway",
    "url",
    metavar="URL",
    required=True,
    help="A gateway of the deployment: http://HOST:PORT. The others learn the order from the kvds.",
)
@click.option("--return", "back", is_flag=True, help="Take the cluster back into use.")
@click.option(
    "--wait/--no-wait",
    default=True,
    show_default=True,
    help="Wait until all gateways follow the order and no node of the cluster has a request.",
)
@click.option(
    "--timeout-s",
    default=600.0,
    show_default=True,
    help="Longest wait. The cluster stays drained after it.",
)
@click.option(
    "--operator-key-file",
    type=click.Path(path_type=Path),
    help="File with the key that opens the gateway's operator paths.",
)
@click.option("--tls-ca", metavar="FILE", help="CA certificate of the deployment.")
@click.option("--tls-cert", metavar="FILE", help="Certificate of this host.")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def drain(
    cluster: str,
    url: str,
    back: bool,
    wait: bool,
    timeout_s: float,
    operator_key_file: Path | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    as_json: bool,
) -> None:
    """Take a cluster out of use: no new request is sent to it, and those that it has finish.

    While a PrfaaS cluster is drained, other clusters prefill in its place. While a pd cluster is
    drained, requests that arrive there are served by another pd cluster that it has a link to.
    The kvds keep the order: the cluster stays drained until `--return`, also after restarts of its
    nodes and of the gateways. Where no majority of the kvds can keep it, the gateway that received
    it follows it alone, until it restarts, and goes on trying.

    \b
    Exit codes:
      0  the order is kept, all gateways follow it, and a drained cluster has no request and no
         prefix copy left (with --no-wait: the order was accepted)
      1  the order was accepted, and something was left after --timeout-s, or no majority of the
         kvds keeps it
      2  the gateway refused the order or did not answer it

    \b
      prfaas drain north --gateway http://gw:8080 --operator-key-file operator.key
      prfaas drain north --gateway http://gw:8080 --operator-key-file operator.key --return
    """
    at = parse_peer_url(url, "--gateway")
    if not 0 < timeout_s <= LONGEST_S:
        fix = f"give seconds from above 0 to {LONGEST_S:.0f}"
        raise InputError(f"{timeout_s:g} is out of range", where="--timeout-s", fix=fix)
    key = read_key(operator_key_file)
    tls = load_identity(TlsSection(tls_ca, tls_cert, tls_key), "--tls")

    async def run() -> Drained:
        async with open_client(key, tls=None if tls is None else tls.client) as http:
            order = DrainClient(http, at, cluster, MonotonicClock())
            await order.send(drained=not back)
            if not wait:
                return await order.look_or_explain(drained=not back)
            with _progress(as_json) as say:
                return await order.wait(timeout_s, say, drained=not back)

    try:
        found = asyncio.run(run())
    except PeerError as error:
        raise _explained(error) from None
    if as_json:
        print_json({**asdict(found), "finished": found.finished})
    else:
        click.echo(in_words(found))
    sys.exit(0 if (found.finished and found.kept) or not wait else 1)


class DrainClient:
    """Orders of one cluster at one gateway."""

    def __init__(self, http: HttpClient, url: str, cluster: str, clock: Clock) -> None:
        self._http = http
        self._url = url
        self._cluster = cluster
        self._clock = clock
        self._started_s = clock.now()

    async def send(self, *, drained: bool) -> None:
        body = msgspec.json.encode(SetDrain(self._cluster, drained))
        at = f"{self._url}{DRAIN_PATH}"
        await self._http.request("POST", at, timeout_s=REQUEST_S, body=body)

    async def look(self, *, drained: bool) -> Drained:
        at = f"{self._url}/prfaas/v1/state"
        state = await self._http.request_json("GET", at, dict[str, Any], timeout_s=REQUEST_S)
        nodes = nodes_of(state, self._cluster)
        return Drained(
            self._cluster,
            drained,
            len(nodes),
            requests_left(nodes),
            copies_from(state, self._cluster),
            gateways_behind(state, self._cluster, drained=drained),
            self._waited_s,
            is_kept(state, self._cluster),
        )

    async def look_or_explain(self, *, drained: bool) -> Drained:
        """For after the order: the gateway has accepted it, also when it does not answer now."""
        try:
            return await self.look(drained=drained)
        except PeerError as error:
            problem = one_line(str(error))
            return Drained(self._cluster, drained, 0, {}, 0, [], self._waited_s, problem=problem)

    async def wait(
        self, timeout_s: float, say: Callable[[str], None], *, drained: bool = True
    ) -> Drained:
        """Returns when nothing is left to wait for, or after `timeout_s`."""
        quiet = 0
        while True:
            found = await self.look_or_explain(drained=drained)
            say(in_words(found))
            quiet = quiet + 1 if found.is_quiet else 0
            left_s = self._started_s + timeout_s - self._clock.now()
            if quiet >= QUIET_POLLS or left_s <= 0:
                return replace(found, quiet=quiet)
            await asyncio.sleep(min(POLL_S, left_s))

    @property
    def _waited_s(self) -> float:
        return round(self._clock.now() - self._started_s, 1)


def nodes_of(state: Mapping[str, Any], cluster: str) -> list[Mapping[str, Any]]:
    """The nodes of a cluster that are alive: one that has died has no request left."""
    return [
        node
        for entry in state.get("clusters", [])
        if entry.get("cluster") == cluster
        for node in entry.get("nodes", [])
        if node.get("alive")
    ]


def requests_left(nodes: list[Mapping[str, Any]]) -> dict[str, int]:
    """Requests by node. The node counts those of all gateways, and this gateway knows of those that
    it has sent and that the node has not reported yet."""
    counts = {
        str(node.get("node") or node.get("kvd_url")): max(
            int(node.get("running", 0)) + int(node.get("waiting", 0)),
            int(node.get("queued", 0)) + int(node.get("active", 0)),
        )
        for node in nodes
    }
    return {name: count for name, count in counts.items() if count}


def is_kept(state: Mapping[str, Any], cluster: str) -> bool:
    """Whether the kvds keep the order."""
    entries = [one for one in state.get("clusters", []) if one.get("cluster") == cluster]
    return all(entry.get("order_kept", True) for entry in entries)


def copies_from(state: Mapping[str, Any], cluster: str) -> int:
    """Prefixes that the gateway is copying from nodes of the cluster."""
    nodes = {
        node.get("node")
        for entry in state.get("clusters", [])
        if entry.get("cluster") == cluster
        for node in entry.get("nodes", [])
    }
    under_way = state.get("moves", {}).get("under_way", [])
    return sum(copy.get("from") in nodes for copy in under_way)


def gateways_behind(state: Mapping[str, Any], cluster: str, *, drained: bool) -> list[str]:
    """Gateways that are alive and do not follow the order yet, each by its cluster. One that is not
    alive learns the order from the others when it returns."""
    return [
        str(entry.get("cluster"))
        for entry in state.get("gateways", [])
        if entry.get("alive") and (cluster in entry.get("drained", ())) != drained
    ]


def in_words(found: Drained) -> str:
    if found.problem:
        return f"the order was accepted, but the gateway does not answer now: {found.problem}"
    done = f"{found.cluster} is in use again, with {found.nodes} nodes"
    if found.drained:
        done = f"{found.cluster} is drained: none of its {found.nodes} nodes has a request"
    if found.is_quiet:
        return done if found.kept else f"{done}; {_NOT_KEPT}"
    left = [] if found.kept else [_NOT_KEPT]
    if found.drained and found.requests_left:
        requests, nodes = sum(found.requests_left.values()), len(found.requests_left)
        left.append(f"{requests} requests are left on {nodes} of {found.nodes} nodes")
    if found.drained and found.copies_left:
        left.append(f"{found.copies_left} prefixes are being copied to other clusters")
    if found.behind:
        left.append(f"gateways that do not follow the order yet: {', '.join(found.behind)}")
    return f"{found.cluster} {'drains' if found.drained else 'returns'}: {'; '.join(left)}"


class _Line:
    """One line on a terminal, which is written again; elsewhere a line for each change."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._status = screen.status("") if screen.is_terminal else None
        self._shown = ""

    def __enter__(self) -> Callable[[str], None]:
        if self._status is not None:
            self._status.start()
        return self._say

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        elif text != self._shown:
            self._screen.print(text, markup=False, soft_wrap=True)
        self._shown = text


def _progress(as_json: bool) -> _Line | nullcontext[Callable[[str], None]]:
    if as_json:
        return nullcontext(lambda _: None)
    return _Line(Console(stderr=True, highlight=False))


def _explained(error: PeerError) -> InputError:
    """The error of a gateway, with what to do about it."""
    if isinstance(error, PeerHttpError):
        if error.status in (401, 403):
            fix = "give the gateway's operator key with --operator-key-file"
            return InputError(f"the gateway refused: {error}", where="--gateway", fix=fix)
        if error.code == "unknown_cluster":
            return InputError(str(error), where="CLUSTER", fix="name a cluster of the deployment")
        if error.status in (404, 405):
            fix = "give the URL of a gateway that can drain clusters"
            return InputError(
                f"the gateway does not know the order: {error}", where="--gateway", fix=fix
            )
    return as_input_error(error)
