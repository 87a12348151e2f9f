"""An engine's queue: tenants take turns, and share its places and the slots of the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.slot_shares import kept_free
from prfaas.engine.api import EngineJob, Resume
from prfaas.engine.job_queue import JobQueue, slot_rule
from prfaas.engine.memory import MemorySegments
from prfaas.types import NotNow
from tests.engine.emulated.builders import SPEC


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    job: EngineJob


def sequence(tenant: str, number: int = 0, tokens: int = 10) -> Sequence:
    return Sequence(EngineJob(f"{tenant}-{number}", [1] * tokens, tenant=tenant))


def queue_of(jobs: Iterable[Sequence], max_waiting: int = 256) -> JobQueue[Sequence]:
    queue: JobQueue[Sequence] = JobQueue(max_waiting)
    for one in jobs:
        assert queue.put(one) is None
    return queue


def order(queue: JobQueue[Sequence]) -> list[str]:
    """The jobs in the order in which they begin, where each of them may."""
    taken = []
    while (one := queue.take(lambda _: True)) is not None:
        taken.append(one.job.id)
    return taken


def test_the_jobs_of_one_tenant_begin_in_the_order_of_arrival() -> None:
    for tenant in ("", "a"):
        jobs = [sequence(tenant, number, tokens=50 - number) for number in range(20)]
        assert order(queue_of(jobs)) == [one.job.id for one in jobs]


def test_a_job_of_another_tenant_overtakes_a_flood() -> None:
    flood = [sequence("flood", number) for number in range(20)]
    queue = queue_of([*flood, sequence("other", 0), sequence("other", 1)])
    assert order(queue)[:4] == ["flood-0", "other-0", "flood-1", "other-1"]


def test_tenants_take_turns_by_the_tokens_that_are_computed() -> None:
    long = [sequence("long", number, tokens=40) for number in range(4)]
    resumed = [
        Sequence(replace(one.job, tenant="resumed", resume=Resume(30, MemorySegments(SPEC))))
        for one in long
    ]
    short = [sequence("short", number) for number in range(8)]
    taken = [name.split("-")[0] for name in order(queue_of([*long, *short]))]
    assert taken[:10] == ["long", *["short"] * 4, "long", *["short"] * 4]
    queue, tenants = queue_of([*long, *resumed]), []
    while (one := queue.take(lambda _: True)) is not None:
        tenants.append(one.job.tenant)
    assert tenants == ["long", *["resumed"] * 4, *["long"] * 3]


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    queue = queue_of(sequence("busy", number) for number in range(20))
    for _ in range(10):
        queue.take(lambda _: True)
    for number in range(5):
        queue.put(sequence("idle", number))
    assert order(queue)[:4] == ["idle-0", "busy-10", "idle-1", "busy-11"]


def test_a_tenant_whose_jobs_come_one_by_one_does_not_keep_another_back() -> None:
    """Its queue is empty whenever the next job is chosen, but its turns are remembered."""
    queue, taken = queue_of(sequence("many", number) for number in range(10)), Counter[str]()
    for number in range(20):
        queue.put(sequence("one by one", number))
        one = queue.take(lambda _: True)
        assert one is not None
        taken[one.job.tenant] += 1
    assert taken == {"many": 10, "one by one": 10}


def test_a_tenant_without_a_slot_is_passed_over() -> None:
    running = [sequence("flood", number) for number in range(12)]
    queue = queue_of([sequence("flood", 12), sequence("other", 0), sequence("flood", 13)])
    first = queue.take(slot_rule(running, 16))
    assert first is not None and first.job.id == "other-0"
    assert queue.take(slot_rule([*running, first], 16)) is None
    assert [one.job.id for one in queue.waiting] == ["flood-12", "flood-13"]
    left = queue.take(slot_rule(running[1:], 16))
    assert left is not None and left.job.id == "flood-12"


def test_jobs_without_a_tenant_take_every_slot_and_every_place() -> None:
    running = [sequence("", number) for number in range(15)]
    assert slot_rule(running, 16)(sequence(""))
    assert not slot_rule([*running, sequence("")], 16)(sequence(""))
    queue = queue_of((sequence("", number) for number in range(16)), max_waiting=16)
    assert isinstance(queue.put(sequence("")), NotNow)


def filled(queue: JobQueue[Sequence], tenant: str) -> int:
    """How many jobs of the tenant find places."""
    count = 0
    while queue.put(sequence(tenant, count)) is None:
        count += 1
    return count


def test_each_tenant_has_half_of_the_places_that_others_leave() -> None:
    queue = queue_of([])
    assert [filled(queue, name) for name in ("flood", "next", "third")] == [128, 64, 32]


def test_jobs_without_a_tenant_take_every_place() -> None:
    assert filled(queue_of([sequence("other"), sequence("flood")]), "") == 256 - 2


def test_turns_are_forgotten_when_no_job_waits() -> None:
    queue = queue_of(sequence(f"tenant {number}") for number in range(100))
    assert len(order(queue)) == 100
    assert not queue._turns.tags


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "begin", "end"]), st.sampled_from("abcd"), st.integers(1, 9)),
    max_size=120,
)


@given(STEPS, st.integers(2, 20))
def test_no_tenant_starves_and_others_always_find_a_slot(
    steps: list[tuple[str, str, int]], slots: int
) -> None:
    """Whatever tenants ask for, and whichever sequence ends: jobs of one tenant begin in their
    order, a tenant alone leaves a slot, and in the end each job has begun."""
    queue: JobQueue[Sequence] = JobQueue(1000)
    running: list[Sequence] = []
    asked: Counter[str] = Counter()
    begun: Counter[str] = Counter()

    def begin() -> bool:
        one = queue.take(slot_rule(running, slots))
        if one is None:
            return False
        running.append(one)
        tenant = one.job.tenant
        assert one.job.id == f"{tenant}-{begun[tenant]}"
        begun[tenant] += 1
        return True

    for step, tenant, number in steps:
        if step == "ask":
            for _ in range(number):
                queue.put(sequence(tenant, asked[tenant], tokens=number))
                asked[tenant] += 1
        elif step == "begin":
            begin()
        elif running:
            running.pop(number % len(running))
        held = Counter(one.job.tenant for one in running)
        assert len(running) <= slots
        if len(held) == 1:
            assert slot_rule(running, slots)(sequence("new")), "a tenant alone leaves a slot"
            assert held.total() <= max(1, slots - kept_free(slots))
    while queue.waiting:
        waiting = {one.job.tenant for one in queue.waiting}
        # What ends makes room for a tenant that holds nothing before one that holds more.
        while begin():
            pass
        assert running, f"{waiting} wait, and nothing runs"
        running.pop(0)
    assert begun == asked
