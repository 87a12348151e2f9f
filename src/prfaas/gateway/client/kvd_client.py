"""The gateway's client of a kvd's HTTP API (`kvd/http_api.py` serves it).

Every response has a limit in bytes, and `report_checks` refuses impossible values.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias
from urllib.parse import quote

import msgspec

from prfaas.config.gateway import DEFAULTS, GatewayTimeouts
from prfaas.contracts.kvd_api import (
    LONGEST_WAIT_S,
    MAX_RECORD_BYTES,
    AbortTransfer,
    ClaimPlanning,
    EventPage,
    KvdReport,
    OpenTransfer,
    PlanningLease,
    PlanningRecord,
    PrefixPulled,
    PullPrefix,
    PutRecord,
    RecordPut,
    Role,
    SetRole,
    TransferStatus,
)
from prfaas.errors import PeerHttpError, TransferFailed
from prfaas.gateway.client.report_checks import check_page, check_report, count
from prfaas.http_client.client import HttpClient
from prfaas.supervision import one_line
from prfaas.tracing.context import TRACEPARENT
from prfaas.types import Grant, NodeId, NotNow, TransferId

REPORT_BYTES = 2 << 20
EVENTS_BYTES = 64 << 20  # a snapshot of 1.4 million block hashes
RECORD_BYTES = 2 * MAX_RECORD_BYTES  # as base64
SMALL_BYTES = 64 << 10  # the other responses
_MOST_TOKENS, _MOST_BYTES = 2**31, 2**44  # of one prefix
_ASK_AGAIN_S = 0.1  # after a long poll that ended without news
_SLACK_S = 5.0  # added to a request's timeout for the time after a long poll has ended
_Opened: TypeAlias = Grant | NotNow
_Pulling: TypeAlias = PrefixPulled | NotNow


class KvdClient:
    def __init__(
        self, http: HttpClient, url: str, timeouts: GatewayTimeouts = DEFAULTS.timeouts
    ) -> None:
        self._timeouts = timeouts
        self.url = url.rstrip("/")
        self._http = http

    async def open(self, request: OpenTransfer, traceparent: str | None = None) -> Grant | NotNow:
        """`traceparent`: of the request that the transfer is for."""
        body = msgspec.json.encode(request)
        return await self._http.request_json(
            "POST",
            f"{self.url}/v1/open",
            _Opened,  # type: ignore[arg-type]  # a union is not a `type`
            timeout_s=self._timeouts.kvd_call_s,
            body=body,
            headers=_headers(traceparent),
        )

    async def wait_committed(self, transfer_id: TransferId) -> TransferStatus:
        """Returns after the commit. Raises `TransferFailed` when the transfer ended without one."""
        url = f"{self.url}/v1/transfers/{transfer_id}?wait_s={LONGEST_WAIT_S:g}"
        while True:
            status = await self._http.request_json(
                "GET",
                url,
                TransferStatus,
                timeout_s=LONGEST_WAIT_S + _SLACK_S,
                max_bytes=SMALL_BYTES,
            )
            if status.state == "committed":
                _arrived(status)
                return status
            if status.state != "granted":
                why = one_line(f"{status.state}: {status.reason}")
                raise TransferFailed(
                    f"transfer {transfer_id} is {why}", arrived_bytes=_arrived(status)
                )
            await asyncio.sleep(_ASK_AGAIN_S)  # a kvd that does not wait cannot keep us busy

    async def transfer(self, transfer_id: TransferId) -> TransferStatus:
        url = f"{self.url}/v1/transfers/{transfer_id}"
        return await self._http.request_json(
            "GET",
            url,
            TransferStatus,
            timeout_s=self._timeouts.kvd_call_s,
            max_bytes=SMALL_BYTES,
        )

    async def abort(self, transfer_id: TransferId, reason: str) -> TransferStatus:
        body = msgspec.json.encode(AbortTransfer(reason))
        url = f"{self.url}/v1/transfers/{transfer_id}/abort"
        status = await self._http.request_json(
            "POST", url, TransferStatus, timeout_s=self._timeouts.kvd_call_s, body=body
        )
        _arrived(status)
        return status

    async def pull(
        self, request: PullPrefix, traceparent: str | None = None
    ) -> PrefixPulled | NotNow:
        """Returns when the kvd holds the prefix. `traceparent`: of the request that needs it."""
        body = msgspec.json.encode(request)
        answer: PrefixPulled | NotNow = await self._http.request_json(
            "POST",
            f"{self.url}/v1/pull",
            _Pulling,  # type: ignore[arg-type]
            timeout_s=request.within_s + _SLACK_S,
            body=body,
            headers=_headers(traceparent),
            max_bytes=SMALL_BYTES,
        )
        if isinstance(answer, PrefixPulled):
            count(answer.tokens, "tokens", _MOST_TOKENS)
            count(answer.granted_bytes, "granted_bytes", _MOST_BYTES)
        return answer

    async def stats(self) -> KvdReport:
        """Raises `MalformedResponse` when a value of the report is impossible."""
        report = await self._http.request_json(
            "GET",
            f"{self.url}/v1/stats",
            KvdReport,
            timeout_s=self._timeouts.kvd_call_s,
            max_bytes=REPORT_BYTES,
        )
        return check_report(report)

    async def probe(self, timeout_s: float) -> None:
        """Asks for a sign of life, which any response is. Raises `PeerError`."""
        await self._http.request(
            "GET", f"{self.url}/v1/role", timeout_s=timeout_s, max_bytes=SMALL_BYTES
        )

    async def events(self, node: NodeId, since: int, wait_s: float) -> EventPage:
        """Raises `MalformedResponse` when a value of the page is impossible."""
        url = f"{self.url}/v1/events?node={quote(node, safe='')}&since={since}&wait_s={wait_s:g}"
        page = await self._http.request_json(
            "GET", url, EventPage, timeout_s=wait_s + _SLACK_S, max_bytes=EVENTS_BYTES
        )
        return check_page(page, node)

    async def set_role(self, role: SetRole) -> Role | None:
        """The new role; None when another gateway has changed the role in the meantime, or has the
        planning lease of a later epoch."""
        body = msgspec.json.encode(role)
        try:
            return await self._http.request_json(
                "POST",
                f"{self.url}/v1/role",
                Role,
                timeout_s=self._timeouts.kvd_call_s,
                body=body,
                max_bytes=SMALL_BYTES,
            )
        except PeerHttpError as error:
            if error.status == 409:
                return None
            raise

    async def claim_planning(self, claim: ClaimPlanning) -> PlanningLease:
        return await self._http.request_json(
            "POST",
            f"{self.url}/v1/planning",
            PlanningLease,
            timeout_s=self._timeouts.kvd_call_s,
            body=msgspec.json.encode(claim),
            max_bytes=SMALL_BYTES,
        )

    async def put_record(self, record: PutRecord) -> RecordPut:
        return await self._http.request_json(
            "POST",
            f"{self.url}/v1/records",
            RecordPut,
            timeout_s=self._timeouts.kvd_call_s,
            body=msgspec.json.encode(record),
            max_bytes=SMALL_BYTES,
        )

    async def record(self, name: str) -> PlanningRecord:
        return await self._http.request_json(
            "GET",
            f"{self.url}/v1/records?name={quote(name, safe='')}",
            PlanningRecord,
            timeout_s=self._timeouts.kvd_call_s,
            max_bytes=RECORD_BYTES,
        )


def _arrived(status: TransferStatus) -> int:
    """Raises `MalformedResponse` when the number is impossible."""
    return count(status.arrived_bytes, "arrived_bytes", _MOST_BYTES)


def _headers(traceparent: str | None) -> dict[str, str]:
    return {} if traceparent is None else {TRACEPARENT: traceparent}
