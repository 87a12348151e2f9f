"""The paths of the report and of orders, over sockets."""

from __future__ import annotations

import json

import msgspec
import pytest

from prfaas.contracts.gateway_api import DRAIN_PATH, MAX_COUNT, REPORT_PATH, GatewayReport
from prfaas.gateway.api.credentials import TenantKey
from prfaas.security.shared_key import SharedKey
from tests.gateway.api.api_server import ApiServer, api_server
from tests.gateway.peer_gateways.reports import report

KEYS = [TenantKey("tenant", "")]
OPERATOR, MEMBER = SharedKey(["operator"]), SharedKey(["member"])
ORDER = {"cluster": "pd", "drained": True}


def reporting(server: ApiServer) -> list[int]:
    """Gives the backend a report. Returns the list of the numbers that are asked for."""
    asked: list[int] = []

    def made(after: int) -> GatewayReport:
        asked.append(after)
        return report(epoch=5)

    server.backend.report = made
    return asked


async def test_the_member_key_opens_the_report_and_the_operator_key_orders() -> None:
    async with api_server(keys=KEYS, operator=OPERATOR, member=MEMBER) as server:
        asked = reporting(server)
        for key in ("tenant", "operator", "member", ""):
            given = f"Bearer {key}"
            status, body = await server.get(f"{REPORT_PATH}?after=3", Authorization=given)
            assert status == (200 if key == "member" else 401), key
            if status == 200:
                assert msgspec.json.decode(body, type=GatewayReport) == report(epoch=5)
            status, _ = await server.post(DRAIN_PATH, ORDER, Authorization=given)
            assert status == (200 if key == "operator" else 401), key
        assert asked == [3] and server.backend.drained == {"pd": True}


async def test_without_a_member_key_the_report_is_closed() -> None:
    """Also on a gateway without any key, whose operator paths are open."""
    async with api_server() as server:
        asked = reporting(server)
        status, body = await server.get(REPORT_PATH)
        assert (status, json.loads(body)["error"]["code"]) == (403, "member_key_required")
        assert not asked
        assert (await server.post(DRAIN_PATH, ORDER))[0] == 200
    async with api_server(any_member=True) as server:
        asked = reporting(server)
        assert (await server.get(REPORT_PATH))[0] == 200 and asked == [0]


async def test_orders_need_the_operator_key_where_tenants_have_keys() -> None:
    async with api_server(keys=KEYS) as server:
        status, answer = await server.post(DRAIN_PATH, ORDER)
        assert (status, answer["error"]["code"]) == (403, "operator_key_required")
        assert not server.backend.drained


async def test_a_deployment_with_one_gateway_has_no_report() -> None:
    async with api_server(any_member=True) as server:
        status, body = await server.get(REPORT_PATH)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (404, "no_other_gateways")
        assert "[[gateways]]" in error["message"]


@pytest.mark.parametrize("after", ["-1", "x", "", "1.0", "٣", str(MAX_COUNT + 1), "9" * 5000])
async def test_a_wrong_number_is_refused(after: str) -> None:
    async with api_server(any_member=True) as server:
        asked = reporting(server)
        status, body = await server.get(f"{REPORT_PATH}?after={after}")
        error = json.loads(body)["error"]
        assert (status, error["param"]) == (400, "after") and not asked


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", {}, {"cluster": "pd"}, {"drained": True}),
        *({**ORDER, "drained": "true"}, {**ORDER, "more": 1}, {**ORDER, "cluster": ""}),
        {**ORDER, "cluster": "nowhere"},
    ],
    ids=str,
)
async def test_a_wrong_order_is_refused(body: object) -> None:
    async with api_server() as server:
        status, answer = await server.post(DRAIN_PATH, body)
        assert status == 400 and answer["error"]["message"] and not server.backend.drained


async def test_a_long_order_is_refused() -> None:
    async with api_server() as server:
        status, answer = await server.post(DRAIN_PATH, {**ORDER, "cluster": "x" * 100_000})
        assert status == 413 and not server.backend.drained
