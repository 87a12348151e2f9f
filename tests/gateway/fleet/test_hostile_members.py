"""One member sends what breaks its contract; the gateway and the other members serve on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from prfaas.config.gateway import GatewayTimeouts
from prfaas.contracts.kvd_api import Heartbeat, KvdReport
from prfaas.errors import RequestError
from prfaas.gateway.backend import GatewayBackend, running
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.links.monitor import LinkMonitor
from prfaas.gateway.fleet.liveness import Liveness
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.fleet.polling import Poller
from prfaas.gateway.planning.long_term_loop import LongTermLoop
from prfaas.gateway.planning.replication import Replication
from prfaas.gateway.planning.role_changes import RoleChanges
from prfaas.gateway.router import Router
from prfaas.types import HashEvent, NodeId
from tests.gateway.backends import FAR, HOME, deployment, in_use, problem, until
from tests.gateway.fleet.test_polling import (
    CARD,
    EVENTS,
    HEALTH,
    LOAD,
    METRICS,
    MODELS,
    PROMPT,
    STATS,
)
from tests.gateway.peers import Peer, peer
from tests.gateway.reports import report

ROLE = "POST /v1/role"


@dataclass(slots=True)
class Pair:
    """The kvd and the engine of one member."""

    name: str
    kvd: Peer
    engine: Peer

    async def answer(self) -> None:
        await self.kvd.script(STATS, report(self.name))
        await self.kvd.script(ROLE, {"role": "both", "epoch": 0})
        held: dict[str, list[bytes]] = {"full": [], "state": []}
        await self.kvd.script(EVENTS, page(self.name, 0, snapshot=held))
        await self.engine.script(MODELS, CARD)
        await self.engine.script(METRICS, LOAD)
        await self.engine.script(HEALTH, {})


@dataclass(slots=True)
class Case:
    """A gateway over two healthy members of the PD cluster and one hostile remote member."""

    backend: GatewayBackend
    healthy: list[Pair]
    hostile: Pair

    def state(self, name: str) -> dict[str, Any]:
        """Of the member, as `/prfaas/v1/state` shows it."""
        nodes = [n for c in self.backend.state()["clusters"] for n in c["nodes"]]
        (found,) = [n for n in nodes if n["kvd_url"] == self.pair(name).kvd.url]
        return dict(found)

    def pair(self, name: str) -> Pair:
        return next(pair for pair in (*self.healthy, self.hostile) if pair.name == name)

    async def check_alive(self) -> None:
        """Every member is still polled, and the healthy members are in use."""
        for one in (*self.healthy, self.hostile):
            for polled, path in ((one.kvd, STATS), (one.engine, METRICS), (one.kvd, EVENTS)):
                if one is not self.hostile or path == STATS:
                    await polled.requested(path, len(polled.bodies.get(path, ())) + 2)
        await until(lambda: {"a", "b"} <= {node["node"] for node in in_use(self.backend)})
        assert msgspec.json.encode(self.backend.state())


def page(name: str, next_seq: int, *events: HashEvent, **more: Any) -> dict[str, Any]:
    fixed = {"node": name, "instance": "first", "next_seq": next_seq}
    return {**fixed, "events": list(events), **more}


@asynccontextmanager
async def gateway() -> AsyncIterator[Case]:
    async with AsyncExitStack() as stack:
        pairs = [
            Pair(
                name,
                await stack.enter_async_context(peer()),
                await stack.enter_async_context(peer()),
            )
            for name in ("a", "b", "bad")
        ]
        for pair in pairs:
            await pair.answer()
        nodes = [{"url": pair.engine.url, "kvd_url": pair.kvd.url} for pair in pairs]
        made = deployment(nodes[:2], nodes[2:])
        quick = GatewayTimeouts(kvd_poll_s=0.01, node_poll_s=0.01)
        section = msgspec.structs.replace(made.gateway, timeouts=quick)
        made = msgspec.structs.replace(made, gateway=section)
        async with running(made, problem(made)) as backend:
            await until(lambda: len(in_use(backend)) == 3)
            yield Case(backend, pairs[:2], pairs[2])


async def test_a_load_that_is_not_a_count_is_its_members_problem(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway() as one:
        await one.hostile.engine.script(METRICS, "vllm:num_requests_running NaN\n")
        await until(lambda: not one.state("bad")["in_use"])
        await one.check_alive()
        await one.hostile.engine.script(METRICS, LOAD)
        await until(lambda: bool(one.state("bad")["in_use"]))
    assert caplog.text.count("num_requests_running") == 1


async def test_a_card_with_impossible_fields_is_its_members_problem() -> None:
    async with gateway() as one:
        await one.hostile.engine.script(METRICS, "broken", 500)  # the card is requested again
        await until(lambda: not one.state("bad")["alive"])
        await one.hostile.engine.script(
            MODELS, f'{{"data":[{{"id":"m","max_model_len":1{ZEROS}}}]}}'
        )
        await one.hostile.engine.script(METRICS, LOAD)
        await one.hostile.engine.requested(MODELS, len(one.hostile.engine.bodies[MODELS]) + 2)
        await one.check_alive()
        assert not one.state("bad")["alive"]


ZEROS = "0" * 4000


async def test_a_malformed_report_is_its_members_problem(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the decoder refuses, and what the checks refuse."""
    whole = msgspec.to_builtins(report("bad"))
    as_text = msgspec.json.encode(whole).decode()
    bodies = {
        "role": as_text[:-1] + ',"role":{"role":"both","epoch":1' + ZEROS + "}}",
        "next_seq": {**whole, "next_seq": {f"n{number}": 0 for number in range(50_000)}},
    }
    async with gateway() as one:
        for field, body in bodies.items():
            await one.hostile.kvd.script(STATS, body)
            await until(lambda: not one.state("bad")["in_use"])
            await one.check_alive()
            lines = [record.getMessage() for record in caplog.records]
            (line,) = [line for line in lines if one.hostile.kvd.url in line and field in line]
            assert len(line) < 1000
            await one.hostile.kvd.script(STATS, whole)
            await until(lambda: bool(one.state("bad")["in_use"]))


async def test_names_of_engines_that_are_gone_are_not_followed() -> None:
    async with gateway() as one:
        before = len(asyncio.all_tasks())
        whole = report("bad")
        gone = {NodeId(f"gone{n}"): 0 for n in range(500)}
        await one.hostile.kvd.script(STATS, msgspec.structs.replace(whole, next_seq=gone))
        await one.hostile.kvd.requested(STATS, len(one.hostile.kvd.bodies[STATS]) + 3)
        assert len(asyncio.all_tasks()) < before + 100
        assert one.state("bad")["in_use"]


@pytest.mark.parametrize("claimed", ["by an event", "by a report"])
async def test_a_member_cannot_speak_for_another_members_cache(claimed: str) -> None:
    """Neither with events under the other's name, nor by naming the other's cache as its own."""
    async with gateway() as one:
        fleet, hashes = one.backend.fleet, PROMPT.at(64)
        held = {"full": hashes[:2], "state": hashes[1:2]}
        await one.pair("a").kvd.script(EVENTS, page("a", 0, snapshot=held))
        await until(lambda: fleet.manager.match(PROMPT).node_tokens(NodeId("a")) == 2 * 64)
        await one.pair("a").kvd.script(EVENTS, page("a", 0))  # nothing more happens there
        bad = one.hostile.kvd
        if claimed == "by a report":
            engine = {"engine_id": "a", "url": None, "processes": 1}
            whole = msgspec.to_builtins(report("bad"))
            await bad.script(STATS, {**whole, "next_seq": {"a": 0}, "engines": [engine]})
        stolen = HashEvent(0, NodeId("a"), "full", 64, tuple(hashes[:2]), "removed")
        for number in range(3):
            await bad.script(EVENTS, page("a" if number else "bad", number + 1, stolen))
            await bad.requested(EVENTS, len(bad.bodies[EVENTS]) + 2)
        empty: dict[str, list[bytes]] = {"full": [], "state": []}
        await bad.script(EVENTS, page("a", 0, snapshot=empty))
        await bad.requested(EVENTS, len(bad.bodies[EVENTS]) + 2)
        assert fleet.manager.match(PROMPT).node_tokens(NodeId("a")) == 2 * 64
        await one.check_alive()


async def test_a_member_with_a_bad_second_pool_keeps_nothing_in_the_index() -> None:
    """A second pool that is honest is followed; the member is out of use when it turns hostile."""
    async with gateway() as one:
        whole = msgspec.to_builtins(report("bad", native="vllm-a"))
        await one.hostile.kvd.script(STATS, whole)
        await until(lambda: set(one.state("bad")["forms"]) == {"canonical", "native"})
        assert one.state("bad")["in_use"] and len(one.backend.fleet.sets) == 1
        await one.hostile.kvd.script(STATS, {**whole, "pool": None})
        await until(lambda: "more_pools" in one.state("bad")["problems"].get("kvd", ""))
        await one.check_alive()


async def test_a_gap_in_the_events_is_filled_from_a_snapshot() -> None:
    async with gateway() as one:
        fleet, hashes, bad = one.backend.fleet, PROMPT.at(64), one.hostile.kvd

        def cached() -> int:
            return fleet.manager.match(PROMPT).node_tokens(NodeId("bad"))

        held = {"full": hashes[:2], "state": hashes[1:2]}
        await bad.script(EVENTS, page("bad", 7, snapshot=held))
        await until(lambda: cached() == 2 * 64)
        asked = len(bad.queries[EVENTS])
        await bad.script(EVENTS, page("bad", 9))  # without events 7 and 8
        await until(lambda: "-1" in [query["since"] for query in bad.queries[EVENTS][asked:]])
        held = {"full": hashes[:5], "state": hashes[4:5]}
        await bad.script(EVENTS, page("bad", 9, snapshot=held))
        await until(lambda: cached() == 5 * 64)


async def test_the_state_shows_the_sets_and_why_a_member_is_not_used() -> None:
    async with gateway() as one:
        upgraded = report("a", instance="second", revision="2")
        await one.pair("a").kvd.script(STATS, upgraded)
        await until(lambda: len(one.backend.state()["sets"]) == 2)
        sets = {s["format"]["revision"]: set(s["nodes"]) for s in one.backend.state()["sets"]}
        assert sets == {"1": {"b", "bad"}, "2": {"a"}}
        assert all(one.state(name)["not_used"] is None for name in ("a", "b", "bad"))
        replace, other = msgspec.structs.replace, report("bad", instance="second")
        assert other.pool is not None
        pool = replace(other.pool, compat=replace(other.pool.compat, model="x"))
        await one.pair("bad").kvd.script(STATS, replace(other, pool=pool))
        await until(lambda: not one.state("bad")["in_use"])
        assert "the deployment serves m (" in one.state("bad")["not_used"]
        assert one.state("bad")["incompatible"] == [one.state("bad")["not_used"]]
        assert one.state("a")["in_use"] and one.state("b")["in_use"]


async def test_a_pd_member_that_claims_one_format_after_another_harms_no_other() -> None:
    async with gateway() as one:
        fleet, kvd, replace = one.backend.fleet, one.pair("b").kvd, msgspec.structs.replace

        def revision() -> str:
            found = fleet.members.format_of(NodeId("b"))
            return "" if found is None else found.revision

        for number in range(1, 30):
            claimed = report("b", instance=f"{number}", revision=f"{number}")
            assert claimed.pool is not None
            compat = replace(claimed.pool.compat, block_tokens=number)
            pool = replace(claimed.pool, compat=compat, block_tokens=number)
            await kvd.script(STATS, replace(claimed, pool=pool))
            await until(lambda wanted=f"{number}": revision() == wanted)  # type: ignore[misc]
            assert one.state("a")["in_use"] and one.state("bad")["in_use"]
            assert len(fleet.sets) <= 2 and len(fleet.members.block_sizes()) <= 2
        claimed = report("b", instance="30", revision="other")
        await kvd.script(STATS, claimed)
        await until(lambda: revision() == "other")
        same = report("b", instance="30", revision="another")
        await kvd.script(STATS, same)
        await until(lambda: "format" in one.state("b")["problems"].get("kvd", ""))
        assert not one.state("b")["in_use"] and one.state("b")["not_used"]
        await kvd.script(STATS, claimed)
        await one.check_alive()


async def test_a_kvd_url_that_is_not_one_is_refused() -> None:
    async with gateway() as one:
        with pytest.raises(RequestError) as refused:
            await one.backend.register(Heartbeat("http://h:7401/v1", FAR, report("n")))
        assert refused.value.status == 400 and refused.value.param == "kvd_url"
        assert len(one.backend.fleet.members) == 3
        await one.backend.register(Heartbeat("http://bücher.example:7401/", FAR, report("n")))
        assert len(one.backend.fleet.members) == 4


@pytest.mark.grid
async def test_the_number_of_registered_members_is_bounded() -> None:
    async with gateway() as one:
        with pytest.raises(RequestError) as refused:
            for port in range(1, 20_000):
                await one.backend.register(Heartbeat(f"http://127.0.0.1:{port}", HOME, report("n")))
        assert refused.value.status == 503
        await one.check_alive()


# Defects of the gateway itself --------------------------------------------------------------------

PARTS: list[tuple[str, type, str]] = [
    ("short_term", Router, "adjust"),
    ("short_term", LinkMonitor, "update"),
    ("liveness", Liveness, "cancel_silent"),
    ("liveness", Liveness, "changed_verdicts"),
    ("short_term", Poller, "drop_expired"),
    ("long_term", LongTermLoop, "_usable"),
    ("long_term", RoleChanges, "_apply_role"),
    ("replication", Replication, "_replicate"),
    ("replication", Replication, "_evacuate_leaving"),
]


async def test_a_defect_in_one_loop_leaves_the_gateway_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a defect")

    async with gateway() as one:
        counts = one.backend.fleet.failures.counts

        def has_failed(loop: str, before: int) -> Callable[[], bool]:
            return lambda: counts[loop] >= before + 3

        for loop, part, method in PARTS:
            before = dict(counts)
            monkeypatch.setattr(part, method, broken)
            await until(has_failed(loop, before.get(loop, 0)))
            await one.check_alive()
            monkeypatch.undo()
            assert {name for name in counts if counts[name] != before.get(name, 0)} == {loop}
        metrics = {m.name: m.samples for m in one.backend.metrics()}
        shown = {s.labels["loop"]: s.value for s in metrics["prfaas_gateway_loop_failures"]}
        assert shown == counts and shown.keys() == {loop for loop, _, _ in PARTS}
        await one.check_alive()


async def test_a_defect_in_the_handling_of_one_member_takes_only_it_out_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record_report = Fleet.record_report

    def broken(fleet: Fleet, member: Member, found: KvdReport) -> None:
        if found.node == "bad":
            raise ZeroDivisionError("a defect")
        record_report(fleet, member, found)

    async with gateway() as one:
        monkeypatch.setattr(Fleet, "record_report", broken)
        await until(lambda: not one.state("bad")["in_use"])
        assert one.state("bad")["problems"] == {"kvd": "a defect"}
        await one.check_alive()
        monkeypatch.undo()
        await until(lambda: bool(one.state("bad")["in_use"]))
        assert one.state("bad")["problems"] == {}
