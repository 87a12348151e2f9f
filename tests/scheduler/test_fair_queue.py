"""The waiting room between tenants: start-time fair queueing over prefill work."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas.scheduler.waiting import (
    MAX_REFUSALS,
    MAX_REFUSALS_OF_ALL,
    FairClock,
    HeldWork,
    Hold,
    WaitingRoom,
    length_class,
)
from prfaas.types import ClusterId

FAR, NEAR = ClusterId("far"), ClusterId("near")
works = st.floats(0.01, 30)
weights = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 7.0])
holds = st.builds(
    Hold, st.just("test"), st.sampled_from([FAR, NEAR, None]), works, st.floats(0, 100)
)


def hold(work_s: float = 1.0, precedence: float = 0.0, cluster: ClusterId | None = FAR) -> Hold:
    return Hold("test", cluster, work_s, precedence)


# One tenant ---------------------------------------------------------------------------------------


class OneQueue:
    """The order of a waiting room that knows no tenants: one heap per cluster."""

    def __init__(self) -> None:
        self.heaps: dict[ClusterId | None, list[tuple[float, int, float, int]]] = {}
        self.serial = 0

    def put(self, item: int, wanted: Hold) -> None:
        self.serial += 1
        heap = self.heaps.setdefault(wanted.cluster, [])
        heappush(heap, (wanted.precedence, self.serial, wanted.work_s, item))

    def remove(self, item: int) -> None:
        for heap in self.heaps.values():
            for place, entry in enumerate(heap):
                if entry[3] is item:
                    del heap[place]
                    heapify(heap)
                    return

    def retry(self, refusing: dict[int, Hold], room: int) -> list[int]:
        tried: list[int] = []
        for cluster in [cluster for cluster, heap in self.heaps.items() if heap]:
            refused: list[tuple[int, Hold]] = []
            placed = 0
            while self.heaps[cluster] and (cluster is None or placed < room):
                item = heappop(self.heaps[cluster])[3]
                tried.append(item)
                if item in refusing:
                    refused.append((item, refusing[item]))
                    if len(refused) == MAX_REFUSALS:
                        break
                else:
                    placed += 1
            for item, wanted in refused:
                self.put(item, wanted)
        return tried

    def work(self) -> dict[ClusterId, HeldWork]:
        found: dict[ClusterId, HeldWork] = {}
        for cluster, heap in self.heaps.items():
            if heap and cluster is not None:
                held = HeldWork(first=heap[0][0])
                for _, _, work_s, _ in heap:
                    held = held.add(length_class(work_s), work_s)
                found[cluster] = held
        return found


class OneTenant(RuleBasedStateMachine):
    """A room with one tenant, however it is called, keeps the order of one queue per cluster.
    Dispatches are recorded as a gateway records them, and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.room: WaitingRoom[int] = WaitingRoom(lambda tenant: 3.0)
        self.model = OneQueue()
        self.items: list[int] = []

    @rule(wanted=holds)
    def put(self, wanted: Hold) -> None:
        item = len(self.items) + 1000  # large numbers are not interned: `is` finds only this one
        self.items.append(item)
        self.room.put(item, wanted, "only")
        self.model.put(item, wanted)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.items:
            item = data.draw(st.sampled_from(self.items))
            self.room.remove(item)
            self.model.remove(item)

    @rule(
        refusals=st.lists(st.none() | holds, max_size=12),
        room=st.integers(0, 4),
        work_s=works,
    )
    def retry(self, refusals: list[Hold | None], room: int, work_s: float) -> None:
        refusing = {
            item: wanted
            for item, wanted in zip(self.items, refusals, strict=False)
            if wanted is not None
        }
        tried: list[int] = []
        placed: dict[ClusterId | None, int] = {}
        now: list[ClusterId | None] = [None]

        def has_room(cluster: ClusterId) -> bool:
            now[0] = cluster
            return placed.get(cluster, 0) < room

        def dispatch(item: int) -> Hold | None:
            tried.append(item)
            if item in refusing:
                return refusing[item]
            placed[now[0]] = placed.get(now[0], 0) + 1
            self.room.record_dispatch(FAR, work_s, "only")
            return None

        # A queue without a cluster is retried without a question for room.
        expected = self.model.retry(refusing, room)
        self.room.retry(dispatch, has_room)
        assert tried == expected

    @invariant()
    def same(self) -> None:
        self.room.check()
        assert len(self.room) == sum(map(len, self.model.heaps.values()))
        modelled = self.model.work()
        assert self.room.work.keys() == modelled.keys()
        for cluster, held in self.room.work.items():
            assert held.first == modelled[cluster].first
            assert held.by_class == pytest.approx(modelled[cluster].by_class, abs=1e-6)
        assert self.room.work_before("only") == self.room.work
        assert not self.room.others_are_before(FAR, "only")


TestOneTenant = OneTenant.TestCase
TestOneTenant.settings = settings(max_examples=20, stateful_step_count=20)


# Several tenants ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Served:
    work_s: float = 0.0
    largest_s: float = 0.0


@settings(max_examples=25)
@given(st.lists(weights, min_size=2, max_size=6), st.data())
def test_work_stays_within_one_item_of_proportional_shares(
    given_weights: list[float], data: st.DataObject
) -> None:
    """While all tenants wait. Some dispatches have waited, others have not."""
    tenants = {f"t{index}": weight for index, weight in enumerate(given_weights)}
    room: WaitingRoom[tuple[str, float]] = WaitingRoom(tenants.__getitem__)
    served = {tenant: Served() for tenant in tenants}
    total = sum(tenants.values())

    def arrive(tenant: str) -> None:
        work_s = data.draw(works)
        room.put((tenant, work_s), hold(work_s, data.draw(st.floats(0, 9))), tenant)

    for tenant in tenants:
        arrive(tenant)
        arrive(tenant)
    for _ in range(30):
        found = room.take(FAR)
        assert found is not None
        tenant, work_s = found
        room.record_dispatch(FAR, work_s, tenant)
        served[tenant].work_s += work_s
        served[tenant].largest_s = max(served[tenant].largest_s, work_s)
        arrive(tenant)  # every tenant always has two requests that wait
        room.check()
        together = sum(one.work_s for one in served.values())
        for name, one in served.items():
            share_s = together * tenants[name] / total
            assert one.work_s <= share_s + one.largest_s + 1e-6
            for other, two in served.items():
                ahead = one.work_s / tenants[name] - two.work_s / tenants[other]
                assert ahead <= one.largest_s / tenants[name] + 1e-6


@given(works, st.integers(1, 50))
def test_a_tenant_that_was_idle_has_no_credit(work_s: float, count: int) -> None:
    """However much the others did meanwhile, also without waiting, the tenants take turns from its
    first request on."""
    room: WaitingRoom[str] = WaitingRoom()
    room.record_dispatch(FAR, work_s, "idle")
    for _ in range(count):
        room.record_dispatch(FAR, work_s, "busy")
    for _ in range(6):
        room.put("busy", hold(work_s), "busy")
        room.put("idle", hold(work_s), "idle")
    order = []
    for _ in range(12):
        tenant = room.take(FAR)
        assert tenant is not None
        order.append(tenant)
        room.record_dispatch(FAR, work_s, tenant)
    # The one that was idle may be first, and never gets two in a row.
    assert all(one != two for one, two in pairwise(order[1:])), order
    assert order[:2].count("idle") >= 1


def test_dispatches_that_did_not_wait_count() -> None:
    room: WaitingRoom[str] = WaitingRoom()
    room.put("b1", hold(), "b")
    room.record_dispatch(FAR, 1.0, "b")
    room.record_dispatch(FAR, 5.0, "a")  # as if it had found a free node
    room.put("a1", hold(precedence=-1.0), "a")
    room.put("b2", hold(), "b")
    assert room.others_are_before(FAR, "a") and not room.others_are_before(FAR, "b")
    assert [room.take(FAR) for _ in range(3)] == ["b1", "b2", "a1"]


def test_a_flood_does_not_delay_the_first_request_of_another_tenant() -> None:
    room: WaitingRoom[str] = WaitingRoom()
    for index in range(100):
        room.put(f"flood{index}", hold(precedence=float(index)), "flood")
    assert room.take(FAR) == "flood0"
    room.record_dispatch(FAR, 1.0, "flood")
    room.put("other", hold(precedence=1e6), "other")
    assert room.take(FAR) == "other"


def test_each_cluster_has_its_own_shares() -> None:
    """A tenant that uses one cluster much is not behind at another."""
    room: WaitingRoom[str] = WaitingRoom()
    room.put("x", hold(cluster=NEAR), "b")
    room.record_dispatch(FAR, 1000.0, "a")
    room.put("y", hold(cluster=NEAR, precedence=-1.0), "a")
    assert room.take(NEAR) == "y"


def test_requests_without_a_cluster_take_turns() -> None:
    """As when nodes come back after an outage."""
    room: WaitingRoom[str] = WaitingRoom()
    for index in range(50):
        room.put(f"flood{index}", hold(0.0, float(index), None), "flood")
    for index in range(2):
        room.put(f"other{index}", hold(0.0, 100.0 + index, None), "other")
    placed: list[str] = []

    def dispatch(item: str) -> Hold | None:
        if len(placed) < 4:
            placed.append(item)
            return None
        return hold()

    room.retry(dispatch, lambda cluster: False)
    assert placed == ["flood0", "other0", "flood1", "other1"]
    room.check()


def test_refusals_of_one_tenant_do_not_stop_another() -> None:
    """One tenant's requests are refused for a reason of their own."""
    room: WaitingRoom[str] = WaitingRoom()
    for index in range(10):
        room.put(f"a{index}", hold(precedence=float(index)), "a")
    room.put("b", hold(precedence=100.0), "b")
    placed: list[str] = []
    tried: list[str] = []

    def dispatch(item: str) -> Hold | None:
        tried.append(item)
        return None if item == "b" else hold(precedence=float(item[1:]))

    room.retry(dispatch, lambda cluster: True, placed.append)
    assert placed == ["b"] and len(tried) == MAX_REFUSALS + 1
    assert len(room) == 10
    room.check()


def test_a_blocked_tenant_is_not_retried_and_does_not_stop_another() -> None:
    room: WaitingRoom[str] = WaitingRoom()
    full = {"east"}
    room.is_blocked = lambda cluster, tenant, work_s: cluster == FAR and tenant in full
    for number in range(3):
        room.put(f"east-{number}", hold(precedence=0.0), "east")
        room.put(f"west-{number}", hold(precedence=1.0), "west")
    assert room.wanting(FAR) == ["west"]
    assert not room.others_are_before(FAR, "west")
    tried: list[str] = []

    def dispatch(item: str) -> None:
        tried.append(item)
        room.record_dispatch(FAR, 1.0, item.split("-")[0])

    room.retry(dispatch, lambda cluster: True)
    assert tried == ["west-0", "west-1", "west-2"]
    assert room.wanting(FAR) == [] and room.count(FAR, "east") == 3
    full.clear()
    room.retry(dispatch, lambda cluster: True)
    assert len(room) == 0
    room.check()


def test_refusals_of_many_tenants_are_bounded() -> None:
    room: WaitingRoom[str] = WaitingRoom()
    for tenant in range(50):
        room.put(str(tenant), hold(), str(tenant))
    tried: list[str] = []

    def refuse(item: str) -> Hold:
        tried.append(item)
        return hold()

    room.retry(refuse, lambda cluster: True)
    assert len(tried) == MAX_REFUSALS_OF_ALL and len(room) == 50
    room.check()


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), holds), max_size=25),
    st.lists(st.sampled_from(["remove", "retry", "take"]), max_size=25),
    st.data(),
)
def test_the_books_agree_with_the_items(
    items: list[tuple[str, Hold]], actions: list[str], data: st.DataObject
) -> None:
    room: WaitingRoom[int] = WaitingRoom(lambda tenant: {"a": 1.0, "b": 2.0, "c": 0.5}[tenant])
    left: dict[int, tuple[str, Hold]] = {}
    for index, (tenant, wanted) in enumerate(items):
        left[index + 1000] = tenant, wanted
    for item in left:
        room.put(item, left[item][1], left[item][0])

    def dispatch(item: int) -> Hold | None:
        tenant, _ = left[item]
        again = data.draw(st.none() | holds)
        if again is None:
            room.record_dispatch(FAR, left.pop(item)[1].work_s, tenant)
        else:
            left[item] = tenant, again
        return again

    for action in actions:
        if action == "retry":
            room.retry(dispatch, lambda cluster: True)
        elif action == "take":
            found = room.take(data.draw(st.sampled_from([FAR, NEAR, None])))
            assert found is None or left.pop(found)
        elif left:
            item = data.draw(st.sampled_from(sorted(left)))
            known = next(entry for entry in left if entry == item)
            assert room.remove(known)
            del left[item]
        room.check()
        assert len(room) == len(left)
        for cluster, held in room.work.items():
            waiting = [wanted for _, wanted in left.values() if wanted.cluster == cluster]
            assert held.total_s == pytest.approx(sum(w.work_s for w in waiting), abs=1e-6)
            for tenant in "abc":
                before = room.work_before(tenant)[cluster]
                own = [w.work_s for t, w in left.values() if (t, w.cluster) == (tenant, cluster)]
                assert sum(own) - 1e-6 <= before.total_s <= held.total_s + 1e-6


def test_a_tenant_sees_its_own_queue_and_the_share_of_others() -> None:
    room: WaitingRoom[str] = WaitingRoom(lambda tenant: 2.0 if tenant == "a" else 1.0)
    for _ in range(10):
        room.put("a", hold(1.0, 5.0), "a")
    room.put("b", hold(1.0, 7.0), "b")
    assert room.work[FAR].total_s == 11.0
    assert room.work_before("c")[FAR] == HeldWork(), "its request would be the first"
    before = room.work_before("b")[FAR]
    assert (before.total_s, before.first) == (3.0, 7.0), "two of the other, for one of its own"
    assert room.work_before("a")[FAR].total_s == 11.0


def test_old_tags_are_forgotten() -> None:
    clock = FairClock()
    for index in range(100):
        clock.charge(f"t{index}", 1.0, waits=False)
        clock.charge("busy", 2.0, waits=False)
    clock.forget(())
    assert set(clock.tags) <= {"busy", "t99"}


def test_the_work_before_a_tenant_follows_its_share_of_the_cluster() -> None:
    room: WaitingRoom[str] = WaitingRoom()
    room.share = lambda cluster, tenant: {"a": 6.0, "b": 2.0}[tenant]
    room.put("a1", Hold("", FAR, 10.0, 0.0), "a")
    room.put("b1", Hold("", FAR, 2.0, 0.0), "b")
    of_b, of_a = room.work_before("b")[FAR], room.work_before("a")[FAR]
    assert (of_b.own_s, of_b.total_s) == (2.0, pytest.approx(2.0 + 6.0))
    assert (of_a.own_s, of_a.total_s) == (10.0, pytest.approx(10.0 + 2.0))
