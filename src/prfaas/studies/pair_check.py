"""Asks the kvds of two engines what they hold, and judges whether the engines can hand over."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kvd_api import KvdReport, spec_of
from prfaas.errors import InputError, PeerHttpError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.http_client.client import HttpClient, open_client
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import TlsIdentity
from prfaas.studies.pair_verdict import EngineSide, PairLink, PairVerdict, judge

_NOT_SERVED = (404, 405)  # statuses of a server that is not a kvd
_TIMEOUT_S = DEFAULTS.timeouts.node_poll_timeout_s


@dataclass(frozen=True, slots=True)
class EnginePair:
    """URLs of two engines' servers. A `prfaas node` reports the URL of its kvd; for other servers
    the URLs of the kvds are given here. For `check_pair` the kvds' own URLs are enough."""

    url_a: str
    url_b: str
    kvd_a: str | None = None
    kvd_b: str | None = None
    member_key: SharedKey | None = None  # sent to both servers and their kvds
    tls: TlsIdentity | None = None

    def client(self) -> AbstractAsyncContextManager[HttpClient]:
        return open_client(self.member_key, tls=self.tls.client if self.tls is not None else None)


@dataclass(frozen=True, slots=True)
class PairReport:
    a: EngineSide
    b: EngineSide
    verdict: PairVerdict


async def check_pair(
    pair: EnginePair, *, tokens: int, link: PairLink, native_block_tokens: int | None = None
) -> PairReport:
    """Raises `PeerError` when a process does not respond, and `InputError` when it is neither a kvd
    nor a server whose kvd is known, or has no engine."""
    async with pair.client() as http:
        a = await _ask(http, pair.url_a, pair.kvd_a)
        b = await _ask(http, pair.url_b, pair.kvd_b)
    verdict = judge(a, b, tokens=tokens, link=link, native_block_tokens=native_block_tokens)
    return PairReport(a, b, verdict)


async def _ask(http: HttpClient, url: str, kvd_url: str | None) -> EngineSide:
    report = await _report(http, url, kvd_url)
    if report.pool is None:
        raise no_engine(url)
    side: EngineSide | None = None
    for pool in reversed(report.pools):
        pages = pool.occupancy.capacity_pages
        capacity = None if pages is None else pages * pool.page_bytes
        side = EngineSide(url, pool.compat, spec_of(pool.groups), capacity, side)
    assert side is not None
    return side


async def _report(http: HttpClient, url: str, kvd_url: str | None) -> KvdReport:
    if kvd_url is None:
        try:
            return await KvdClient(http, url).stats()
        except PeerHttpError as error:
            if error.status not in _NOT_SERVED:
                raise
        server = await find_server(http, url)
        if server is None or server.kvd_url is None:
            raise InputError(
                "this is neither a kvd nor a prfaas node that reports its kvd",
                where=url,
                fix="give the URL of the engine's kvd (its --http address)",
            )
        kvd_url = server.kvd_url
    return await KvdClient(http, kvd_url).stats()


class Server(NamedTuple):
    model: str
    kvd_url: str | None  # None: it does not report one
    is_prfaas: bool  # a `prfaas node`, which has no log-probabilities


async def find_server(http: HttpClient, url: str) -> Server | None:
    """What a node or a vLLM server reports about itself; None: something else answers there."""
    try:
        models = await http.request_json(
            "GET", f"{url}/v1/models", dict[str, Any], timeout_s=_TIMEOUT_S
        )
        card = models["data"][0]
        own = card.get("prfaas") or {}
        kvd_url = own.get("kvd_url")
        return Server(card["id"], kvd_url if isinstance(kvd_url, str) else None, bool(own))
    except PeerHttpError as error:
        if error.status not in _NOT_SERVED:
            raise
    except (KeyError, IndexError, TypeError, AttributeError):
        pass
    return None


def no_engine(kvd_url: str) -> InputError:
    return InputError(
        "no engine has registered with this kvd", where=kvd_url, fix="start its engine first"
    )
