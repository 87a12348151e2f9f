"""A decode engine that ends a handed-off chat with an error. Only an engine that has found the
state of another prompt may prefill the chat itself; after any other failure the chat is prefilled
again elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from prfaas.config.gateway import DEFAULTS, GatewaySection
from prfaas.contracts.kvd_api import OTHER_PROMPT, TransferStatus
from prfaas.errors import RequestError
from prfaas.gateway.dispatch import handoff
from prfaas.gateway.dispatch.attempts import RetryBudget
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.dispatch.dispatcher import Dispatcher
from prfaas.gateway.dispatch.handoff import HandOffs
from prfaas.gateway.homes.request_homes import RequestHomes
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.request import RequestTrace
from prfaas.http_client.client import open_client
from prfaas.tracing.context import new_trace
from prfaas.types import Grant, TransferId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import gateway_request, prompt
from tests.gateway.fleets import LONG, PD, fleet_and_router, with_timeouts
from tests.gateway.peers import Peer, peer

CHAT, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"
ID = TransferId("7f0c8a5e-2f8e-4d8c-9d0b-5a1f3f6f0001")  # every transfer's, see `same_id`
OPEN, STATUS, ABORT = "POST /v1/open", f"GET /v1/transfers/{ID}", f"POST /v1/transfers/{ID}/abort"
GRANT = Grant(ID, "token", "b:7400", {}, 1000, 60.0)
TRACESTATE = "vendor=1"
FAILED = {"error": {"message": "Internal server error", "type": "Internal Server Error"}}


def status(state: str, reason: str = "") -> TransferStatus:
    return TransferStatus(ID, state, reason, 1000)


@pytest.fixture(autouse=True)
def same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of a peer name the path of a transfer."""
    monkeypatch.setattr(handoff, "new_transfer_id", lambda: ID)


@dataclass(slots=True)
class Case:
    """A chat that `f` prefills. Its decode engine has the state, and has not answered yet."""

    engine: Peer  # of all nodes
    kvd: Peer  # of all nodes
    answering: asyncio.Task[None]

    async def fail(self, response: Any = FAILED, status: int = 500) -> None:
        """The decode engine ends this request and the next with an error."""
        await self.engine.script(CHAT, response, status)

    async def end(self) -> None:
        with pytest.raises(RequestError, match="failed after 2 attempts"):
            await self.answering

    @property
    def with_state(self) -> list[bool]:
        """Of every request to a decode engine: whether it continues from a transfer."""
        return ["kv_transfer_params" in body for body in self.engine.bodies[CHAT]]


@asynccontextmanager
async def case(limits: GatewaySection = DEFAULTS) -> AsyncIterator[Case]:
    clock = FakeClock()
    async with (
        peer() as engine,
        peer() as kvd,
        open_client() as http,
        BackgroundCalls(5.0) as background_calls,
    ):
        fleet, router = fleet_and_router(clock, limits=limits)
        for member in fleet.members:
            member.url, member.kvd_url = engine.url, kvd.url
        copies = PrefixCopies(fleet, http, background_calls, clock)
        hand_offs = HandOffs(fleet, http, background_calls, copies, clock)
        budget, traffic = RetryBudget(max_attempts=2), HomeTraffic([PD], 0.0, 60.0)
        homes = RequestHomes(router, {PD: 1.0}, None)
        dispatcher = Dispatcher(router, hand_offs, budget, traffic, homes, clock)
        asked = gateway_request(prompt(LONG), stream=False)
        fields = {**asked.fields, "messages": [{"role": "user", "content": "why?"}]}
        request = replace(asked, path="/v1/chat/completions", fields=fields)
        await kvd.script(OPEN, GRANT)
        await kvd.script(ABORT, status("failed"))
        await kvd.script(STATUS, status("committed"))
        await engine.script(COMPLETIONS, {"usage": None})
        await engine.script(f"{CHAT}/render", {})

        async def answer() -> None:
            context = new_trace(sampled=False)._replace(state=TRACESTATE)
            async with dispatcher.answer(request, RequestTrace(0.0, context)):
                raise AssertionError("the engine has answered")

        answering = asyncio.create_task(answer())
        await engine.requested(CHAT)
        try:
            yield Case(engine, kvd, answering)
        finally:
            answering.cancel()
            await asyncio.wait([answering])


async def test_both_engines_get_the_tracestate_of_the_client() -> None:
    async with case() as one:
        sent = one.engine.tracestates
        assert (sent[COMPLETIONS], sent[CHAT]) == ([TRACESTATE], [TRACESTATE])


LOST = [
    pytest.param(200, status("failed", "aborted"), id="failed"),
    pytest.param(404, {"code": "unknown", "message": "not known here"}, id="unknown"),
    pytest.param(200, status("attached"), id="attached"),
    pytest.param(200, status("released"), id="released"),
    pytest.param(200, status("committed"), id="never-attached"),
    pytest.param(200, "no JSON", id="nonsense"),
]


@pytest.mark.parametrize(("code", "found"), LOST)
async def test_a_failure_without_a_proven_mismatch_never_makes_a_decode_node_prefill(
    code: int, found: Any
) -> None:
    async with case() as one:
        await one.kvd.script(STATUS, found, code)
        await one.fail()
        await one.end()
        assert len(one.kvd.bodies[OPEN]) == 2, "the second attempt prefills elsewhere, too"
        assert all(one.with_state)


async def test_a_kvd_that_does_not_answer_proves_nothing() -> None:
    async with case(with_timeouts(kvd_call_s=0.2)) as one:
        one.kvd.silence(STATUS)
        await one.fail()
        await one.kvd.requested(OPEN, times=2)
        await one.kvd.script(STATUS, status("failed"))
        await one.end()
        assert all(one.with_state)


async def test_a_proven_mismatch_is_the_decode_engines_alone() -> None:
    async with case() as one:
        await one.kvd.script(STATUS, status("released", OTHER_PROMPT))
        await one.fail()
        await one.end()
        assert one.with_state == [True, False]
        assert len(one.kvd.bodies[OPEN]) == 1


async def test_a_node_that_names_the_prompt_needs_no_other_proof() -> None:
    """`prfaas node` names a field that chats lack."""
    async with case() as one:
        error = {"message": "another prompt", "code": "invalid_request", "param": "prompt"}
        await one.fail({"error": error}, 400)
        with pytest.raises(RequestError, match="another prompt"):
            await one.answering
        assert one.with_state == [True, False]
