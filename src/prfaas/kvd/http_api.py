"""The kvd's HTTP server, for gateways and other kvds. The bodies are in `contracts/kvd_api.py`.

POST /v1/open               reserves memory for a transfer; 409 says that the transfer with the
                            request's id has ended
GET  /v1/transfers/ID       its status; ?wait_s= waits for commit or failure. Renews the lease
POST /v1/transfers/ID/abort aborts it, unless an engine has attached it
POST /v1/match              how many tokens of a prefix the pool has
POST /v1/pull               copies a prefix from another kvd to this one
POST /v1/push               sends a prefix to another kvd; the source's part of a pull
GET  /v1/stats              the report; ?check=1 also verifies the pool's invariants
GET  /v1/events             ?node=&since=&wait_s=: cache events, or a snapshot when since=-1
GET  /v1/role, POST         reads or sets the role; 409 when the epoch is not the current one, or
                            when the planning lease was granted to a later gateway
POST /v1/planning           claims, renews or gives up the planning lease
GET  /v1/records, POST      ?name=: a planning record; keeps one, unless a later one is kept or a
                            later gateway has the planning lease
POST /v1/prove              proves that this kvd has the member key, without revealing it
GET  /prfaas/v1/traces/ID   the spans of a trace that this kvd still has (`contracts/trace_api.py`)
GET  /metrics               for Prometheus; the metrics key opens it, too
GET  /health                200 while the process runs, as /live
GET  /live, /ready          for orchestrators (`service/probes.py`)
GET  /openapi.json          this API as a document (`kvd/openapi.py`)

A body with a `compat` is for the pool of that form; 409 names the fields that differ from it.

With a member key (`security/shared_key.py`), every path except `OPEN_PATHS` responds with 401 to
requests without it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import parse_peer_url
from prfaas.contracts.kvd_api import (
    AbortTransfer,
    ClaimPlanning,
    KvdErrorBody,
    MatchPrefix,
    OpenTransfer,
    PrefixMatch,
    ProofOfMembership,
    ProveMembership,
    PullPrefix,
    PushPrefix,
    PushStarted,
    PutRecord,
    RecordPut,
    SetRole,
    TransferStatus,
)
from prfaas.contracts.trace_api import TRACE_PATH, ProcessSpans
from prfaas.errors import InputError, TransferFailed
from prfaas.http_client.client import HttpClient
from prfaas.kvd.http_messages import (
    RequestBodies,
    foreign,
    incompatible,
    json_response,
    number,
    respond_to_errors,
    shown,
    unauthorized,
    unknown_transfer,
    wait_s,
)
from prfaas.kvd.openapi import OPEN_PATHS, openapi
from prfaas.kvd.planning_lease import decide, first_promise
from prfaas.kvd.report import Reporter
from prfaas.kvd.role import compare_and_set
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import NO_ENGINE, IncomingTransfers
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.kvd.transfers.prefix_pull import pull
from prfaas.kvd.transfers.transfer_spans import transfer_attributes
from prfaas.security.own_host import OwnHost, refuse_foreign
from prfaas.security.peers import PeerRules
from prfaas.security.shared_key import SharedKey, require_key
from prfaas.service.probes import add_probes
from prfaas.service.request_body import log_malformed_requests_briefly
from prfaas.service.stopping import Stopping
from prfaas.tracing.context import TRACEPARENT
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.server_span import server_span
from prfaas.tracing.spans import KVD_GRANT, KVD_PULL, NBYTES
from prfaas.types import BlockHash, Compat, NodeId, NotNow, TransferId

_INCOMPATIBLE = "the engine does not match this kvd"
_REASON_CHARS = 1_000  # of an abort: statuses and log lines repeat it


class HttpApi:
    # limits: the parts of the kvd that its API serves, and the clock
    def __init__(
        self,
        store: Store,
        incoming: IncomingTransfers,
        outgoing: OutgoingTransfers,
        reporter: Reporter,
        http: HttpClient,
        peers: PeerRules,
        stopping: Stopping,
        clock: Clock | None = None,
        recorder: SpanRecorder | None = None,
    ) -> None:
        self.url = ""  # set when the server listens
        self._store = store
        self._incoming = incoming
        self._outgoing = outgoing
        self._reporter = reporter
        self._http = http
        self._peers = peers
        self._stopping = stopping
        self._clock = clock or MonotonicClock()
        self._recorder = recorder or SpanRecorder("kvd", self._clock)
        self._promise = first_promise(self._clock.now())
        self._bodies = RequestBodies()
        self._key: SharedKey | None = None
        self._document = b""

    def app(
        self,
        member: SharedKey | None = None,
        metrics: SharedKey | None = None,
        own_host: OwnHost | None = None,
    ) -> web.Application:
        """The key `metrics` opens /metrics. `own_host` applies without a member key."""
        log_malformed_requests_briefly()
        self._key = member
        self._document = openapi(with_keys=member is not None)
        checks = []
        if member is not None:
            checks.append(require_key(unauthorized, member, metrics, OPEN_PATHS))
        elif own_host is not None:
            checks.append(refuse_foreign(own_host, foreign, OPEN_PATHS))
        app = web.Application(middlewares=[*checks, respond_to_errors])
        add_probes(app, "kvd", self._stopping, lambda: "" if self.url else "not listening yet")
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
                web.post("/v1/planning", self._claim_planning),
                web.get("/v1/records", self._record),
                web.post("/v1/records", self._put_record),
                web.post("/v1/prove", self._prove),
                web.get(TRACE_PATH, self._trace),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/openapi.json", self._openapi),
            ]
        )
        return app

    async def _open(self, request: web.Request) -> web.Response:
        with server_span(self._recorder, KVD_GRANT, request.headers.get(TRACEPARENT)) as span:
            body = await self._bodies.read(request, OpenTransfer)
            if (refusal := self._incompatible(body.compat)) is not None:
                span.error = _INCOMPATIBLE
                return refusal
            try:
                granted = await self._incoming.open_prepared(body, span.parent)
            except TransferFailed as error:
                span.error = str(error)
                return json_response(KvdErrorBody("ended", str(error)), status=409)
            if isinstance(granted, NotNow):
                span.error = granted.reason
            else:
                span.attributes.update(transfer_attributes(granted, granted.max_bytes))
            return json_response(granted)

    async def _transfer(self, request: web.Request) -> web.Response:
        transfer_id = TransferId(request.match_info["id"])
        status = await self._incoming.wait(transfer_id, wait_s(request))
        status = status or self._outgoing.status(transfer_id)
        return unknown_transfer(transfer_id) if status is None else json_response(status)

    async def _abort(self, request: web.Request) -> web.Response:
        transfer_id = TransferId(request.match_info["id"])
        reason = (await self._bodies.read(request, AbortTransfer)).reason[:_REASON_CHARS]
        effective = self._incoming.abort(transfer_id, reason)
        status = self._incoming.status(transfer_id)
        if status is None and effective:  # not opened yet: an open with this id will be refused
            status = TransferStatus(transfer_id, "failed", reason, 0)
        return unknown_transfer(transfer_id) if status is None else json_response(status)

    async def _match(self, request: web.Request) -> web.Response:
        body = await self._bodies.read(request, MatchPrefix)
        if (refusal := self._incompatible(body.compat)) is not None:
            return refusal
        storage = self._store.storage_of(body.compat)
        if storage is None:
            return json_response(PrefixMatch(0, 0))
        names = [BlockHash(name) for name in body.hashes]
        match, tenant = storage.pool.match(names), storage.pool.tenant(names)
        return json_response(PrefixMatch(match.tokens, match.attention_tokens, tenant))

    async def _pull(self, request: web.Request) -> web.Response:
        with server_span(self._recorder, KVD_PULL, request.headers.get(TRACEPARENT)) as span:
            body = await self._bodies.read(request, PullPrefix)
            host = urlsplit(parse_peer_url(body.source, "source")).hostname
            self._peers.check(host or "", "source")
            if (refusal := self._incompatible(body.compat)) is not None:
                span.error = _INCOMPATIBLE
                return refusal
            pulled = await pull(self._store, self._incoming, self._http, body, span.context)
            if isinstance(pulled, NotNow):
                span.error = pulled.reason
            else:
                span.attributes[NBYTES] = pulled.granted_bytes
            return json_response(pulled)

    async def _push(self, request: web.Request) -> web.Response:
        body = await self._bodies.read(request, PushPrefix)
        if (refusal := self._incompatible(body.compat)) is not None:
            return refusal
        storage = self._store.storage_of(body.compat)
        if storage is None:
            return json_response(NO_ENGINE)
        hashes = [BlockHash(name) for name in body.hashes]
        async with self._store.prepared(storage, hashes):
            return json_response(self._outgoing.push(storage, body.grant, hashes) or PushStarted())

    async def _stats(self, request: web.Request) -> web.Response:
        if request.query.get("check"):
            for storage in self._store.storages:
                storage.pool.check()
        return json_response(self._reporter.report())

    async def _events_page(self, request: web.Request) -> web.Response:
        node = NodeId(request.query.get("node", self._store.node))
        since, patience_s = number(request, "since", 0), wait_s(request)
        if since >= 0:
            await self._store.events.wait(node, since, patience_s)
        storage = self._store.storage_named(node)
        held = storage.pool.holdings() if storage is not None else None
        return json_response(self._store.events.page(node, since, held))

    async def _role(self, request: web.Request) -> web.Response:
        return json_response(self._reporter.role)

    async def _set_role(self, request: web.Request) -> web.Response:
        body = await self._bodies.read(request, SetRole)
        role = compare_and_set(self._reporter.role, body, self._promise.epoch)
        if role is None:
            return json_response(self._reporter.role, status=409)
        self._reporter.role = role
        return json_response(role)

    async def _claim_planning(self, request: web.Request) -> web.Response:
        body = await self._bodies.read(request, ClaimPlanning)
        self._promise, lease = decide(self._promise, body, self._clock.now())
        return json_response(lease)

    async def _record(self, request: web.Request) -> web.Response:
        name = request.query.get("name", "")
        found = self._reporter.records.record(name, self._clock.now())
        if found is None:
            message = f"no record {shown(name)} is kept here"
            return json_response(KvdErrorBody("unknown", message), status=404)
        return json_response(found)

    async def _put_record(self, request: web.Request) -> web.Response:
        body = await self._bodies.read(request, PutRecord)
        if not body.name.isprintable():  # gateways refuse a report with such a name
            raise InputError(f"{shown(body.name)} is not one line of text", where="$.name")
        records = self._reporter.records
        accepted = records.put(body, self._promise.epoch, self._clock.now())
        return json_response(RecordPut(accepted, records.version(body.name)))

    async def _prove(self, request: web.Request) -> web.Response:
        if self._key is None:
            return json_response(KvdErrorBody("failed", "this kvd has no member key"), status=409)
        body = await self._bodies.read(request, ProveMembership)
        url = parse_peer_url(self.url, "url")
        return json_response(ProofOfMembership(tuple(self._key.prove(body.challenge, url))))

    async def _trace(self, request: web.Request) -> web.Response:
        spans = self._recorder.spans_of(request.match_info["trace_id"])
        return json_response(ProcessSpans(tuple(spans)))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._reporter.metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    def _incompatible(self, compat: Compat | None) -> web.Response | None:
        """The refusal of state that no pool here has; None when one has it, or may get it."""
        differences = self._store.differences(compat) if compat is not None else ()
        if not differences:
            return None
        return incompatible(differences, [storage.compat for storage in self._store.storages])

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")
