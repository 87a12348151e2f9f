"""Bringing a prefix here from another kvd's pool: it pushes what we grant, after urgent transfers.

The same grant, landing and commit as a hand-off; the pages then stay as prefix.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from prfaas.errors import PeerError, PeerHttpError, TransferFailed
from prfaas.http_client.client import HttpClient
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import UNREGISTERED, IncomingTransfers
from prfaas.types import BlockHash, Compat, Grant, NotNow, OpenTransfer

PULL_S = 300.0  # the longest a pull may take
ASK_S = 10.0
T = TypeVar("T")


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of whole blocks from a prompt's beginning."""

    hashes: tuple[bytes, ...]


class Matched(msgspec.Struct, frozen=True):
    tokens: int
    attention_tokens: int


class Pull(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str  # the other kvd's HTTP address
    hashes: tuple[bytes, ...]
    via: str | None = None  # of a relay in front of this kvd, where the source needs one
    within_s: Annotated[float, msgspec.Meta(gt=0, le=PULL_S)] = PULL_S  # then it is given up


class Pulled(msgspec.Struct, frozen=True, tag="pulled"):
    tokens: int  # of the prefix that is here now
    granted_bytes: int


class Push(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the kvd that pulls to the one that has the prefix."""

    hashes: tuple[bytes, ...]
    compat: Compat
    grant: Grant


class Pushing(msgspec.Struct, frozen=True, tag="pushing"):
    """It is on its way."""


_Pushed: TypeAlias = Pushing | NotNow


async def pull(
    store: Store, incoming: IncomingTransfers, http: HttpClient, asked: Pull
) -> Pulled | NotNow:
    """Waits for the commit. PeerError when the source cannot or does not send, or not in time."""
    try:
        async with asyncio.timeout(asked.within_s):
            return await _pull(store, incoming, http, asked)
    except TimeoutError:
        raise TransferFailed(f"the prefix was not here within {asked.within_s:g} s") from None


async def _pull(
    store: Store, incoming: IncomingTransfers, http: HttpClient, asked: Pull
) -> Pulled | NotNow:
    shelf = store.shelf
    if shelf is None:
        return UNREGISTERED
    there = await _ask(http, f"{asked.source}/v1/match", Prefix(asked.hashes), Matched)
    here = shelf.pool.match([BlockHash(name) for name in asked.hashes])
    if there.tokens <= here.tokens:
        return Pulled(here.tokens, 0)
    hashes = asked.hashes[: there.tokens // shelf.block_tokens]
    grant = incoming.open(OpenTransfer(hashes, there.tokens, shelf.compat))
    if isinstance(grant, NotNow):
        return grant
    try:
        if grant.max_bytes:
            way = asked.via or grant.data_address
            granted = msgspec.structs.replace(grant, data_address=way)
            push = Push(hashes, shelf.compat, granted)
            answer: Pushing | NotNow = await _ask(
                http,
                f"{asked.source}/v1/push",
                push,
                _Pushed,  # type: ignore[arg-type]  # a union is not a `type`
            )
            if isinstance(answer, NotNow):
                raise TransferFailed(f"the source says: {answer.reason}")
        status = await incoming.wait(grant.transfer_id, PULL_S)
        if status is None or status.state != "committed":
            raise TransferFailed(f"the prefix did not come: {status.reason if status else ''}")
    except (PeerError, asyncio.CancelledError) as error:
        incoming.abort(grant.transfer_id, f"the pull was given up: {error}")
        raise
    incoming.take_prefix(grant.transfer_id)
    return Pulled(there.tokens, grant.max_bytes)


async def _ask(http: HttpClient, url: str, body: msgspec.Struct, kind: type[T]) -> T:
    data = msgspec.json.encode(body)
    try:
        return await http.request_json("POST", url, kind, timeout_s=ASK_S, body=data)
    except PeerHttpError as error:
        raise TransferFailed(f"{url} answers {error.status}: {error}") from None
