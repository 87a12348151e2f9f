from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prfaas.clock import MonotonicClock
from prfaas.launch.request_outcomes import RequestOutcome, RequestOutcomes
from prfaas.measure.client import Target, TimedResponse
from prfaas_lab.faults.clients import ClientResult, Clients, is_explained
from prfaas_lab.faults.credentials import ORDINARY_TENANTS
from prfaas_lab.faults.deployment import FaultDeployment
from prfaas_lab.faults.downtimes import Downtimes
from prfaas_lab.faults.episode import find_unexcused
from prfaas_lab.faults.questions import Question, Verdict

QUESTION = Question((1, 2, 3), (4,))
DEAF, BUSY = "gateway-0", "gateway-1"


@pytest.fixture
async def deployment() -> AsyncIterator[FaultDeployment]:
    """Nobody listens at the address of the first gateway, and the second refuses every request."""

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no node"}}, status=503)

    app, clock = web.Application(), MonotonicClock()
    app.router.add_post("/v1/completions", refuse)
    with socket.socket() as bound:  # the port stays taken, and refuses connections
        bound.bind(("127.0.0.1", 0))
        deaf = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            urls = (deaf, str(server.make_url("")).rstrip("/"))
            targets = [Target(session, url, clock, "m") for url in urls]
            parts = SimpleNamespace(
                clock=clock,
                gateways=[DEAF, BUSY],
                targets_of={ORDINARY_TENANTS[0]: targets},
                downtimes=Downtimes(),
            )
            yield cast(FaultDeployment, parts)


async def test_a_gateway_that_refuses_connections_is_excused_only_while_it_is_down(
    deployment: FaultDeployment,
) -> None:
    clients, down = Clients(deployment, "test"), deployment.downtimes
    asked = await clients.ask(QUESTION)
    assert (asked.gateway, asked.verdict, asked.unreached) == (BUSY, Verdict.REFUSED, (DEAF,))
    down.begin(BUSY, asked.asked_s)
    assert not is_explained(asked, None, down), "the second gateway was down, and the first was not"
    down.begin(DEAF, deployment.clock.now())
    asked = await clients.ask(QUESTION)
    assert asked.unreached == () and is_explained(asked, None, down)


async def test_the_downtime_of_an_earlier_attempt_does_not_excuse_the_last_one(
    deployment: FaultDeployment,
) -> None:
    clients, down = Clients(deployment, "test"), deployment.downtimes
    down.begin(DEAF, deployment.clock.now())
    asked = await clients.ask(QUESTION)
    assert asked.gateway == BUSY and asked.asked_s < asked.answer.sent_s
    down.begin(BUSY, asked.asked_s)
    down.end(BUSY, asked.asked_s)  # it was back before the last attempt
    assert not is_explained(asked, None, down)
    down.begin(BUSY, asked.answer.sent_s)
    assert is_explained(asked, None, down)


def result(verdict: Verdict) -> ClientResult:
    answer = TimedResponse(10.0, ended_s=20.0, token_ids=[4], error="stream failed")
    return ClientResult("a.0", BUSY, verdict, answer, 10.0)


def test_a_broken_stream_is_excused_by_its_own_decode_node_only() -> None:
    broken = result(Verdict.BROKEN)
    down = Downtimes()
    down.begin("east-0", 15.0)
    assert is_explained(broken, "east-0", down)
    assert not is_explained(broken, "east-1", down), "the node beside it was killed"
    assert not is_explained(broken, None, down)
    down.begin(BUSY, 15.0)
    assert not is_explained(broken, "east-1", down), "a gateway that is down sends no error event"


@pytest.mark.parametrize("killed", ["east-0", "east-1"])
async def test_a_campaign_excuses_a_broken_stream_by_the_node_that_the_gateway_logged(
    killed: str,
) -> None:
    outcomes, down = RequestOutcomes(), Downtimes()
    down.begin(killed, 15.0)
    logged = RequestOutcome(
        *("a.0", "broken", "local", "", "east-2", "east-0", 3, 0, 1, 0, 1, 0.5, 1.0)
    )
    outcomes.read_line(msgspec.json.encode(logged).decode())
    broken, right, lost = map(result, (Verdict.BROKEN, Verdict.RIGHT, Verdict.LOST))
    may = {Verdict.BROKEN}
    found = await find_unexcused(may, [broken, right], outcomes, down)
    assert found == ([] if killed == "east-0" else [f"{broken}; decoded by east-0"])
    assert await find_unexcused((), [broken], outcomes, down), "no fault of this kind breaks one"
    assert await find_unexcused(may, [lost], outcomes, down)
    assert await find_unexcused({Verdict.LOST}, [lost], outcomes, down), "its gateway was up"
    down.begin(BUSY, 15.0)
    assert await find_unexcused({Verdict.LOST}, [lost], outcomes, down) == []
