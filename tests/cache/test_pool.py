from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from prfaas.cache.checkpoints import BranchPoints, EveryBlocks, LastBoundary
from prfaas.cache.journal import Journal
from prfaas.cache.lease import Lease, Match
from prfaas.cache.pool import BUSY_RETRY_S, TOO_LARGE_RETRY_S, HybridPrefixPool
from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.ssd import SpillFile
from prfaas.errors import InputError
from prfaas.kvspec import Segment
from prfaas.types import NodeId, NotNow
from tests.cache.builders import BLOCK, SPECS, hashes_of, layout_of, make_pool, prepare_now
from tests.cache.filling import assert_resumable, read, write, write_segment

HYBRID = SPECS["hybrid"]


def prompt(letters: str, tail: int = 0) -> tuple[int, ...]:
    return tuple(ord(x) for x in letters for _ in range(BLOCK)) + (0,) * tail


def reserve(pool: HybridPrefixPool, tokens: tuple[int, ...], **more: object) -> Lease:
    lease = pool.reserve(hashes_of(tokens), len(tokens), now=0.0, **more)  # type: ignore[arg-type]
    assert isinstance(lease, Lease), lease
    return lease


def serve(pool: HybridPrefixPool, tokens: tuple[int, ...]) -> Lease:
    lease = reserve(pool, tokens)
    pool.commit(lease.id, 0.0)
    pool.release(lease.id, 0.0)
    pool.check()
    return lease


def hit(pool: HybridPrefixPool, letters: str) -> Match:
    return pool.match(hashes_of(prompt(letters)))


@pytest.fixture
def bytes_pool(tmp_path: Path) -> Iterator[HybridPrefixPool]:
    """Room in memory for one prompt of three blocks with its state; SSD for many."""
    layout = layout_of(HYBRID)
    pages = 3 * layout.pages(0) + layout.pages(1)
    memory = os.memfd_create("pool")
    os.ftruncate(memory, pages * layout.page_bytes)
    file = os.open(tmp_path / "spill", os.O_RDWR | os.O_CREAT)
    arena = Arena(memory, layout.page_bytes, pages)
    yield make_pool(
        HYBRID,
        pages=pages,
        checkpoints=LastBoundary(),
        arena=arena,
        ssd=SpillFile(file, layout.page_bytes, 100),
    )
    arena.close()
    os.close(memory)
    os.close(file)


def test_nothing_is_seen_before_the_commit() -> None:
    pool = make_pool(HYBRID)
    lease = reserve(pool, prompt("ab"))
    assert hit(pool, "ab") == Match(0, 0)
    pool.commit(lease.id, 0.0)
    pool.commit(lease.id, 0.0)  # again: nothing happens
    assert hit(pool, "ab") == Match(8, 8)
    assert pool.release(lease.id, 0.0)
    assert not pool.release(lease.id, 0.0)
    assert hit(pool, "ab") == Match(8, 8)


def test_reuse_lost_for_want_of_a_state_is_counted() -> None:
    pool = make_pool(HYBRID, checkpoints=LastBoundary())
    serve(pool, prompt("abcd"))
    match = hit(pool, "abx")
    assert match == Match(tokens=0, attention_tokens=8)
    assert match.lost_tokens == 8
    serve(pool, prompt("abx"))
    assert pool.stats.lost_tokens == 8
    assert pool.stats.hit_tokens == 0


def test_a_branch_point_is_kept_where_prompts_diverge() -> None:
    pool = make_pool(HYBRID, checkpoints=BranchPoints())
    serve(pool, prompt("abcd"))
    assert serve(pool, prompt("abx")).checkpoint_tokens == (8, 12)
    assert hit(pool, "aby") == Match(8, 8)


def test_transfer_pages_go_and_prefix_pages_stay() -> None:
    pool = make_pool(HYBRID, checkpoints=BranchPoints())
    lease = reserve(pool, prompt("ab", tail=3))
    layout = pool.layout
    state, block = layout.unit_bytes[1], layout.unit_bytes[0]
    assert lease.new_bytes == 3 * block + 2 * state  # at 8 for the prefix, at 11 for the hand-off
    pool.commit(lease.id, 0.0)
    assert hit(pool, "ab") == Match(8, 8)
    pool.release(lease.id, 0.0)
    page = layout.page_bytes
    assert pool.bytes_by_group() == {
        "full0": 2 * layout.pages(0) * page,
        "linear0": layout.pages(1) * page,
    }


def test_skip_tokens_are_each_groups_own_run() -> None:
    pool = make_pool(SPECS["all"], checkpoints=LastBoundary())
    serve(pool, prompt("ab"))
    lease = reserve(pool, prompt("abc"))
    assert lease.match == Match(8, 8)
    assert lease.skip_tokens == {"full0": 8, "full1": 8}


def test_asked_for_checkpoints_replace_the_policys() -> None:
    pool = make_pool(HYBRID, checkpoints=BranchPoints(spare_interval=1))
    lease = reserve(pool, prompt("abcd", tail=1), checkpoint_tokens=[8])
    assert lease.checkpoint_tokens == (8,)
    pool.commit(lease.id, 0.0)
    assert hit(pool, "abcd") == Match(8, 16)
    assert reserve(pool, prompt("abcx", tail=1), checkpoint_tokens=[]).checkpoint_tokens == ()


def test_an_aligned_hand_off_is_kept() -> None:
    pool = make_pool(HYBRID, checkpoints=EveryBlocks(9))
    lease = reserve(pool, prompt("ab"), checkpoint_tokens=[])
    assert lease.checkpoint_tokens == (8,)
    pool.commit(lease.id, 0.0)
    assert hit(pool, "ab") == Match(8, 8)


def test_uncommitted_leases_leave_nothing() -> None:
    pool = make_pool(HYBRID, pages=20)
    lease = reserve(pool, prompt("ab"))
    assert pool.release(lease.id, 15.0)
    assert sum(pool.bytes_by_group().values()) == 0
    assert not pool.release(lease.id, 99.0)
    pool.check()


def test_two_writers_of_one_prompt_do_not_meet() -> None:
    pool = make_pool(HYBRID)
    first, second = reserve(pool, prompt("ab")), reserve(pool, prompt("ab"))
    pool.commit(first.id, 0.0)
    pool.commit(second.id, 0.0)
    pool.check()
    pool.release(second.id, 0.0)
    pool.release(first.id, 0.0)
    pool.check()
    assert hit(pool, "ab") == Match(8, 8)
    assert sum(map(len, pool.holdings().values())) == 3


def test_an_exhausted_pool_says_when_to_come_back() -> None:
    layout = layout_of(HYBRID)
    pool = make_pool(HYBRID, pages=2 * layout.pages(0) + layout.pages(1))
    lease = reserve(pool, prompt("ab"))
    refused = pool.reserve(hashes_of(prompt("x")), BLOCK, now=4.0)
    assert isinstance(refused, NotNow)
    assert refused.retry_after_s == BUSY_RETRY_S
    assert pool.stats.refused == 1
    pool.check()
    pool.release(lease.id, 4.0)
    assert isinstance(pool.reserve(hashes_of(prompt("x")), BLOCK, now=4.0), Lease)


def test_what_can_never_fit_is_told_so() -> None:
    pool = make_pool(HYBRID, pages=3)
    serve_nothing = pool.reserve(hashes_of(prompt("abcdef")), 24, now=0.0)
    assert isinstance(serve_nothing, NotNow)
    assert serve_nothing.retry_after_s == TOO_LARGE_RETRY_S
    assert "more than the pool has" in serve_nothing.reason


@pytest.mark.parametrize(
    ("hashes", "tokens", "checkpoints"),
    [(1, 9, ()), (3, 9, ()), (0, 0, ()), (2, 9, (3,)), (2, 9, (12,)), (2, 9, (0,))],
)
def test_reservations_that_make_no_sense(
    hashes: int, tokens: int, checkpoints: tuple[int, ...]
) -> None:
    pool = make_pool(HYBRID)
    names = hashes_of(prompt("abc"))[:hashes]
    with pytest.raises(InputError):
        pool.reserve(names, tokens, now=0.0, checkpoint_tokens=checkpoints)
    pool.check()


def test_tenants_do_not_see_each_other() -> None:
    pool = make_pool(HYBRID)
    serve(pool, prompt("ab"))
    assert pool.match(hashes_of(prompt("ab"), salt="other")) == Match(0, 0)


def fill(pool: HybridPrefixPool, letters: str, *, prepared: bool = True) -> None:
    """A whole request that writes its bytes."""
    tokens = prompt(letters)
    preparation = prepare_now(pool, hashes_of(tokens), len(tokens)) if prepared else None
    lease = reserve(pool, tokens)
    if preparation is not None:
        preparation.end(0.0)
    write(pool, lease, tokens)
    pool.commit(lease.id, 0.0)
    pool.release(lease.id, 0.0)
    pool.check()


def pin(pool: HybridPrefixPool, letters: str) -> Lease:
    hashes = hashes_of(prompt(letters))
    preparation = prepare_now(pool, hashes, None, now=1.0)
    lease = pool.pin(hashes, now=1.0)
    assert isinstance(lease, Lease) and preparation is not None
    preparation.end(1.0)
    pool.check()
    return lease


def test_evicted_blocks_come_back_from_ssd(bytes_pool: HybridPrefixPool) -> None:
    pool = bytes_pool
    fill(pool, "abc")
    fill(pool, "xyz")
    assert pool.stats.spilled_blocks == 4
    assert (hit(pool, "abc"), hit(pool, "xyz")) == (Match(12, 12), Match(12, 12))
    back = pin(pool, "abc")
    assert back.match == Match(12, 12)
    assert_resumable(pool, back, prompt("abc"), 12)
    assert (pool.stats.promoted_blocks, pool.stats.evicted_blocks) == (4, 0)
    # Everything in memory is in use now, so the other prompt cannot be brought back.
    assert pin(pool, "xyz").match == Match(0, 0)
    assert hit(pool, "xyz") == Match(12, 12)
    pool.release(back.id, 1.0)
    pool.check()


def test_a_damaged_file_makes_misses(bytes_pool: HybridPrefixPool, tmp_path: Path) -> None:
    pool = bytes_pool
    fill(pool, "abc")
    fill(pool, "xyz")
    os.truncate(tmp_path / "spill", 0)
    got = pin(pool, "abc")
    assert got.match.tokens == 0
    assert pool.stats.unreadable_blocks > 0
    pool.release(got.id, 1.0)
    pool.check()


def test_a_reservation_that_is_not_prepared_does_not_use_the_ssd(
    bytes_pool: HybridPrefixPool,
) -> None:
    pool = bytes_pool
    fill(pool, "abc")
    fill(pool, "xyz")
    got = pool.pin(hashes_of(prompt("abc")), now=1.0)
    assert isinstance(got, Lease) and got.match == Match(0, 0)
    assert hit(pool, "abc") == Match(12, 12), "it is still on SSD"
    pool.release(got.id, 1.0)
    fill(pool, "pqr", prepared=False)
    assert (pool.stats.spilled_blocks, pool.stats.dropped_blocks) == (4, 4)
    assert hit(pool, "xyz") == Match(0, 0)


def test_pages_that_are_being_written_to_ssd_can_be_taken(bytes_pool: HybridPrefixPool) -> None:
    """The SSD may be as slow as it likes: its jobs have not run when the room is needed."""
    pool = bytes_pool
    fill(pool, "abc")
    preparation = pool.prepare(hashes_of(prompt("xyz")), 12)
    assert preparation is not None
    jobs = preparation.next_jobs(0.0)
    assert jobs and hit(pool, "abc") == Match(12, 12)
    fill(pool, "pqr", prepared=False)
    assert hit(pool, "abc") == Match(0, 0)
    for job in jobs:
        job.run()
        job.finish(0.0)
        pool.check()
    assert hit(pool, "abc") == Match(0, 0) and hit(pool, "pqr") == Match(12, 12)
    preparation.end(0.0)
    back = pin(pool, "pqr")
    assert_resumable(pool, back, prompt("pqr"), 12)


def test_a_block_that_is_needed_while_it_is_written_stays(bytes_pool: HybridPrefixPool) -> None:
    pool = bytes_pool
    fill(pool, "abc")
    making_room = pool.prepare(hashes_of(prompt("xyz")), 12)
    assert making_room is not None
    jobs = making_room.next_jobs(0.0)
    back = pin(pool, "abc")  # without reading it
    assert back.match == Match(12, 12) and pool.stats.promoted_blocks == 0
    for job in jobs:
        assert job not in list(pool._tiers.jobs), "the pin has waited for them"
    assert_resumable(pool, back, prompt("abc"), 12)
    making_room.end(0.0)
    pool.release(back.id, 1.0)
    pool.check()


def test_two_requests_share_one_read(bytes_pool: HybridPrefixPool) -> None:
    pool = bytes_pool
    fill(pool, "abc")
    fill(pool, "xyz")
    hashes = hashes_of(prompt("abc"))
    first, second = pool.prepare(hashes, None), pool.prepare(hashes, None)
    assert first is not None and second is not None
    for _ in range(3):
        jobs = [*first.next_jobs(1.0), *second.next_jobs(1.0)]
        pool.check()
        for job in dict.fromkeys(jobs):
            job.run()
            job.finish(1.0)
            pool.check()
    assert pool.stats.promoted_blocks == 4
    lease = pool.pin(hashes, now=1.0)
    assert isinstance(lease, Lease) and lease.match == Match(12, 12)
    first.end(1.0)
    second.end(1.0)
    second.end(1.0)  # again: nothing happens
    assert_resumable(pool, lease, prompt("abc"), 12)
    pool.release(lease.id, 1.0)
    pool.check()


def test_a_hash_that_is_sent_twice_finds_one_block_twice(bytes_pool: HybridPrefixPool) -> None:
    """No prompt has such hashes, but a caller may send them."""
    pool = bytes_pool
    twice = hashes_of(prompt("a")) * 2
    for hashes in (twice, hashes_of(prompt("xyz")), twice, hashes_of(prompt("xyz")), twice):
        tokens = len(hashes) * BLOCK
        preparation = prepare_now(pool, hashes, tokens)
        assert preparation is not None
        lease = pool.reserve(hashes, tokens, now=0.0)
        assert isinstance(lease, Lease)
        preparation.end(0.0)
        pool.check()
        pool.commit(lease.id, 0.0)
        pool.release(lease.id, 0.0)
        pool.check()
    assert pool.stats.spilled_blocks and pool.stats.promoted_blocks


def test_a_failed_write_costs_its_block_only(bytes_pool: HybridPrefixPool) -> None:
    pool = bytes_pool
    fill(pool, "abc")
    preparation = pool.prepare(hashes_of(prompt("xyz")), 12)
    assert preparation is not None
    jobs = preparation.next_jobs(0.0)
    for number, job in enumerate(jobs):
        if number:  # the first one is not written
            job.run()
        job.finish(0.0)
        pool.check()
    assert pool.stats.dropped_blocks == 1
    assert pool.stats.spilled_blocks == len(jobs) - 1
    preparation.end(0.0)
    pool.check()


def test_an_unknown_lease_is_an_error() -> None:
    pool = make_pool(HYBRID, lease_ids=count(1000))
    old = make_pool(HYBRID).reserve(hashes_of(prompt("a")), BLOCK, now=0.0)
    lease = reserve(pool, prompt("a"))
    assert isinstance(old, Lease) and old.id != lease.id >= 1000
    pool.release(lease.id, 0.0)
    for unknown in (old.id, lease.id):
        with pytest.raises(InputError, match="lease_id"):
            pool.commit(unknown, 0.0)
        with pytest.raises(InputError, match="lease_id"):
            pool.tables(unknown)
        assert not pool.release(unknown, 0.0)
    assert hit(pool, "a") == Match(0, 0)


def test_written_units_are_immutable(bytes_pool: HybridPrefixPool) -> None:
    pool = bytes_pool
    lease = reserve(pool, prompt("abc"))
    segment = Segment("full0", 0, 0, 12)
    with pytest.raises(InputError, match="not part of this lease"):
        read(pool, lease, segment)  # not written yet
    pool.commit(lease.id, 0.0)
    with pytest.raises(InputError, match="not part of this lease"):
        write_segment(pool, lease, segment, b"")
    pool.release(lease.id, 0.0)
    reader = pool.pin(hashes_of(prompt("abc")), now=0.0)
    assert isinstance(reader, Lease)
    with pytest.raises(InputError, match="not part of this lease"):
        write_segment(pool, reader, segment, b"")
    with pytest.raises(InputError, match="not part of this lease"):
        read(pool, reader, Segment("linear0", 1, 0, 8))  # saved after 12, not 8


def test_an_incomplete_window_block_is_replaced_by_a_whole_one() -> None:
    pool = make_pool(SPECS["windowed"], checkpoints=LastBoundary())
    serve(pool, prompt("abcd"))  # 16 tokens: the window is 10 .. 15, block 2 lacks 8 and 9
    assert hit(pool, "abc") == Match(0, 12)
    assert hit(pool, "abcd") == Match(16, 16)
    serve(pool, prompt("abc"))  # window 6 .. 11: block 2 is whole now
    assert hit(pool, "abc") == Match(12, 12)
    assert hit(pool, "abcd") == Match(16, 16)


def test_the_journal_tells_what_is_held() -> None:
    layout = layout_of(HYBRID)
    journal = Journal()
    pool = make_pool(HYBRID, pages=layout.pages(0) + layout.pages(1), journal=journal)
    serve(pool, prompt("a"))
    serve(pool, prompt("b"))
    events = journal.take(NodeId("n"), BLOCK, first_seq=7)
    names = [hashes_of(prompt(x))[0] for x in "ab"]
    assert [(e.seq, e.action, e.group, e.hashes) for e in events] == [
        (7, "stored", "full0", (names[0],)),
        (8, "stored", "linear0", (names[0],)),
        (9, "removed", "linear0", (names[0],)),
        (10, "removed", "full0", (names[0],)),
        (11, "stored", "full0", (names[1],)),
        (12, "stored", "linear0", (names[1],)),
    ]
    assert journal.take(NodeId("n"), BLOCK, 13) == []


@pytest.mark.parametrize("spec", SPECS)
def test_names_that_do_not_form_a_chain_leave_a_sound_pool(spec: str) -> None:
    """A client may name blocks in any order: under another parent than before, or twice."""
    pool = make_pool(SPECS[spec], pages=4_096)
    a, b, c, d = hashes_of(prompt("abcd"))
    for names in ([a, b], [c, b], [d, d, b], [b, a], [c, c], [a, c, b]):
        lease = pool.reserve(names, len(names) * BLOCK, now=0.0, checkpoint_tokens=())
        assert isinstance(lease, Lease)
        pool.commit(lease.id, 0.0)
        pool.check()
        pool.release(lease.id, 0.0)
        pool.check()
