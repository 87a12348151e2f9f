"""The gateway's client of a kvd's HTTP API (`kvd/http_api.py` serves it)."""

from __future__ import annotations

from typing import TypeAlias
from urllib.parse import quote

import msgspec

from prfaas.contracts.kvd_api import (
    LONGEST_WAIT_S,
    AbortTransfer,
    EventPage,
    KvdReport,
    OpenTransfer,
    PrefixPulled,
    PullPrefix,
    Role,
    TransferStatus,
)
from prfaas.errors import PeerHttpError, TransferFailed
from prfaas.http_client.client import HttpClient
from prfaas.types import Grant, NodeId, NotNow, TransferId

ASK_S = 5.0  # a kvd responds from memory
_SLACK_S = 5.0  # added to a request's timeout for the time after a long poll has ended
_Opened: TypeAlias = Grant | NotNow
_Pulling: TypeAlias = PrefixPulled | NotNow


class KvdClient:
    def __init__(self, http: HttpClient, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = http

    async def open(self, request: OpenTransfer) -> Grant | NotNow:
        body = msgspec.json.encode(request)
        return await self._http.request_json(
            "POST",
            f"{self.url}/v1/open",
            _Opened,  # type: ignore[arg-type]  # a union is not a `type`
            timeout_s=ASK_S,
            body=body,
        )

    async def wait_committed(self, transfer_id: TransferId) -> TransferStatus:
        """Returns after the commit. Raises `TransferFailed` when the transfer ended without one."""
        url = f"{self.url}/v1/transfers/{transfer_id}?wait_s={LONGEST_WAIT_S:g}"
        while True:
            status = await self._http.request_json(
                "GET", url, TransferStatus, timeout_s=LONGEST_WAIT_S + _SLACK_S
            )
            if status.state == "committed":
                return status
            if status.state != "granted":
                raise TransferFailed(f"transfer {transfer_id} is {status.state}: {status.reason}")

    async def transfer(self, transfer_id: TransferId) -> TransferStatus:
        url = f"{self.url}/v1/transfers/{transfer_id}"
        return await self._http.request_json("GET", url, TransferStatus, timeout_s=ASK_S)

    async def abort(self, transfer_id: TransferId, reason: str) -> None:
        body = msgspec.json.encode(AbortTransfer(reason))
        url = f"{self.url}/v1/transfers/{transfer_id}/abort"
        await self._http.request_json("POST", url, TransferStatus, timeout_s=ASK_S, body=body)

    async def pull(self, request: PullPrefix) -> PrefixPulled | NotNow:
        """Returns when the kvd holds the prefix."""
        body = msgspec.json.encode(request)
        return await self._http.request_json(
            "POST",
            f"{self.url}/v1/pull",
            _Pulling,  # type: ignore[arg-type]
            timeout_s=request.within_s + _SLACK_S,
            body=body,
        )

    async def stats(self) -> KvdReport:
        return await self._http.request_json(
            "GET", f"{self.url}/v1/stats", KvdReport, timeout_s=ASK_S
        )

    async def events(self, node: NodeId, since: int, wait_s: float) -> EventPage:
        url = f"{self.url}/v1/events?node={quote(node, safe='')}&since={since}&wait_s={wait_s:g}"
        return await self._http.request_json("GET", url, EventPage, timeout_s=wait_s + _SLACK_S)

    async def set_role(self, role: Role) -> Role | None:
        """The new role; None when another gateway has changed the role in the meantime."""
        body = msgspec.json.encode(role)
        try:
            return await self._http.request_json(
                "POST", f"{self.url}/v1/role", Role, timeout_s=ASK_S, body=body
            )
        except PeerHttpError as error:
            if error.status == 409:
                return None
            raise
