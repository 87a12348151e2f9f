"""Pulls a prefix from another kvd's pool: this kvd grants, the source sends, after all hand-offs.

Grant, transfer and commit are those of a hand-off; afterwards the pages stay as a prefix.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias, TypeVar

import msgspec

from prfaas.config.address import parse_peer_url
from prfaas.contracts.kvd_api import (
    PULL_S,
    MatchPrefix,
    OpenTransfer,
    PrefixMatch,
    PrefixPulled,
    PullPrefix,
    PushPrefix,
    PushStarted,
)
from prfaas.errors import PeerHttpError, TransferFailed
from prfaas.http_client.client import HttpClient
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import NO_ENGINE, IncomingTransfers
from prfaas.supervision import one_line
from prfaas.tracing.context import TraceContext
from prfaas.types import BlockHash, NotNow

REQUEST_S = 10.0  # the timeout of a request to the source
_RESPONSE_BYTES = 64 << 10  # a match, or the start of a push
T = TypeVar("T")


_Pushed: TypeAlias = PushStarted | NotNow


async def pull(
    store: Store,
    incoming: IncomingTransfers,
    http: HttpClient,
    request: PullPrefix,
    trace: TraceContext | None = None,
) -> PrefixPulled | NotNow:
    """Returns after the commit. PeerError when the source cannot send, or not in time; InputError
    when the source is not the URL of a kvd. The caller has checked the store's `differences`.
    `trace`: the parent of the transfer's spans."""
    source = parse_peer_url(request.source, "source")
    request = msgspec.structs.replace(request, source=source)
    try:
        async with asyncio.timeout(request.within_s):
            return await _pull(store, incoming, http, request, trace)
    except TimeoutError:
        raise TransferFailed(f"the prefix did not arrive within {request.within_s:g} s") from None


async def _pull(
    store: Store,
    incoming: IncomingTransfers,
    http: HttpClient,
    request: PullPrefix,
    trace: TraceContext | None,
) -> PrefixPulled | NotNow:
    storage = store.storage_of(request.compat)
    if storage is None:
        return NO_ENGINE
    # With the format: equal hashes in the source's other pool would name other bytes.
    match = MatchPrefix(request.hashes, storage.compat)
    there = await _request(http, f"{request.source}/v1/match", match, PrefixMatch)
    here = storage.pool.match([BlockHash(name) for name in request.hashes])
    if not 0 <= there.tokens <= len(request.hashes) * storage.block_tokens:
        raise TransferFailed("the source claims to have more tokens than the prefix")
    if there.tokens <= here.tokens:
        return PrefixPulled(here.tokens, 0)
    hashes = request.hashes[: there.tokens // storage.block_tokens]
    wanted = OpenTransfer(hashes, there.tokens, storage.compat, tenant=there.tenant)
    grant = await incoming.open_prepared(wanted, trace)
    if isinstance(grant, NotNow):
        return grant
    try:
        if grant.max_bytes:
            address = request.via or grant.data_address
            granted = msgspec.structs.replace(grant, data_address=address)
            push = PushPrefix(hashes, storage.compat, granted)
            answer: PushStarted | NotNow = await _request(
                http,
                f"{request.source}/v1/push",
                push,
                _Pushed,  # type: ignore[arg-type]  # a union is not a `type`
            )
            if isinstance(answer, NotNow):
                raise TransferFailed(f"the source refused: {one_line(answer.reason)}")
        status = await incoming.wait(grant.transfer_id, PULL_S)
        if status is None or status.state != "committed":
            raise TransferFailed(f"the prefix did not arrive: {status.reason if status else ''}")
        incoming.keep_prefix(grant.transfer_id)
    except BaseException as error:  # whatever it is, the pages are given back
        incoming.abort(grant.transfer_id, f"the pull was cancelled: {error}")
        raise
    return PrefixPulled(there.tokens, grant.max_bytes)


async def _request(http: HttpClient, url: str, body: msgspec.Struct, kind: type[T]) -> T:
    data = msgspec.json.encode(body)
    try:
        return await http.request_json(
            "POST", url, kind, timeout_s=REQUEST_S, body=data, max_bytes=_RESPONSE_BYTES
        )
    except PeerHttpError as error:
        # Not the response itself: the caller named the URL, and would read it through this kvd.
        raise TransferFailed(f"{url} {error.without_body}") from None
