"""The kvd's HTTP server, for gateways and other kvds. The bodies are in `contracts/kvd_api.py`.

POST /v1/open               reserves memory for a transfer; 409 names the fields that differ, or
                            says that the transfer with the request's id has ended
GET  /v1/transfers/ID       its status; ?wait_s= waits for commit or failure. Renews the lease
POST /v1/transfers/ID/abort aborts it, unless an engine has attached it
POST /v1/match              how many tokens of a prefix the pool has
POST /v1/pull               copies a prefix from another kvd to this one
POST /v1/push               sends a prefix to another kvd; the source's part of a pull
GET  /v1/stats              the report; ?check=1 also verifies the pool's invariants
GET  /v1/events             ?node=&since=&wait_s=: cache events, or a snapshot when since=-1
GET  /v1/role, POST         reads or sets the role; 409 when the epoch is not the current one
POST /v1/prove              proves that this kvd has the member key, without revealing it
GET  /metrics               for Prometheus; the operator key opens it, too
GET  /health

With a member key (`security/shared_key.py`), every path except /v1/prove and /health responds with
401 to requests without it.
"""

from __future__ import annotations

import math
import re
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from prfaas.contracts.kvd_api import (
    LONGEST_WAIT_S,
    AbortTransfer,
    KvdErrorBody,
    MatchPrefix,
    OpenTransfer,
    PrefixMatch,
    ProofOfMembership,
    ProveMembership,
    PullPrefix,
    PushPrefix,
    PushStarted,
    Role,
    TransferStatus,
)
from prfaas.errors import InputError, PeerError, PeerForbidden, TransferFailed
from prfaas.http_client.client import HttpClient
from prfaas.http_client.peer_url import parse_peer_url
from prfaas.kvd.report import Reporter
from prfaas.kvd.role import compare_and_set
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.kvd.transfers.prefix_pull import pull
from prfaas.listening import CLIENT_ERRORS, log_malformed_requests_briefly
from prfaas.security.peers import PeerRules
from prfaas.security.shared_key import SharedKey, require_key
from prfaas.types import BlockHash, NodeId, TransferId

MAX_BODY_BYTES = 64 << 20  # block hashes of a million tokens are under 2 MB
_OPEN_PATHS = frozenset({"/health", "/v1/prove"})
_SHOWN_CHARS = 100
_REASON_CHARS = 1_000  # of an abort: statuses and log lines repeat it
_INTEGER = re.compile("-?[0-9]{1,18}")
# Besides its own errors msgspec raises these for invalid UTF-8 and for deeply nested values.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# RuntimeError: the connection had been closed before the handler began.
_INCOMPLETE = (*CLIENT_ERRORS, OSError, RuntimeError)
T = TypeVar("T")


class HttpApi:
    def __init__(
        self,
        store: Store,
        incoming: IncomingTransfers,
        outgoing: OutgoingTransfers,
        reporter: Reporter,
        http: HttpClient,
        peers: PeerRules,
    ) -> None:
        self.url = ""  # set when the server listens
        self._store = store
        self._incoming = incoming
        self._outgoing = outgoing
        self._reporter = reporter
        self._http = http
        self._peers = peers
        self._key: SharedKey | None = None

    def app(
        self, member: SharedKey | None = None, operator: SharedKey | None = None
    ) -> web.Application:
        log_malformed_requests_briefly()
        self._key = member
        checks = []
        if member is not None:
            checks.append(require_key(_unauthorized, member, operator, _OPEN_PATHS))
        app = web.Application(middlewares=[*checks, _errors], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/open", self._open),
                web.get("/v1/transfers/{id}", self._transfer),
                web.post("/v1/transfers/{id}/abort", self._abort),
                web.post("/v1/match", self._match),
                web.post("/v1/pull", self._pull),
                web.post("/v1/push", self._push),
                web.get("/v1/stats", self._stats),
                web.get("/v1/events", self._events_page),
                web.get("/v1/role", self._role),
                web.post("/v1/role", self._set_role),
                web.post("/v1/prove", self._prove),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    async def _open(self, request: web.Request) -> web.Response:
        body = await _body(request, OpenTransfer)
        differences = self._incoming.differences(body.compat)
        if differences:
            return _incompatible(differences)
        try:
            return _json(await self._incoming.open_prepared(body))
        except TransferFailed as error:
            return _json(KvdErrorBody("ended", str(error)), status=409)

    async def _transfer(self, request: web.Request) -> web.Response:
        transfer_id = TransferId(request.match_info["id"])
        status = await self._incoming.wait(transfer_id, _wait_s(request))
        status = status or self._outgoing.status(transfer_id)
        return _unknown(transfer_id) if status is None else _json(status)

    async def _abort(self, request: web.Request) -> web.Response:
        transfer_id = TransferId(request.match_info["id"])
        reason = (await _body(request, AbortTransfer)).reason[:_REASON_CHARS]
        effective = self._incoming.abort(transfer_id, reason)
        status = self._incoming.status(transfer_id)
        if status is None and effective:  # not opened yet: an open with this id will be refused
            status = TransferStatus(transfer_id, "failed", reason, 0)
        return _unknown(transfer_id) if status is None else _json(status)

    async def _match(self, request: web.Request) -> web.Response:
        body = await _body(request, MatchPrefix)
        if self._store.storage is None:
            return _json(PrefixMatch(0, 0))
        match = self._store.storage.pool.match([BlockHash(name) for name in body.hashes])
        return _json(PrefixMatch(match.tokens, match.attention_tokens))

    async def _pull(self, request: web.Request) -> web.Response:
        body = await _body(request, PullPrefix)
        host = urlsplit(parse_peer_url(body.source, "source")).hostname
        self._peers.check(host or "", "source")
        return _json(await pull(self._store, self._incoming, self._http, body))

    async def _push(self, request: web.Request) -> web.Response:
        body = await _body(request, PushPrefix)
        differences = self._incoming.differences(body.compat)
        if differences:
            return _incompatible(differences)
        storage = self._store.storage
        tokens = len(body.hashes) * storage.block_tokens if storage is not None else 0
        hashes = [BlockHash(name) for name in body.hashes]
        async with self._store.prepared(hashes):
            return _json(self._outgoing.push(body.grant, hashes, tokens) or PushStarted())

    async def _stats(self, request: web.Request) -> web.Response:
        if request.query.get("check") and self._store.storage is not None:
            self._store.storage.pool.check()
        return _json(self._reporter.report())

    async def _events_page(self, request: web.Request) -> web.Response:
        node = NodeId(request.query.get("node", self._store.node))
        since = _number(request, "since", 0)
        if since >= 0:
            await self._store.events.wait(node, since, _wait_s(request))
        storage = self._store.storage
        held = storage.pool.holdings() if storage is not None and node == self._store.node else None
        return _json(self._store.events.page(node, since, held))

    async def _role(self, request: web.Request) -> web.Response:
        return _json(self._reporter.role)

    async def _set_role(self, request: web.Request) -> web.Response:
        body = await _body(request, Role)
        role = compare_and_set(self._reporter.role, body)
        if role is None:
            return _json(self._reporter.role, status=409)
        self._reporter.role = role
        return _json(role)

    async def _prove(self, request: web.Request) -> web.Response:
        if self._key is None:
            return _json(KvdErrorBody("failed", "this kvd has no member key"), status=409)
        body = await _body(request, ProveMembership)
        url = parse_peer_url(self.url, "url")
        return _json(ProofOfMembership(tuple(self._key.prove(body.challenge, url))))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._reporter.metrics(), content_type="text/plain")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PeerForbidden as error:
        return _json(KvdErrorBody("forbidden", str(error)), status=403)
    except InputError as error:
        return _json(KvdErrorBody("bad_request", str(error)), status=400)
    except PeerError as error:
        return _json(KvdErrorBody("failed", str(error)), status=502)


async def _body(request: web.Request, kind: type[T]) -> T:
    try:
        data = await request.read()
    except _INCOMPLETE as error:
        raise InputError(f"the body did not arrive: {error}", where=request.path) from None
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except _UNREADABLE as error:
        raise InputError(
            f"the body is not a valid {kind.__name__}: {error}", where=request.path
        ) from None


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if _INTEGER.fullmatch(text) is None:
        raise InputError(
            f"{_shown(text)} is not a number", where=name, fix="give at most 18 digits"
        )
    return int(text)


def _wait_s(request: web.Request) -> float:
    text = request.query.get("wait_s", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = math.nan
    if math.isnan(wait_s):
        raise InputError(
            f"{_shown(text)} is not a number of seconds", where="wait_s", fix="give seconds"
        )
    return min(max(0.0, wait_s), LONGEST_WAIT_S)


def _shown(text: str) -> str:
    """Text of a request for a message: short, and without characters that UTF-8 cannot encode."""
    shortened = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return ascii(shortened)


def _json(body: msgspec.Struct, *, status: int = 200) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, content_type="application/json", status=status)


def _incompatible(differences: tuple[str, ...]) -> web.Response:
    message = f"the engine does not match this kvd: {'; '.join(differences)}"
    return _json(KvdErrorBody("incompatible", message, differences), status=409)


def _unauthorized() -> web.Response:
    problem = KvdErrorBody("unauthorized", "this kvd requires the member key as a bearer token")
    answer = _json(problem, status=401)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _unknown(transfer_id: TransferId) -> web.Response:
    message = f"transfer {_shown(transfer_id)} is not known here"
    return _json(KvdErrorBody("unknown", message), status=404)
