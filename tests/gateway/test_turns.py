"""Turns of tenants at a pool of workers: who is next, and that no worker is lost or given twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.clock import MonotonicClock
from prfaas.config.gateway import GatewaySection, TenantSection
from prfaas.errors import RequestError
from prfaas.gateway.tenants import Tenants
from prfaas.gateway.turns import (
    LONG_S,
    MOST_REMEMBERED,
    QUEUED_PER_TENANT,
    REMEMBERED_S,
    TurnOrder,
    Turns,
)
from tests.waiting import HANG_S

SHORT_S = LONG_S / 2


def tenants(*names: str, **weights: float) -> Tenants:
    sections = {name: TenantSection(weight=weight) for name, weight in weights.items()}
    found = frozenset([*names, *weights])
    return Tenants(GatewaySection(tenants=sections), lambda: found)


class Pool:
    """An order of turns whose jobs have lengths, and a clock that runs from event to event."""

    def __init__(self, found: Tenants, workers: int = 2) -> None:
        self.order = TurnOrder[tuple[str, float]](workers, found)
        self.now_s = 0.0
        self.ends_s: dict[int, float] = {}  # of the jobs that run, by worker
        self.running: dict[int, str] = {}  # the tenant, by worker
        self.began: list[str] = []  # tenants, in the order of their jobs
        self.used_s: dict[str, float] = {}

    def add(self, tenant: str, job_s: float, count: int = 1) -> None:
        for _ in range(count):
            self.order.add(tenant, (tenant, job_s))
        self.take()

    def take(self) -> None:
        while (found := self.order.take(self.now_s)) is not None:
            worker, (tenant, job_s) = found
            self.running[worker] = tenant
            self.ends_s[worker] = self.now_s + job_s
            self.began.append(tenant)
            self.order.check()

    def step(self) -> None:
        """Goes on to the end of a job."""
        worker = min(self.ends_s, key=lambda number: self.ends_s[number])
        end_s = self.ends_s.pop(worker)
        for tenant in self.running.values():
            self.used_s[tenant] = self.used_s.get(tenant, 0.0) + end_s - self.now_s
        del self.running[worker]
        self.now_s = end_s
        self.order.end(worker, self.now_s)
        self.order.check()
        self.take()

    def run(self) -> list[str]:
        """Until no job is left. Returns the tenants in the order of their jobs."""
        while self.ends_s:
            self.step()
        assert len(self.order) == 0
        return self.began


# The order ----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 3.0]), min_size=2),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_tenants_that_always_wait_use_the_workers_by_their_weights(
    weights: dict[str, float], workers: int, rng: random.Random
) -> None:
    pool = Pool(tenants(**weights), workers)
    for tenant in weights:
        for _ in range(100):
            pool.order.add(tenant, (tenant, rng.uniform(0.001, LONG_S * 0.99)))
    pool.take()
    while all(pool.order.count(tenant) for tenant in weights):
        pool.step()
        used_s = [pool.used_s.get(tenant, 0.0) / weights[tenant] for tenant in weights]
        assert max(used_s) - min(used_s) <= workers * LONG_S / min(weights.values())


def test_one_tenants_jobs_are_in_the_order_of_arrival() -> None:
    order = TurnOrder[int](1, tenants("a"))
    for item in range(5):
        order.add("a", item)
    order.discard("a", 2)
    order.discard("a", 2)  # does nothing
    taken = []
    while len(order):
        worker, item = order.take(0.0) or (-1, -1)
        taken.append(item)
        assert order.take(0.0) is None
        order.end(worker, 0.0)
    assert taken == [0, 1, 3, 4]


def test_a_flood_of_long_jobs_leaves_a_worker_for_the_others() -> None:
    pool = Pool(tenants("many", "one"))
    pool.add("many", 0.4, count=60)
    assert list(pool.running.values()) == ["many", "many"]  # its first jobs, which are not known
    pool.step()
    pool.step()
    assert list(pool.running.values()) == ["many"]
    for _ in range(10):
        pool.add("one", SHORT_S)
        assert sorted(pool.running.values()) == ["many", "one"]
        pool.step()
    assert pool.order.count("many") > 50
    pool.run()


def test_three_floods_share_the_workers_that_long_jobs_may_have() -> None:
    pool = Pool(tenants("a", "b", "c", "one"))
    for tenant in "abc":
        pool.add(tenant, 1.0, count=10)
    while any(pool.began.count(tenant) < 1 for tenant in "abc") or len(pool.running) > 1:
        pool.step()
    begun = len(pool.began)
    pool.add("one", SHORT_S)
    assert "one" in pool.running.values()
    pool.run()
    floods = [tenant for tenant in pool.began[begun:] if tenant != "one"]
    assert {tenant: floods[:6].count(tenant) for tenant in "abc"} == {"a": 2, "b": 2, "c": 2}


def test_short_jobs_do_not_keep_long_ones_from_the_workers() -> None:
    pool = Pool(tenants("short", "long"))
    pool.add("long", 1.0)
    pool.run()
    for tenant, job_s in ("short", SHORT_S), ("long", 1.0):
        pool.add(tenant, job_s, count=100)
    while pool.used_s.get("short", 0.0) < 2.0:
        pool.step()
    assert pool.used_s["long"] > 2.0


def test_long_jobs_take_every_worker_where_there_is_one_tenant() -> None:
    pool = Pool(tenants("only"))
    pool.add("only", 1.0, count=6)
    for _ in range(4):
        assert len(pool.running) == 2
        pool.step()
    pool = Pool(tenants("a", "b"), workers=1)  # where there is one worker, none can be left
    pool.add("a", 1.0, count=2)
    assert pool.run() == ["a", "a"]


def test_a_tenant_without_long_jobs_for_some_time_may_take_every_worker() -> None:
    pool = Pool(tenants("a", "b"))
    pool.add("a", 1.0)
    pool.run()
    pool.add("a", SHORT_S, count=2)
    assert len(pool.running) == 1
    pool.run()
    pool.now_s += REMEMBERED_S
    pool.add("a", SHORT_S, count=2)
    assert len(pool.running) == 2


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    pool = Pool(tenants("a", "b"))
    for number in range(2 * MOST_REMEMBERED):
        pool.add(f"t{number}", 2 * LONG_S)
        pool.step()
    latest = f"t{2 * MOST_REMEMBERED - 1}"
    pool.add(latest, 1.0, count=2)
    assert len(pool.running) == 1  # of the latest one it is known


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    pool = Pool(tenants("always", "later"), workers=1)
    pool.add("always", SHORT_S, count=400)
    for _ in range(200):
        pool.step()
    begun = len(pool.began)
    pool.add("later", SHORT_S, count=50)
    for _ in range(40):
        pool.step()
    assert abs(pool.began[begun:].count("later") - 20) <= 1


def test_time_before_a_job_begins_is_not_its_tenants() -> None:
    """A worker that has to be started makes no job a long one."""
    order = TurnOrder[str](2, tenants("a", "b"))
    order.add("a", "x")
    worker, _ = order.take(0.0) or (-1, "")
    order.begin(worker, 5.0)
    order.end(worker, 5.0 + SHORT_S)
    for item in "yz":
        order.add("a", item)
    assert order.take(6.0) is not None and order.take(6.0) is not None


def test_a_job_is_long_by_the_processor_time_that_it_takes() -> None:
    """On a busy machine a short job takes a long time."""
    for cpu_s, most in (LONG_S / 2, 2), (2 * LONG_S, 1):
        order = TurnOrder[int](2, tenants("a", "b"))
        order.add("a", 0)
        worker, _ = order.take(0.0) or (-1, 0)
        order.measured(worker, cpu_s)
        order.end(worker, 5.0)
        for item in range(3):
            order.add("a", item)
        assert sum(order.take(5.0) is not None for _ in range(3)) == most


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc")),
        st.tuples(st.just("discard"), st.integers(0, 20)),
        st.tuples(st.just("end"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.09, 0.5, REMEMBERED_S])),
    ),
    max_size=80,
)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(1, 3), st.booleans())
def test_every_item_is_taken_once_and_no_worker_rests_without_reason(
    steps: list[tuple[str, object]], workers: int, several: bool
) -> None:
    order = TurnOrder[int](workers, tenants(*("abc" if several else "a")))
    waiting: list[tuple[str, int]] = []
    running: dict[int, tuple[str, float]] = {}  # by worker: the tenant, and since when
    long_s: dict[str, float] = {}  # by tenant: when its latest long job ended
    now_s = 0.0

    def is_long(tenant: str) -> bool:
        recent = tenant in long_s and now_s - long_s[tenant] < REMEMBERED_S
        return recent or any(t == tenant and now_s - s > LONG_S for t, s in running.values())

    def long_jobs() -> int:
        return sum(is_long(tenant) for tenant, _ in running.values())

    for number, (step, value) in enumerate(steps):
        if step == "add":
            tenant = str(value) if several else "a"
            order.add(tenant, number)
            waiting.append((tenant, number))
        elif step == "discard" and waiting:
            assert isinstance(value, int)
            order.discard(*waiting.pop(value % len(waiting)))
        elif step == "end" and value in running:
            assert isinstance(value, int)
            tenant, since_s = running.pop(value)
            if now_s - since_s > LONG_S:
                long_s[tenant] = now_s
            order.end(value, now_s)
        elif step == "wait":
            assert isinstance(value, float)
            now_s += value
        leaves_one = several and workers > 1
        while True:
            held = long_jobs()
            found = order.take(now_s)
            order.check()
            if found is None:
                break
            worker, item = found
            tenant = next(t for t, i in waiting if i == item)
            assert item == next(i for t, i in waiting if t == tenant)
            assert worker not in running
            assert not (leaves_one and is_long(tenant) and held >= workers - 1)
            waiting.remove((tenant, item))
            running[worker] = (tenant, now_s)
        if len(running) < workers and waiting:
            assert leaves_one and long_jobs() >= workers - 1
            assert all(is_long(tenant) for tenant, _ in waiting)
        assert len(order) == len(waiting)


# The waiting --------------------------------------------------------------------------------------


class Job:
    """Work that ends when the test says so."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.end = asyncio.Event()

    async def __call__(self, worker: str) -> str:
        self.workers.append(worker)
        await self.end.wait()
        return worker


@asynccontextmanager
async def pool_of(
    workers: Collection[str] = "x", wait_s: float = HANG_S
) -> AsyncIterator[Turns[str]]:
    turns = Turns(list(workers), tenants("a", "b"), MonotonicClock(), wait_s=wait_s)
    try:
        async with asyncio.timeout(HANG_S):
            yield turns
    finally:
        await turns.close()


async def settled() -> None:
    """Every task has done what it could do at once."""
    for _ in range(10):
        await asyncio.sleep(0)


async def ended(turns: Turns[str], workers: int) -> None:
    """Each worker is there once: so many jobs run at the same time, and not one more."""
    jobs = [Job() for _ in range(workers + 1)]
    tasks = [asyncio.create_task(turns.run("b", job)) for job in jobs]
    await settled()
    assert [len(job.workers) for job in jobs] == [1] * workers + [0]
    assert len({job.workers[0] for job in jobs[:-1]}) == workers
    for job in jobs:
        job.end.set()
    await asyncio.gather(*tasks)
    assert turns.waiting == 0


async def test_the_result_and_the_error_of_a_job_are_the_callers() -> None:
    async def fails(worker: str) -> None:
        raise ValueError(worker)

    async with pool_of("xy") as turns:
        with pytest.raises(ValueError, match="y|x"):
            await turns.run("a", fails)

        def does_not_begin(worker: str) -> None:
            raise KeyError

        with pytest.raises(KeyError):
            await turns.run("a", does_not_begin)  # type: ignore[arg-type]
        await ended(turns, 2)


async def test_a_caller_that_leaves_while_it_waits_takes_no_worker() -> None:
    async with pool_of() as turns:
        first, never, last = Job(), Job(), Job()
        tasks = [asyncio.create_task(turns.run("a", job)) for job in (first, never, last)]
        await settled()
        tasks[1].cancel()
        await settled()
        assert turns.waiting == 1
        first.end.set()
        last.end.set()
        assert await tasks[2] == "x"
        assert tasks[1].cancelled() and not never.workers
        await ended(turns, 1)


@pytest.mark.parametrize("iterations", range(6))
async def test_a_caller_that_leaves_when_its_turn_comes_costs_no_worker(iterations: int) -> None:
    """Its turn may come in the same iteration of the loop, in one before it, or in one after it."""
    async with pool_of() as turns:
        first, leaving, last = Job(), Job(), Job()
        tasks = [asyncio.create_task(turns.run("a", job)) for job in (first, leaving, last)]
        await settled()
        for job in (first, leaving, last):
            job.end.set()
        for _ in range(iterations):
            await asyncio.sleep(0)
        tasks[1].cancel()
        assert await tasks[2] == "x"
        assert len(leaving.workers) <= 1
        await ended(turns, 1)


async def test_a_job_goes_on_when_its_caller_leaves_and_keeps_its_worker() -> None:
    async with pool_of() as turns:
        job, after = Job(), Job()
        leaving = asyncio.create_task(turns.run("a", job))
        waiting = asyncio.create_task(turns.run("a", after))
        await settled()
        leaving.cancel()
        await settled()
        assert leaving.cancelled() and not after.workers
        job.end.set()
        after.end.set()
        assert await waiting == "x"
        await ended(turns, 1)


async def test_what_waits_is_bounded_per_tenant() -> None:
    async with pool_of() as turns:
        job = Job()
        tasks = [asyncio.create_task(turns.run("a", job)) for _ in range(QUEUED_PER_TENANT + 1)]
        await settled()
        assert turns.waiting == QUEUED_PER_TENANT
        with pytest.raises(RequestError) as refused:
            await turns.run("a", job)
        assert (refused.value.status, refused.value.code) == (503, "overloaded")
        assert refused.value.retry_after_s
        tasks.append(asyncio.create_task(turns.run("b", job)))
        await settled()
        job.end.set()
        assert await asyncio.gather(*tasks) == ["x"] * len(tasks)
        await ended(turns, 1)


async def test_no_caller_waits_for_ever() -> None:
    async with pool_of(wait_s=0.05) as turns:
        job = Job()
        first = asyncio.create_task(turns.run("a", job))
        await settled()
        with pytest.raises(RequestError) as refused:
            await turns.run("b", job)
        assert refused.value.status == 503 and turns.waiting == 0
        job.end.set()
        assert await first == "x" and job.workers == ["x"]


async def test_work_of_no_tenant_takes_an_idle_worker_only() -> None:
    async with pool_of() as turns:
        warm_up, done = Job(), []

        async def work(worker: str) -> None:
            done.append(await warm_up(worker))

        turns.run_if_idle(work)
        turns.run_if_idle(work)
        waiting = asyncio.create_task(turns.run("a", warm_up))
        await settled()
        assert warm_up.workers == ["x"] and turns.waiting == 1
        warm_up.end.set()
        assert await waiting == "x" and done == ["x"]


async def test_the_end_of_the_pool_ends_its_work() -> None:
    async with pool_of("xy") as turns:
        job = Job()
        tasks = [asyncio.create_task(turns.run("a", job)) for _ in range(2)]
        await settled()
        await turns.close()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        await ended(turns, 2)
