"""Asks the kvds of two engines what they hold, and judges whether the engines can hand over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kvd_api import spec_of
from prfaas.errors import InputError, PeerHttpError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.http_client.client import HttpClient, open_client
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import TlsIdentity
from prfaas.studies.pair_verdict import EngineSide, PairLink, PairVerdict, judge

_NOT_SERVED = (404, 405)  # statuses of a server that is not a kvd
_TIMEOUT_S = DEFAULTS.timeouts.node_poll_timeout_s


@dataclass(frozen=True, slots=True)
class PairReport:
    a: EngineSide
    b: EngineSide
    verdict: PairVerdict


async def check_pair(
    url_a: str,
    url_b: str,
    *,
    tokens: int,
    link: PairLink,
    native_block_tokens: int | None = None,
    member_key: SharedKey | None = None,
    tls: TlsIdentity | None = None,
) -> PairReport:
    """Each URL is a kvd's, or a `prfaas node`'s, which reports the URL of its kvd. Raises
    `PeerError` when a process does not respond, and `InputError` when it is neither, or has no
    engine."""
    async with open_client(member_key, tls=tls.client if tls is not None else None) as http:
        a = await _ask(http, url_a.rstrip("/"))
        b = await _ask(http, url_b.rstrip("/"))
    verdict = judge(a, b, tokens=tokens, link=link, native_block_tokens=native_block_tokens)
    return PairReport(a, b, verdict)


async def _ask(http: HttpClient, url: str) -> EngineSide:
    try:
        report = await KvdClient(http, url).stats()
    except PeerHttpError as error:
        if error.status not in _NOT_SERVED:
            raise
        report = await KvdClient(http, await _kvd_of(http, url)).stats()
    if report.pool is None:
        raise InputError(
            "no engine has registered with this kvd", where=url, fix="start its engine first"
        )
    side: EngineSide | None = None
    for pool in reversed(report.pools):
        pages = pool.occupancy.capacity_pages
        capacity = None if pages is None else pages * pool.page_bytes
        side = EngineSide(url, pool.compat, spec_of(pool.groups), capacity, side)
    assert side is not None
    return side


async def _kvd_of(http: HttpClient, url: str) -> str:
    try:
        models = await http.request_json(
            "GET", f"{url}/v1/models", dict[str, Any], timeout_s=_TIMEOUT_S
        )
        card = models["data"][0]
        found = (card.get("prfaas") or {}).get("kvd_url")
    except (PeerHttpError, KeyError, IndexError, TypeError, AttributeError):
        found = None
    if not isinstance(found, str):
        raise InputError(
            "this is neither a kvd nor a prfaas node that reports its kvd",
            where=url,
            fix="give the URL of the engine's kvd (its --http address)",
        )
    return found.rstrip("/")
