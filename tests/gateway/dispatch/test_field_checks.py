"""Fields that the decode engine refuses: the refusal comes before the grant, not after a prefill
and a transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from prfaas.clock import MonotonicClock
from prfaas.config.gateway import DEFAULTS, GatewaySection
from prfaas.contracts.openai_fields import Endpoint
from prfaas.errors import PeerHttpError, RequestError
from prfaas.gateway.client.node_client import Card, NodeClient
from prfaas.gateway.dispatch.field_checks import FieldChecks, check_names
from prfaas.gateway.dispatch.handoff import AttemptFailed
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.gateway.router import Router
from prfaas.http_client.client import open_client
from prfaas.types import NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import (
    THRESHOLD,
    answered,
    gateway_request,
    is_clean,
    prompt,
    serving,
    until,
)
from tests.gateway.conftest import Hosts
from tests.gateway.fleets import B, fleet_and_router, member_of, placement, with_timeouts
from tests.gateway.peers import Peer, peer

LONG = 2 * THRESHOLD
TRIAL = "POST /v1/completions"
COMPLETIONS, CHATS = "POST /v1/completions/render", "POST /v1/chat/completions/render"


def asking(seed: int, /, **more: Any) -> GatewayRequest:
    request = gateway_request(prompt(LONG, seed))
    return replace(request, fields={**request.fields, **more})


async def test_fields_that_the_engine_refuses_cost_no_prefill(emulated: Hosts) -> None:
    refused_fields = {"logit_bias": {"7": 5}, "stop_token_ids": "7", "presence_penalty": 1.0}
    async with serving(emulated.deployment()) as backend:
        for seed, (field, value) in enumerate(refused_fields.items(), 901):
            trace = RequestTrace(0.0)
            with pytest.raises(RequestError, match=field) as refused:
                async with backend.answer(asking(seed, **{field: value}), trace):
                    pass
            assert (refused.value.status, refused.value.param) == (400, field)
            assert trace.attempts == 1
            assert trace.granted_s is None and trace.prefill == "far0"
            found = await answered(backend, asking(seed))
            assert found.trace.cached_tokens == 0, "nothing was prefilled for the refused request"
        await until(lambda: is_clean(backend))
        assert backend.state()["retries"]["spent"] == 0
    await asyncio.to_thread(emulated.wait_until_idle)


async def test_while_an_engine_checks_fields_no_other_request_waits_for_the_prefill(
    emulated: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check may be the compilation of a grammar, which takes seconds."""
    asks, may_answer, ask = asyncio.Event(), asyncio.Event(), NodeClient.check

    async def slow(*args: Any) -> None:
        if not asks.is_set():  # of the first request alone
            asks.set()
            await may_answer.wait()
        await ask(*args)

    monkeypatch.setattr(NodeClient, "check", slow)
    async with serving(emulated.deployment()) as backend, asyncio.TaskGroup() as tasks:
        checked = tasks.create_task(answered(backend, asking(904, min_p=0.5)))
        await asks.wait()
        board, far = backend.fleet.board, NodeId("far0")
        assert board.own_prefills(far, MonotonicClock().now()) == (1, 0.0)
        await answered(backend, asking(905))
        assert not checked.done()
        may_answer.set()
        assert (await checked).trace.prefill == "far0"
        assert board.own_prefills(far, MonotonicClock().now()) == (0, 0.0)


async def test_what_came_before_it_during_the_check_begins_before_it(
    emulated: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waits for its turn again. What is known of its fields is not asked again."""
    monkeypatch.setattr(Router, "begins_soon", lambda *_: False)
    async with serving(emulated.deployment()) as backend:
        found = await answered(backend, asking(906, min_p=0.25))
        assert found.trace.attempts == 1
        assert any("others came before it" in why for why in found.trace.failures)
        again = await answered(backend, asking(906, min_p=0.25))
        assert not again.trace.failures and again.tokens == found.tokens


async def test_an_engine_that_cannot_check_fields_is_not_asked_again_and_again(
    emulated: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the queue: nothing would be known afterwards."""
    asked: list[object] = []

    async def fail(*args: object) -> None:
        asked.append(args)
        raise PeerHttpError(500, "internal", "it has failed")

    monkeypatch.setattr(NodeClient, "check", fail)
    monkeypatch.setattr(Router, "begins_soon", lambda *_: False)
    async with serving(emulated.deployment()) as backend:
        found = await answered(backend, asking(907, min_p=0.125))
    assert len(asked) == 1 and found.trace.attempts == 1 and not found.trace.failures


async def test_a_request_begins_soon_unless_the_queue_became_long_meanwhile() -> None:
    clock = FakeClock()
    _, router = fleet_and_router(clock, policy="paper")
    checked = await router.place(placement(LONG, clock), 1.0)
    with checked.unready(clock):
        others = [
            await router.place(placement(LONG, clock, seed=seed), 1.0) for seed in range(1, 7)
        ]
    assert not router.begins_soon(checked)
    for other in others:
        router.close(other)
    assert router.begins_soon(checked)


@dataclass
class Asked:
    """The checks of a gateway, and an engine that records what it is asked."""

    checks: FieldChecks
    engine: Peer
    member: Member

    async def check(self, **fields: Any) -> None:
        await self.checks.check(self.member, asking(1, **fields))

    async def check_chat(self, content: str, **fields: Any) -> None:
        messages = [{"role": "user", "content": content}]
        chat = replace(asking(1), path="/v1/chat/completions", fields={"messages": messages})
        await self.checks.check(self.member, replace(chat, fields={**chat.fields, **fields}))

    def times(self, what: str = COMPLETIONS) -> int:
        return len(self.engine.bodies.get(what, ()))


@asynccontextmanager
async def engine_asked(
    status: int = 200, limits: GatewaySection = DEFAULTS
) -> AsyncIterator[Asked]:
    fleet, _ = fleet_and_router(FakeClock(), limits=limits)
    async with peer() as engine, open_client() as http:
        member = member_of(fleet, B)
        member.url = engine.url
        for path in (COMPLETIONS, CHATS):
            await engine.script(path, {"error": {"message": "refused", "code": "x"}}, status)
        yield Asked(FieldChecks(fleet, http), engine, member)


async def test_fields_that_were_accepted_are_not_asked_about_again() -> None:
    async with engine_asked() as asked:
        for seed in range(3):
            await asked.check(min_p=0.5, seed=seed)
        assert asked.times() == 1
        (body,) = await asked.engine.requested(COMPLETIONS)
        assert body["min_p"] == 0.5 and len(body["prompt"]) == 1
        await asked.check(min_p=0.25)
        assert asked.times() == 2
        assert asked.member.card is not None
        asked.member.card = Card(*asked.member.card)  # it was silent: another engine, perhaps
        await asked.check(min_p=0.5)
        assert asked.times() == 3


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_an_engine_without_the_path_gets_a_trial_request(status: int) -> None:
    """A vLLM has the path only with an option."""
    async with engine_asked(status) as asked:
        await asked.engine.script(TRIAL, {"choices": []})
        for seed in range(2):
            await asked.check(min_p=0.5, max_tokens=100, min_tokens=50, seed=seed)
        await asked.check(min_p=0.25)
        assert asked.times() == 1
        first, *_ = trials = await asked.engine.requested(TRIAL)
        assert len(trials) == 2
        assert first["min_p"] == 0.5 and first["max_tokens"] == 1 and not first["stream"]
        assert len(first["prompt"]) == 1 and "min_tokens" not in first
        await asked.engine.script(TRIAL, {"error": {"message": "min_p is too large"}}, 400)
        with pytest.raises(RequestError, match="min_p"):
            await asked.check(min_p=5.0)


async def test_a_trial_request_has_two_choices_at_most() -> None:
    """One would not show that an engine refuses several, and all would be work that no node has
    been booked for."""
    async with engine_asked(404) as asked:
        await asked.engine.script(TRIAL, {"choices": []})
        for n in (1, 2, 64):
            request = replace(asking(1, n=n, min_p=n / 100), n=n)
            await asked.checks.check(asked.member, request)
        trials = await asked.engine.requested(TRIAL)
        assert [trial["n"] for trial in trials] == [1, 2, 2]


async def test_an_engine_that_fails_at_it_still_gets_the_request() -> None:
    async with engine_asked(500) as asked:
        await asked.check(min_p=0.5)
        assert asked.times() == 1


async def test_an_engine_that_is_gone_costs_the_attempt() -> None:
    async with engine_asked() as asked:
        asked.member.url = "http://127.0.0.1:1"
        with pytest.raises(AttemptFailed) as failed:
            await asked.check(min_p=0.5)
        assert failed.value.avoid == (B,) and failed.value.unsent
        assert failed.value.engine is None


async def test_an_engine_that_is_lost_over_a_check_is_an_attempt() -> None:
    """The fields may be what it was lost of. It must not be free to try them at the next engine."""
    async with engine_asked() as asked:
        asked.engine.lose(COMPLETIONS)
        with pytest.raises(AttemptFailed) as failed:
            await asked.check(min_p=0.5)
        assert not failed.value.unsent and failed.value.lost is not None
        assert (failed.value.avoid, failed.value.engine) == ((B,), B)


async def test_a_check_that_is_not_answered_in_time_is_an_attempt() -> None:
    async with engine_asked(limits=with_timeouts(node_poll_timeout_s=0.2)) as asked:
        asked.engine.silence(COMPLETIONS)
        with pytest.raises(AttemptFailed) as failed:
            await asked.check(structured_outputs={"grammar": "start: T"})
        assert not failed.value.unsent and failed.value.avoid == (B,)
        assert asked.times() == 1
        # It answers everything else, so it goes on serving others.
        assert failed.value.engine is None and failed.value.lost is None
        assert asked.member.is_alive(0.0)


async def test_an_engine_that_drains_costs_no_attempt() -> None:
    async with engine_asked(503) as asked:
        draining = {"error": {"message": "this node is shutting down", "code": "draining"}}
        await asked.engine.script(COMPLETIONS, draining, 503)
        with pytest.raises(AttemptFailed) as failed:
            await asked.check(min_p=0.5)
        assert failed.value.avoid == (B,) and failed.value.unsent


async def test_a_long_conversation_is_checked_without_its_messages() -> None:
    async with engine_asked() as asked:
        await asked.check_chat("short", min_p=0.5)
        await asked.check_chat("long " * 50_000, min_p=0.25, continue_final_message=True)
        short, long = await asked.engine.requested(CHATS, 2)
        assert short["messages"][0]["content"] == "short"
        assert len(long["messages"][0]["content"]) < 100 and long["min_p"] == 0.25
        assert "continue_final_message" not in long


async def test_a_chat_of_checked_fields_only_is_not_asked_about() -> None:
    async with engine_asked() as asked:
        await asked.check_chat("hello", seed=3, max_tokens=4)
        assert asked.times(CHATS) == 0


@pytest.mark.parametrize("name", ["guided_json", "unheard_of"])
def test_a_field_that_vllm_would_ignore_is_refused(name: str) -> None:
    vllm = Card("m", None)
    check_names(vllm, asking(1, structured_outputs={}, guided_regex=None, best_of=1))
    with pytest.raises(RequestError, match=name) as refused:
        check_names(vllm, asking(1, **{name: 1}))
    assert (refused.value.status, refused.value.param) == (400, name)
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    check_names(vllm, asking(1, stream_options=options))
    with pytest.raises(RequestError, match="stream_options.include_obfuscation"):
        check_names(vllm, asking(1, stream_options={**options, "include_obfuscation": True}))


def test_the_two_endpoints_have_their_own_fields() -> None:
    serves: dict[Endpoint, frozenset[str]] = {
        "completions": frozenset(asking(1).fields),
        "chat": frozenset({*asking(1).fields, "tools"}),
    }
    card, asked = Card("m", None, serves), asking(1, tools=[])
    check_names(card, asking(1))
    check_names(card, replace(asked, path="/v1/chat/completions"))
    with pytest.raises(RequestError, match="tools"):
        check_names(card, asked)


async def test_options_of_a_stream_that_the_gateway_does_not_know_are_checked() -> None:
    async with engine_asked() as asked:
        usage = {"include_usage": True}
        await asked.check_chat("hello", stream=True, stream_options=usage)
        assert asked.times(CHATS) == 0
        await asked.check_chat("hello", stream=True, stream_options={**usage, "other": 1})
        assert asked.times(CHATS) == 1
