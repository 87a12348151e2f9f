"""One hand-off against a kvd and a prefill node that are loopback HTTP servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from prfaas.cache.hashing import PromptHashes
from prfaas.config.gateway import DEFAULTS, GatewaySection
from prfaas.errors import RequestError
from prfaas.gateway.dispatch import handoff
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.dispatch.handoff import AttemptFailed, DecodeNodeFull, HandOff, HandOffs
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.http_client.client import open_client
from prfaas.scheduler.request import CacheCopy
from prfaas.tracing.context import TraceContext, parse_traceparent
from prfaas.tracing.spans import CUT, LOST
from prfaas.types import Grant, LinkStats, NodeId, NotNow, TransferId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import gateway_request, prompt, until
from tests.gateway.fleets import (
    FARS,
    HOMES,
    LONG,
    A,
    B,
    F,
    fall_silent,
    fleet_and_router,
    member_of,
    placement,
    with_timeouts,
)
from tests.gateway.peers import Peer, peer
from tests.gateway.reports import NODE_CARD, report

TIMEOUTS = DEFAULTS.timeouts

ID = "7f0c8a5e-2f8e-4d8c-9d0b-5a1f3f6f0001"  # every transfer's, see `same_id`
GRANT = Grant(TransferId(ID), "token", "b:7400", {}, 1000, 60.0)
OPEN, COMMIT, ABORT = "POST /v1/open", f"GET /v1/transfers/{ID}", f"POST /v1/transfers/{ID}/abort"
PREFILL, PULL = "POST /v1/completions", "POST /v1/pull"
CACHED = 64
PREFILLED = {"usage": {"prompt_tokens_details": {"cached_tokens": CACHED}}}


def status(state: str, arrived_bytes: int = 0) -> dict[str, Any]:
    found = {"transfer_id": ID, "state": state, "reason": "test", "nbytes": 1000}
    return {**found, "arrived_bytes": arrived_bytes}


@dataclass(slots=True)
class Case:
    """A request that `f` prefills and `b` decodes."""

    clock: FakeClock
    fleet: Fleet
    kvd: Peer  # of `b`
    node: Peer  # the engine of `f`
    hand_offs: HandOffs
    booking: Booking
    request: GatewayRequest
    trace: RequestTrace

    def start(self) -> HandOff:
        prefill, decode = member_of(self.fleet, F), member_of(self.fleet, B)
        return self.hand_offs.start(self.booking, prefill, decode)

    async def carry_out(self) -> dict[str, Any]:
        """The whole hand-off; the decode engine takes the state."""
        async with self.start() as hand_off:
            params = await self.prefill_with(hand_off)
            hand_off.mark_taken()
            return params

    async def prefill_with(self, hand_off: HandOff) -> dict[str, Any]:
        prompt_hashes = PromptHashes(self.request.token_ids.array)
        return await hand_off.carry_out(self.request, prompt_hashes, self.trace)


@asynccontextmanager
async def case(limits: GatewaySection = DEFAULTS) -> AsyncIterator[Case]:
    clock = FakeClock()
    async with (
        peer() as kvd,
        peer() as node,
        open_client() as http,
        BackgroundCalls(5.0) as background_calls,
    ):
        homes = [HOMES[0], {**HOMES[1], "kvd_url": kvd.url}, HOMES[2]]
        fars = [{**FARS[0], "url": node.url}]
        fleet, router = fleet_and_router(clock, homes=homes, fars=fars, limits=limits)
        booking = await router.place(placement(LONG, clock), 1.0)
        assert (booking.route.prefill, booking.route.decode) == (F, B)
        copies = PrefixCopies(fleet, http, background_calls, clock)
        hand_offs = HandOffs(fleet, http, background_calls, copies, clock)
        request, trace = gateway_request(prompt(LONG)), RequestTrace(clock.now())
        trace.begin_attempt(booking.route, clock.now())
        await kvd.script(OPEN, GRANT)
        await kvd.script(ABORT, status("failed"))
        yield Case(clock, fleet, kvd, node, hand_offs, booking, request, trace)


@pytest.fixture(autouse=True)
def same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id that the gateway chooses is known to the scripts of the kvd."""
    monkeypatch.setattr(handoff, "new_transfer_id", lambda: TransferId(ID))


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_CHECK_S", 0.01)


async def test_grant_then_prefill_then_commit() -> None:
    async with case() as one:
        await one.node.script(PREFILL, PREFILLED)
        await one.kvd.script(COMMIT, status("committed"))
        params = await one.carry_out()
        assert params == {"do_remote_prefill": True, "transfer_id": ID, "form": "canonical"}
        assert one.booking.stage == "landed"
        assert None not in (one.trace.granted_s, one.trace.committed_s)
        (body,) = await one.node.requested(PREFILL)
        sent = body["kv_transfer_params"]
        assert sent["do_remote_decode"] and sent["grant"]["transfer_id"] == ID
        assert len(body["prompt"]) == sent["handoff_tokens"] and body["max_tokens"] == 1
        assert ABORT not in one.kvd.bodies


async def test_calls_carry_the_context_of_their_spans() -> None:
    async with case() as one, peer() as target:
        member_of(one.fleet, F).kvd_url = target.url
        await target.script(PULL, NotNow("busy", 1.0))
        await one.node.script(PREFILL, PREFILLED)
        await one.kvd.script(COMMIT, status("committed"))
        await one.kvd.script(OPEN, msgspec.structs.replace(GRANT, traceparent="00-as-it-came"))
        copy = CacheCopy(A, F, 640, 1000, 0.1)
        one.booking.route = one.booking.route._replace(copies=(copy,))
        one.trace.context = one.trace.context._replace(state="vendor=1")
        await one.carry_out()
        (body,) = await one.node.requested(PREFILL)
        assert one.node.tracestates[PREFILL] == ["vendor=1"]
        await until(lambda: one.trace.prefilled_s is not None)
        course = one.trace.course
        sent = [
            *(one.kvd.traceparents[OPEN], target.traceparents[PULL]),
            one.node.traceparents[PREFILL],
        ]
        calls = [course.grant, course.copies, course.prefill]
        for (header,), call in zip(sent, calls, strict=True):
            assert call is not None and call.answered_s is not None
            assert header == call.traceparent
            context = parse_traceparent(header)
            assert context == TraceContext(one.trace.context.trace_id, call.span_id, False)
        assert body["kv_transfer_params"]["grant"]["traceparent"] == "00-as-it-came"


async def test_a_late_answer_of_an_earlier_attempt_changes_nothing_of_the_next_one() -> None:
    """The state was committed, and then the decode node was lost."""
    async with case() as one:
        await one.kvd.script(COMMIT, status("committed"))
        await one.carry_out()
        first = one.trace.course
        one.trace.begin_attempt(one.booking.route, one.clock.now())
        await one.node.script(PREFILL, PREFILLED)
        await until(lambda: first.prefill is not None and first.prefill.answered_s is not None)
        assert one.trace.cached_tokens == 0 and one.trace.prefilled_s is None


async def test_the_decode_engine_attaches_a_transfer_once_for_each_choice() -> None:
    async with case() as one:
        await one.node.script(PREFILL, PREFILLED)
        await one.kvd.script(COMMIT, status("committed"))
        one.request = replace(one.request, n=3)
        params = await one.carry_out()
        assert params["transfer_id"] == ID and params["attachments"] == 3
        (body,) = await one.node.requested(PREFILL)
        assert "n" not in body, "the prefill generates nothing"


async def test_the_commit_is_enough_while_the_prefill_has_not_answered() -> None:
    """The prefill's response arrives later, and what it reports is still recorded."""
    async with case() as one:
        await one.kvd.script(COMMIT, status("committed"))
        await one.carry_out()
        assert one.booking.stage == "landed" and one.trace.cached_tokens == 0
        await one.node.script(PREFILL, PREFILLED)
        await until(lambda: one.trace.cached_tokens == CACHED)
        assert ABORT not in one.kvd.bodies


async def test_the_prefill_node_is_free_before_the_transfer_commits() -> None:
    async with case() as one:
        carrying = asyncio.create_task(one.carry_out())
        await one.kvd.requested(COMMIT)
        far = member_of(one.fleet, F)
        assert one.fleet.work.prefills_at(far.node) == 1
        await one.node.script(PREFILL, PREFILLED)
        await until(lambda: one.fleet.work.prefills_at(far.node) == 0)
        assert one.booking.stage == "made" and one.trace.committed_s is None
        await one.kvd.script(COMMIT, status("committed"))
        await carrying


async def test_a_hand_off_that_is_not_carried_out_calls_nothing() -> None:
    async with case() as one:
        async with one.start():
            pass
        await one.hand_offs.background_calls.end()
        assert not one.kvd.bodies and not one.node.bodies


async def test_a_state_that_the_decode_engine_does_not_take_is_aborted() -> None:
    async with case() as one:
        await one.node.script(PREFILL, PREFILLED)
        await one.kvd.script(COMMIT, status("committed"))
        async with one.start() as hand_off:
            await one.prefill_with(hand_off)
        assert await one.kvd.requested(ABORT) == [{"reason": "given up by the gateway"}]


async def test_a_refused_grant_leaves_nothing() -> None:
    async with case() as one:
        await one.kvd.script(OPEN, NotNow("no room", 2.5))
        with pytest.raises(DecodeNodeFull, match="b: no room") as refused:
            await one.carry_out()
        assert (refused.value.node, refused.value.retry_after_s) == (B, 2.5)
        await one.hand_offs.background_calls.end()
        assert set(one.kvd.bodies) == {OPEN} and not one.node.bodies


async def test_an_error_of_the_kvd_is_the_prefill_nodes_to_avoid() -> None:
    """Its state may be incompatible with the decode node's."""
    async with case() as one:
        await one.kvd.script(OPEN, {"code": "incompatible", "message": "other format"}, 409)
        with pytest.raises(AttemptFailed, match="other format") as failed:
            await one.carry_out()
        assert failed.value.avoid == (F,) and one.fleet.board.node(B).usable
        assert failed.value.unsent
        await one.kvd.requested(ABORT)


async def test_nodes_whose_formats_differ_since_a_restart_hand_nothing_off() -> None:
    async with case() as one:
        upgraded = report("f", instance="second", revision="2")
        one.fleet.record_report(member_of(one.fleet, F), upgraded)
        one.fleet.record_card(member_of(one.fleet, F), NODE_CARD)
        with pytest.raises(AttemptFailed, match="formats differ") as failed:
            await one.carry_out()
        assert failed.value.unsent and failed.value.avoid == (F,)
        assert not one.kvd.bodies and not one.node.bodies


async def test_a_prefill_node_that_drains_gets_no_more_requests_and_is_expected_back() -> None:
    async with case() as one:
        error = {"error": {"message": "this node is shutting down", "code": "draining"}}
        await one.node.script(PREFILL, error, 503)
        with pytest.raises(AttemptFailed, match="shutting down") as failed:
            await one.carry_out()
        assert failed.value.unsent and failed.value.prefill and failed.value.avoid == (F,)
        assert not one.fleet.board.node(F).usable
        assert member_of(one.fleet, F).is_expected_back(one.clock.now())


async def test_a_node_that_has_exited_has_computed_nothing() -> None:
    async with case() as one:
        member_of(one.fleet, F).url = "http://127.0.0.1:1"  # no process listens
        with pytest.raises(AttemptFailed) as failed:
            await one.carry_out()
        assert failed.value.unsent and not one.fleet.board.node(F).usable


async def test_a_kvd_that_drops_the_connection_is_not_used() -> None:
    async with case() as one:
        one.kvd.lose(OPEN)
        with pytest.raises(AttemptFailed) as failed:
            await one.carry_out()
        assert failed.value.avoid == (B,) and not failed.value.prefill
        assert not one.fleet.board.node(B).usable
        await one.kvd.requested(ABORT)  # the answer is lost, and perhaps it was a grant


async def test_a_request_that_is_cancelled_before_its_grant_aborts_the_transfer() -> None:
    async with case() as one, peer() as slow:
        member_of(one.fleet, B).kvd_url = slow.url
        await slow.script(ABORT, status("failed"))
        carrying = asyncio.create_task(one.carry_out())
        (opened,) = await slow.requested(OPEN)
        carrying.cancel()
        await asyncio.wait([carrying])
        assert carrying.cancelled() and opened["transfer_id"] == ID
        assert await slow.requested(ABORT) == [{"reason": "given up by the gateway"}]


async def test_an_abort_that_gets_no_answer_is_repeated() -> None:
    async with case() as one:
        one.kvd.lose(OPEN)
        one.kvd.lose(ABORT)
        with pytest.raises(AttemptFailed):
            await one.carry_out()
        await one.kvd.requested(ABORT, times=2)


async def test_a_grant_of_another_transfer_is_refused_and_both_are_aborted() -> None:
    async with case() as one:
        other = TransferId("7f0c8a5e-2f8e-4d8c-9d0b-5a1f3f6f0002")
        await one.kvd.script(OPEN, msgspec.structs.replace(GRANT, transfer_id=other))
        await one.kvd.script(f"POST /v1/transfers/{other}/abort", status("failed"))
        with pytest.raises(AttemptFailed, match="granted another transfer") as failed:
            await one.carry_out()
        assert failed.value.avoid == (B,)
        await one.kvd.requested(ABORT)
        await one.kvd.requested(f"POST /v1/transfers/{other}/abort")


async def test_a_request_that_is_cancelled_during_the_prefill_aborts_its_transfer() -> None:
    async with case() as one:
        carrying = asyncio.create_task(one.carry_out())
        await one.node.requested(PREFILL)
        carrying.cancel()
        await asyncio.wait([carrying])
        assert carrying.cancelled()
        await one.kvd.requested(ABORT)


async def test_a_failed_prefill_is_the_nodes_fault_and_its_grant_is_aborted() -> None:
    async with case() as one:
        await one.node.script(PREFILL, {"error": {"message": "out of memory"}}, 503)
        with pytest.raises(AttemptFailed, match="out of memory") as failed:
            await one.carry_out()
        assert failed.value.avoid == (F,) and failed.value.prefill
        assert one.fleet.board.node(F).usable, "it answers"
        await one.kvd.requested(ABORT)


async def test_a_prefill_node_that_drops_the_connection_is_not_used() -> None:
    async with case() as one:
        one.node.lose(PREFILL)
        with pytest.raises(AttemptFailed) as failed:
            await one.carry_out()
        assert failed.value.avoid == (F,) and failed.value.prefill
        assert not failed.value.unsent, "it may have computed something"
        assert not one.fleet.board.node(F).usable


async def test_an_invalid_request_is_the_clients_error() -> None:
    async with case() as one:
        error = {"error": {"message": "too long", "code": "invalid", "param": "prompt"}}
        await one.node.script(PREFILL, error, 400)
        with pytest.raises(RequestError, match="too long") as refused:
            await one.carry_out()
        assert (refused.value.status, refused.value.param) == (400, "prompt")
        await one.kvd.requested(ABORT)


async def test_the_bytes_of_a_request_are_those_that_have_arrived() -> None:
    """Not those that its route expects, of which this one has some."""
    async with case() as one:
        assert one.booking.route.nbytes > 0
        await one.node.script(PREFILL, {"error": {"message": "too long", "code": "x"}}, 400)
        with pytest.raises(RequestError, match="too long"):
            await one.carry_out()
        await one.kvd.requested(ABORT)
        assert one.trace.nbytes == 0, "it was refused before a byte moved"
        await one.node.script(PREFILL, PREFILLED)
        await one.kvd.script(COMMIT, status("failed", 300))
        with pytest.raises(AttemptFailed):
            await one.carry_out()
        assert one.trace.nbytes == 300, "of a transfer that failed half way"
        await one.kvd.script(COMMIT, status("committed", 700))
        await one.carry_out()
        assert one.trace.nbytes == 1000, "of all attempts"


async def test_the_abort_of_a_transfer_reports_what_had_arrived() -> None:
    async with case() as one:
        await one.kvd.script(ABORT, status("granted", 400))
        await one.node.script(PREFILL, {"error": {"message": "no memory", "code": "x"}}, 500)
        with pytest.raises(AttemptFailed):
            await one.carry_out()
        await until(lambda: one.trace.nbytes == 400)


async def test_a_transfer_that_expires_at_the_receiver_fails_the_attempt() -> None:
    async with case() as one:
        await one.node.script(PREFILL, PREFILLED)
        await one.kvd.script(COMMIT, status("expired"))
        with pytest.raises(AttemptFailed, match="expired") as failed:
            await one.carry_out()
        assert failed.value.avoid == (F,) and failed.value.prefill
        await one.kvd.requested(ABORT)


async def test_a_commit_that_does_not_come_times_out() -> None:
    async with case(with_timeouts(prefill_s=0.2)) as one:
        with pytest.raises(AttemptFailed, match=r"not finished within 0\.2 s") as failed:
            await one.carry_out()
        assert failed.value.avoid == (F,) and failed.value.prefill
        await one.kvd.requested(ABORT)


@pytest.mark.parametrize(("silent", "prefill"), [(F, True), (B, False)])
@pytest.mark.parametrize("call", [OPEN, COMMIT])
async def test_a_node_that_falls_silent_during_the_hand_off_fails_the_attempt(
    silent: str, prefill: bool, call: str
) -> None:
    async with case() as one:
        if call == OPEN:
            one.kvd.silence(OPEN)
        carrying = asyncio.create_task(one.carry_out())
        await one.kvd.requested(call)
        fall_silent(one.fleet, one.clock, NodeId(silent))
        one.fleet.liveness.cancel_silent()
        with pytest.raises(AttemptFailed, match=f"{silent} has fallen silent") as failed:
            await carrying
        assert failed.value.avoid == (silent,) and failed.value.prefill == prefill
        assert failed.value.silent
        await one.kvd.requested(ABORT)


@pytest.mark.usefixtures("quick_checks")
async def test_a_link_that_is_cut_for_long_fails_the_attempt() -> None:
    async with case() as one:
        carrying = asyncio.create_task(one.carry_out())
        await one.kvd.requested(COMMIT)
        stats = LinkStats("b:7400", 1.0, 0, 0.0, 1000, 0, waited_s=1.0)
        one.fleet.record_report(member_of(one.fleet, F), report("f", links=(stats,)))
        one.fleet.update()
        one.clock.advance(TIMEOUTS.link_down_s + 0.1)
        with pytest.raises(AttemptFailed, match="the link from far is cut") as failed:
            await carrying
        assert failed.value.avoid == (F,) and failed.value.prefill
        assert failed.value.kind == CUT


@pytest.mark.usefixtures("quick_checks")
async def test_a_prefill_node_that_restarts_before_all_is_sent_fails_the_attempt() -> None:
    """It answers polls again before it has fallen silent, and nobody else would notice."""
    async with case() as one:
        await one.node.script(PREFILL, PREFILLED)
        carrying = asyncio.create_task(one.carry_out())
        await one.kvd.requested(COMMIT)
        restarted = report("f", instance="another process")
        one.fleet.record_report(member_of(one.fleet, F), restarted)
        with pytest.raises(AttemptFailed, match="its kvd has restarted") as failed:
            await carrying
        assert failed.value.avoid == (F,) and failed.value.prefill
        assert failed.value.kind == LOST
        await one.kvd.requested(ABORT)


async def test_a_prefix_copy_that_fails_only_costs_time() -> None:
    async with case() as one, peer() as target:
        member_of(one.fleet, F).kvd_url = target.url
        await target.script(PULL, NotNow("busy", 1.0))
        await one.node.script(PREFILL, PREFILLED)
        await one.kvd.script(COMMIT, status("committed"))
        copy = CacheCopy(A, F, 640, 1000, 0.1)
        one.booking.route = one.booking.route._replace(copies=(copy,))
        await one.carry_out()
        assert len(target.bodies[PULL]) == 1
        assert one.hand_offs.copies.tallies["route"].failed == 1
