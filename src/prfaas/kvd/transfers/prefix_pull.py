"""Bringing a prefix here from another kvd's pool: it pushes what we grant, after urgent transfers.

The same grant, landing and commit as a hand-off; the pages then stay as prefix.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import aiohttp
import msgspec

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
from prfaas.errors import ConnectionLost, PeerError, TransferFailed
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import UNREGISTERED, IncomingTransfers
from prfaas.types import BlockHash, NotNow

ASK_S = 10.0
T = TypeVar("T")


_MATCHED = msgspec.json.Decoder(PrefixMatch)
_PUSHING: msgspec.json.Decoder[PushStarted | NotNow] = msgspec.json.Decoder(PushStarted | NotNow)


async def pull(
    store: Store, incoming: IncomingTransfers, http: aiohttp.ClientSession, asked: PullPrefix
) -> PrefixPulled | NotNow:
    """Waits for the commit. PeerError when the source cannot or does not send, or not in time."""
    try:
        async with asyncio.timeout(asked.within_s):
            return await _pull(store, incoming, http, asked)
    except TimeoutError:
        raise TransferFailed(f"the prefix was not here within {asked.within_s:g} s") from None


async def _pull(
    store: Store, incoming: IncomingTransfers, http: aiohttp.ClientSession, asked: PullPrefix
) -> PrefixPulled | NotNow:
    shelf = store.shelf
    if shelf is None:
        return UNREGISTERED
    there = await _ask(http, f"{asked.source}/v1/match", MatchPrefix(asked.hashes), _MATCHED)
    here = shelf.pool.match([BlockHash(name) for name in asked.hashes])
    if there.tokens <= here.tokens:
        return PrefixPulled(here.tokens, 0)
    hashes = asked.hashes[: there.tokens // shelf.block_tokens]
    grant = incoming.open(OpenTransfer(hashes, there.tokens, shelf.compat))
    if isinstance(grant, NotNow):
        return grant
    try:
        if grant.max_bytes:
            way = asked.via or grant.data_address
            granted = msgspec.structs.replace(grant, data_address=way)
            push = PushPrefix(hashes, shelf.compat, granted)
            answer = await _ask(http, f"{asked.source}/v1/push", push, _PUSHING)
            if isinstance(answer, NotNow):
                raise TransferFailed(f"the source says: {answer.reason}")
        status = await incoming.wait(grant.transfer_id, PULL_S)
        if status is None or status.state != "committed":
            raise TransferFailed(f"the prefix did not come: {status.reason if status else ''}")
    except (PeerError, asyncio.CancelledError) as error:
        incoming.abort(grant.transfer_id, f"the pull was given up: {error}")
        raise
    incoming.take_prefix(grant.transfer_id)
    return PrefixPulled(there.tokens, grant.max_bytes)


async def _ask(
    http: aiohttp.ClientSession, url: str, body: msgspec.Struct, answer: msgspec.json.Decoder[T]
) -> T:
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    try:
        async with http.post(url, data=msgspec.json.encode(body), timeout=timeout) as response:
            text = await response.read()
            if response.status != 200:
                raise TransferFailed(f"{url} answers {response.status}: {text[:500]!r}")
            return answer.decode(text)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConnectionLost(f"{url}: {error or type(error).__name__}") from None
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"{url} does not answer as a kvd: {error}") from None
