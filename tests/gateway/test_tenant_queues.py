"""Requests of several tenants wait in the gateway, and share the nodes fairly, whatever the policy.

Real routers and fleets; no process and no socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from prfaas.config.gateway import GatewaySection, GatewayTimeouts, TenantSection
from prfaas.errors import RequestError
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.placement import PlacementRequest
from prfaas.gateway.router import Router
from prfaas.scheduler.board import NodeReport
from prfaas.scheduler.request import Request
from prfaas.types import NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import until
from tests.gateway.fleets import LONG, SHORT, A, B, C, F, fleet_and_router, placement, step

POLICIES = ["paper", "adaptive", "local", "remote"]
TENANTS = ("flood", "other")


class Deployment:
    """A fleet whose prefills end one after the other, as the test advances the clock."""

    def __init__(self, policy: str, limits: GatewaySection | None, queue_s: float) -> None:
        self.clock = FakeClock()
        self.fleet, self.router = fleet_and_router(
            self.clock,
            policy=policy,
            adaptive={"queue_s": queue_s},
            tenants=TENANTS,
            limits=limits or GatewaySection(),
            late_since=lambda since_s: self.clock.now() - since_s,  # no node is ever silent
        )
        self.sent: list[PlacementRequest] = []
        self.dispatched: list[tuple[str, Booking]] = []
        self.running: dict[NodeId, list[tuple[float, Booking]]] = {}
        self.seed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, tenant: str, tokens: int = LONG, count: int = 1) -> None:
        """Returns when each of the requests is dispatched or waits."""
        for _ in range(count):
            self.seed += 1
            wanted = placement(tokens, self.clock, tenant=tenant, seed=self.seed)
            self.sent.append(wanted)
            self._tasks.add(asyncio.create_task(self._serve(wanted)))
            await asyncio.sleep(0)
            await until(
                lambda: len(self.router.waiting_room) + len(self.dispatched) == len(self.sent)
            )

    async def _serve(self, wanted: PlacementRequest) -> None:
        booking = await self.router.place(wanted, 3600.0)
        self.dispatched.append((wanted.tenant, booking))
        self.running.setdefault(booking.route.prefill, []).append((self.clock.now(), booking))

    async def end_first_prefill(self) -> None:
        """The prefill that ends first ends, and its response ends soon after. Every request that
        this lets in is dispatched."""
        ends: list[tuple[float, NodeId]] = []
        for node, jobs in self.running.items():
            if jobs:
                sent_s, booking = jobs[0]
                ends.append((sent_s + booking.route.prefill_s, node))
        at_s, node = min(ends)
        self.clock.advance(max(0.0, at_s - self.clock.now()))
        _, booking = self.running[node].pop(0)
        if self.running[node]:
            _, following = self.running[node][0]
            self.running[node][0] = (self.clock.now(), following)
        booking.landed(self.clock.now())
        self.router.close(booking)
        step(self.fleet, self.router)
        await asyncio.sleep(0)
        await until(lambda: len(self.dispatched) == self.placed)
        self.router.waiting_room.check()

    @property
    def placed(self) -> int:
        return sum(wanted.booking is not None for wanted in self.sent)

    def order(self) -> str:
        return " ".join(tenant for tenant, _ in self.dispatched)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def running(
    policy: str, limits: GatewaySection | None = None, queue_s: float = 0.5
) -> AsyncIterator[Deployment]:
    deployment = Deployment(policy, limits, queue_s)
    try:
        yield deployment
    finally:
        await deployment.close()


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_flood_waits_in_the_gateway_and_another_tenant_overtakes_it(policy: str) -> None:
    async with running(policy) as deployment:
        await deployment.send("flood", count=30)
        before = len(deployment.dispatched)
        assert before < 8, "the queues of the nodes stay short"
        await deployment.send("other", count=3)
        while deployment.order().count("other") < 3:
            await deployment.end_first_prefill()
        since = deployment.order().split()[before:]
        # The tenants take turns: the flood had one more request than the other tenant at most, for
        # each cluster that prefills.
        assert since.count("flood") <= 3 + 2


@pytest.mark.parametrize("policy", POLICIES)
async def test_weights_divide_the_work(policy: str) -> None:
    sections = {"flood": TenantSection(weight=1.0), "other": TenantSection(weight=3.0)}
    async with running(policy, GatewaySection(tenants=sections)) as deployment:
        await deployment.send("flood", count=40)
        await deployment.send("other", count=40)
        begun = len(deployment.dispatched)
        while len(deployment.dispatched) < begun + 32:
            await deployment.end_first_prefill()
        since = deployment.order().split()[begun : begun + 32]
        assert 24 - 3 <= since.count("other") <= 24 + 3


@pytest.mark.parametrize("policy", POLICIES)
async def test_no_node_is_idle_while_a_request_waits_that_it_could_serve(policy: str) -> None:
    """Whatever the order between tenants is."""
    async with running(policy) as deployment:
        await deployment.send("flood", count=12)
        await deployment.send("other", SHORT, count=6)
        await deployment.send("flood", SHORT, count=6)
        while deployment.placed < len(deployment.sent):
            waiting = set(deployment.router.waiting_room.queues())
            assert waiting, "what is not placed waits"
            for cluster, node in (deployment.fleet.homes[0], A), (deployment.fleet.remotes[0], F):
                if cluster in waiting:
                    assert deployment.running.get(node), f"{node} is idle"
            await deployment.end_first_prefill()


async def test_a_node_that_is_done_earlier_than_predicted_gets_work_at_once() -> None:
    """Its next report would come a second later."""
    async with running("paper") as deployment:
        await deployment.send("flood", count=5)
        begun = len(deployment.dispatched)
        assert begun < 5
        for _, booking in list(deployment.dispatched):
            booking.landed(deployment.clock.now())  # no time has passed
        await until(lambda: len(deployment.dispatched) > begun)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_free_node_goes_to_the_tenant_that_was_given_less(policy: str) -> None:
    """A node has become free without an event, when a request of the other tenant arrives."""
    async with running(policy, queue_s=0.0) as deployment:
        while not deployment.router.waiting_room:
            await deployment.send("flood")
        await deployment.send("other")
        (last,) = [wanted for wanted in deployment.sent[:-1] if wanted.booking is None]
        assert deployment.router.waiting_room.remove(last)  # its client has left
        deployment.sent.remove(last)
        begun = len(deployment.dispatched)
        assert "other" not in deployment.order()
        deployment.clock.advance(60.0)
        await deployment.send("flood")
        await until(lambda: len(deployment.dispatched) == deployment.placed)
        assert deployment.dispatched[begun][0] == "other"


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_flood_that_has_waited_longer_does_not_delay_another_tenant(policy: str) -> None:
    async with running(policy, queue_s=0.0) as deployment:
        await deployment.send("flood", count=20)
        begun = len(deployment.dispatched)
        deployment.clock.advance(60.0)
        await deployment.send("other")
        await until(lambda: len(deployment.dispatched) == deployment.placed > begun)
        assert deployment.dispatched[begun][0] == "other"


@pytest.mark.parametrize("policy", POLICIES)
async def test_requests_wait_while_no_decode_node_has_a_free_slot(policy: str) -> None:
    async with running(policy) as deployment:
        board = deployment.fleet.board
        for node in (B, C):  # full of the requests of another gateway
            board.record_report(node, full_report(board.node(node).slots, deployment.clock))
        await deployment.send("flood", count=3)
        await deployment.send("other", count=1)
        assert not deployment.dispatched and len(deployment.router.waiting_room) == 4
        board.record_report(C, full_report(board.node(C).slots - 1, deployment.clock))
        step(deployment.fleet, deployment.router)
        await until(lambda: len(deployment.dispatched) > 0)
        deployment.router.waiting_room.check()


@pytest.mark.parametrize("policy", POLICIES)
async def test_choices_that_fill_the_decode_nodes_keep_no_other_tenant_waiting(policy: str) -> None:
    """Each choice counts. The tenant's next request waits here, and that of another one does not,
    although all choices of the first have arrived at the nodes."""
    async with running(policy) as deployment:
        router, board, clock = deployment.router, deployment.fleet.board, deployment.clock
        slots = board.node(B).slots

        def asked(tenant: str, sequences: int = 1) -> PlacementRequest:
            deployment.seed += 1
            return placement(SHORT, clock, tenant=tenant, seed=deployment.seed, sequences=sequences)

        for _ in range(2):
            many = asked("flood", 2 * slots)
            assert router.try_dispatch(many) is None and many.booking is not None
            many.booking.landed(clock.now())
            clock.advance(60.0)
        assert {board.node(node).active for node in (B, C)} == {2 * slots}
        for node in (B, C):
            board.record_report(node, full_report(2 * slots, clock))
        hold = router.try_dispatch(asked("flood"))
        assert hold is not None and hold.reason == "no decode node has a free slot"
        assert router.try_dispatch(asked("other")) is None


async def test_the_end_of_a_response_lets_the_next_request_in() -> None:
    async with running("paper") as deployment:
        board = deployment.fleet.board
        await deployment.send("flood")
        (_, first) = deployment.dispatched[0]
        first.landed(deployment.clock.now())
        for node in (B, C):
            board.record_report(node, full_report(board.node(node).slots, deployment.clock))
        await deployment.send("other")
        assert len(deployment.dispatched) == 1
        deployment.router.close(first)
        await until(lambda: len(deployment.dispatched) == 2)


async def test_requests_that_one_node_serves_alone_are_held_when_it_is_busy() -> None:
    """Prompt log-probabilities are made where the request is decoded. Room at the nodes that
    prefill does not help these requests."""
    async with running("paper") as deployment:
        router, clock = deployment.router, deployment.clock

        def alone(tenant: str) -> PlacementRequest:
            wanted = placement(LONG, clock, tenant=tenant)
            wanted.request = Request(0, LONG, clock.now(), prompt_logprobs=True)
            return wanted

        placed = [alone("flood") for _ in range(6)]
        holds = [router.try_dispatch(wanted) for wanted in placed]
        assert holds[:2] == [None, None], "one at each decode node"
        assert all(hold is not None and hold.cluster is None for hold in holds[2:])
        clock.advance(60.0)
        assert router.try_dispatch(alone("other")) is None


@pytest.mark.parametrize("policy", POLICIES)
async def test_with_one_tenant_the_scheduler_decides_alone(policy: str) -> None:
    """The same requests, at the same times, with and without the name of a tenant."""
    orders = []
    for tenants, tenant in ((("",), ""), (("only",), "only")):
        clock = FakeClock()
        _, router = fleet_and_router(clock, policy=policy, tenants=tenants)
        orders.append(list(decisions(router, clock, tenant)))
    assert orders[0] == orders[1]
    if policy != "adaptive":
        assert all("wait" not in decision for decision in orders[0]), "`route` holds nothing"


def decisions(router: Router, clock: FakeClock, tenant: str) -> Iterable[str]:
    for index in range(40):
        wanted = placement(LONG if index % 3 else SHORT, clock, tenant=tenant)
        hold = router.try_dispatch(wanted)
        if hold is not None:
            yield f"wait for {hold.cluster}"
            router.waiting_room.put(wanted, hold, tenant)
        else:
            assert wanted.booking is not None
            route = wanted.booking.route
            yield f"{route.prefill} {route.decode}"
        clock.advance(0.05)


async def test_a_full_queue_of_one_tenant_leaves_places_for_another() -> None:
    timeouts = GatewayTimeouts(queue_retry_after_s=7.0)
    limits = GatewaySection(max_queued=8, timeouts=timeouts)
    async with running("paper", limits) as deployment:
        for node in (A, B, C):
            deployment.fleet.drain(node)
        await deployment.send("flood", count=4)
        with pytest.raises(RequestError, match="half of gateway.max_queued") as refused:
            await deployment.router.place(placement(LONG, deployment.clock, tenant="flood"), 60.0)
        assert (refused.value.status, refused.value.code) == (429, "tenant_limit")
        assert refused.value.retry_after_s == 7.0
        await deployment.send("other", count=4)
        assert deployment.router.tenants.state()["other"]["queued"] == 4
        assert deployment.router.tenants.state()["flood"]["refused"] == 1


def full_report(decoding: int, clock: FakeClock) -> NodeReport:
    return NodeReport(clock.now(), 0.0, decoding)
