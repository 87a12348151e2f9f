"""The pool against a model that forgets nothing: real bytes, two tiers, faults, all policies.

Jobs of the SSD tier run and finish between any two other operations, as they do in a kvd, and the
pool may be replaced by a new one, as after a restart."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.groups import GroupRule
from prfaas.cache.index import NodeInfo, PrefixIndex
from prfaas.cache.journal import Journal
from prfaas.cache.lease import Lease, LeaseId
from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.preparation import Preparation
from prfaas.cache.storage.ssd import SpillFile
from prfaas.cache.storage.ssd_jobs import SsdJob
from prfaas.cache.units import closing_units
from prfaas.errors import InputError
from prfaas.types import BlockHash, ClusterId, NodeId, NotNow
from tests.cache.builders import BLOCK, SEEDED, SPECS, hashes_of, layout_of, make_pool
from tests.cache.filling import assert_resumable, write

NODE = NodeId("n")
STEPS = ["prepare", "prepare pin", "prepare kept", "serve", "end", "go on", "run", "fail", "finish"]
MOSTLY = st.sampled_from([True, True, True, False])
# Prompts over two kinds of block share prefixes and diverge all the time.
PROMPTS = st.builds(
    lambda blocks, tail: tuple(t for b in blocks for t in [b] * BLOCK) + (9,) * tail,
    st.lists(st.integers(0, 1), min_size=1, max_size=7),
    st.integers(0, BLOCK - 1),
)
# Prompts of different tenants share prefixes here, as they do under one salt.
TENANTS = st.sampled_from(["", "", "a", "b"])
SHORT = st.integers(1, BLOCK - 1).map(lambda tail: (9,) * tail)  # not even one whole block


class Reference:
    """Everything ever committed; hits by trying every length."""

    def __init__(self, rules: tuple[GroupRule, ...]) -> None:
        self.rules = rules
        self.missing: dict[tuple[int, BlockHash], int] = {}  # leading tokens a block lacks

    def commit(self, lease: Lease, hashes: list[BlockHash]) -> None:
        for group, rule_ in enumerate(self.rules):
            if rule_.kind == "full":
                for name in hashes:
                    self.missing[group, name] = 0
        for length in lease.checkpoint_tokens:
            for (group, where), lacks in closing_units(self.rules, BLOCK, length):
                linear = self.rules[group].kind == "linear"
                key = group, hashes[where // BLOCK - 1 if linear else where]
                self.missing[key] = min(lacks, self.missing.get(key, lacks))

    def hit_blocks(self, hashes: list[BlockHash]) -> int:
        for length in range(len(hashes), 0, -1):
            if all(
                self.missing.get((group, hashes[block]), BLOCK)
                <= max(0, rule_.first_token(length, BLOCK) - block * BLOCK)
                for group, rule_ in enumerate(self.rules)
                for block in rule_.needs(length, BLOCK)
            ):
                return length
        return 0


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        spec=st.sampled_from(sorted(SPECS)),
        evict=st.sampled_from(["lru", "cost"]),
        checkpoints=st.sampled_from(["default", "last", "branch", "every:2"]),
        pages=st.integers(2, 30),
        ssd_pages=st.sampled_from([100, 8, None, 30, 0]),
        aside=st.sampled_from([0, 6, 16]),
    )
    def build(
        self, spec: str, evict: str, checkpoints: str, pages: int, ssd_pages: int | None, aside: int
    ) -> None:
        self.spec, self.evict, self.checkpoints = SPECS[spec], evict, checkpoints
        self.pages, self.ssd_pages, self.aside = pages + aside, ssd_pages, aside
        pages = self.pages
        layout = layout_of(self.spec)
        self.file = tempfile.TemporaryFile()
        self.full = os.open("/dev/full", os.O_RDWR)  # no space is left on this device
        memory = os.memfd_create("pool")
        os.ftruncate(memory, pages * layout.page_bytes)
        self.arena = Arena(memory, layout.page_bytes, pages)
        os.close(memory)  # the mapping stays
        self.now = 0.0
        self.next_lease_id = 1
        self.ended: list[LeaseId] = []  # some leases that must not be valid any more
        self.pools = 1
        self.start_pool()

    def start_pool(self) -> None:
        layout = layout_of(self.spec)
        self.ssd = None
        if self.ssd_pages is not None:
            self.ssd = SpillFile(self.file.fileno(), layout.page_bytes, self.ssd_pages)
        self.journal = Journal()
        self.pool = make_pool(
            self.spec,
            pages=self.pages,
            evict=self.evict,
            checkpoints=checkpoint_policy(self.checkpoints, BLOCK),
            arena=self.arena,
            ssd=self.ssd,
            journal=self.journal,
            lease_ids=count(self.next_lease_id),
        )
        self.pool.set_aside(self.aside)
        self.reference = Reference(self.pool.rules)
        self.index = PrefixIndex()
        self.index.join(NodeInfo(NODE, ClusterId("c"), BLOCK, self.pool.rules))
        self.next_seq = 0
        self.open: dict[LeaseId, Lease] = {}  # not committed yet
        self.prompts: dict[LeaseId, tuple[int, ...]] = {}  # of every lease
        self.preparing: list[Preparation] = []
        self.queued: deque[SsdJob] = deque()
        self.ran: deque[SsdJob] = deque()
        self.answers: dict[LeaseId, tuple[Lease, tuple[int, ...]]] = {}  # being written

    # Few leases at a time, or everything is refused.
    @precondition(lambda self: len(self.prompts) < 2)
    @rule(prompt=PROMPTS | SHORT, ask=st.booleans(), prepared=MOSTLY, tenant=TENANTS)
    def reserve(self, prompt: tuple[int, ...], ask: bool, prepared: bool, tenant: str) -> None:
        hashes = hashes_of(prompt)
        asked = (BLOCK,) if ask and hashes else None
        promised = self.pool.match(hashes)
        gone = self.pool.stats.evicted_blocks
        preparation = None
        if prepared:
            preparation = self.pool.prepare(
                hashes, len(prompt), checkpoint_tokens=asked, tenant=tenant
            )
            self.carry_out(preparation)
        ready = preparation is None or all(block.slot is None for block in preparation.held)
        lossless = gone == self.pool.stats.evicted_blocks
        before = self.pool.match(hashes)
        used = self.pool.bytes_by_group()
        got = self.pool.reserve(
            hashes, len(prompt), now=self.now, checkpoint_tokens=asked, tenant=tenant
        )
        if preparation is not None:
            preparation.end(self.now)
        if isinstance(got, NotNow):
            assert got.retry_after_s >= 0
            assert self.pool.match(hashes) == before, "a refusal evicted something"
            assert self.pool.bytes_by_group() == used
            return
        self.note(got)
        assert got.match.tokens <= before.tokens
        if self.ssd is None or (prepared and ready and lossless):
            assert got.match == promised
        write(self.pool, got, prompt)
        assert_resumable(self.pool, got, prompt, got.match.tokens)
        self.open[got.id] = got
        self.prompts[got.id] = prompt

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), prepared=MOSTLY, tenant=TENANTS)
    def serve(self, prompts: list[tuple[int, ...]], prepared: bool, tenant: str) -> None:
        """Whole requests at once: what fills the pool."""
        for prompt in prompts:
            self.serve_one(prompt, prepared, tenant)

    def serve_one(self, prompt: tuple[int, ...], prepared: bool, tenant: str = "") -> None:
        hashes = hashes_of(prompt)
        preparation = None
        if prepared:
            preparation = self.pool.prepare(hashes, len(prompt), tenant=tenant)
        self.carry_out(preparation)
        lease = self.pool.reserve(hashes, len(prompt), now=self.now, tenant=tenant)
        if preparation is not None:
            preparation.end(self.now)
        if isinstance(lease, NotNow):
            return
        self.note(lease)
        write(self.pool, lease, prompt)
        self.pool.commit(lease.id, self.now)
        self.reference.commit(lease, hashes)
        self.pool.check()
        assert self.pool.release(lease.id, self.now)
        self.ended.append(lease.id)

    # Answers --------------------------------------------------------------------------------------

    @precondition(lambda self: self.aside)
    @rule(prompt=PROMPTS, first=st.integers(0, 3), tenant=TENANTS)
    def generate(self, prompt: tuple[int, ...], first: int, tenant: str) -> None:
        """An answer is written, and takes nothing from others."""
        prompt = prompt[: len(prompt) // BLOCK * BLOCK]
        before = self.room_for_others()
        got = self.pool.reserve_answer(
            hashes_of(prompt), len(prompt), first_token=first * BLOCK, now=self.now, tenant=tenant
        )
        assert self.room_for_others() == before
        if isinstance(got, Lease):
            self.note(got)
            assert min(got.skip_tokens.values(), default=100) >= first * BLOCK
            write(self.pool, got, prompt)
            self.answers[got.id] = (got, prompt)

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), commit=MOSTLY)
    def end_answer(self, data: st.DataObject, commit: bool) -> None:
        lease, prompt = self.answers.pop(data.draw(st.sampled_from(sorted(self.answers))))
        hashes = hashes_of(prompt)
        before = self.room_for_others()
        if commit and self.pool.commit(lease.id, self.now):
            self.reference.commit(lease, hashes)
            assert self.pool.match(hashes).tokens == len(prompt)
        assert self.pool.release(lease.id, self.now)
        assert self.room_for_others() == before
        self.ended.append(lease.id)

    @precondition(lambda self: self.ssd is not None and self.aside)
    @rule()
    def spill_ahead(self) -> None:
        waiting = {*self.queued, *self.ran}
        self.queued += (job for job in self.pool.spill_ahead(self.now) if job not in waiting)
        assert list(self.pool._tiers.jobs) == [*self.ran, *self.queued], "a job is never run"

    def room_for_others(self) -> int:
        """The most pages that a reservation could get now."""
        blocks = self.pool._blocks
        assert blocks.free_pages is not None
        possible = blocks.free_pages + blocks.idle_pages + blocks.leaving_pages
        return possible - blocks.aside.left_pages

    # Preparations, in steps -----------------------------------------------------------------------

    @precondition(lambda self: self.ssd is not None and len(self.preparing) < 3)
    @rule(prompt=PROMPTS, pin=st.booleans(), more=st.booleans())
    def prepare(self, prompt: tuple[int, ...], pin: bool, more: bool) -> None:
        preparation = self.pool.prepare(
            hashes_of(prompt),
            None if pin else len(prompt),
            more_checkpoints=(BLOCK, 3) if more else (),  # of a grant: any number
        )
        assert preparation is not None
        self.preparing.append(preparation)
        self.submit(preparation)

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.submit(data.draw(st.sampled_from(self.preparing)))

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A request that was cancelled, or has waited too long."""
        preparation = data.draw(st.sampled_from(self.preparing))
        self.preparing.remove(preparation)
        preparation.end(self.now)

    @precondition(lambda self: self.queued or self.ran)
    @rule(
        faults=st.lists(st.sampled_from(["none", "none", "no space", "skipped"]), max_size=4),
        finish=st.integers(0, 4),
    )
    def work(self, faults: list[str], finish: int) -> None:
        """The SSD's thread runs some jobs, and the owner finishes some. A job that raised an error
        was, in effect, skipped."""
        for fault in faults[: len(self.queued)]:
            job = self.queued.popleft()
            assert self.ssd is not None
            self.ssd._fd = self.full if fault == "no space" else self.file.fileno()
            if fault != "skipped":
                job.run()
            self.ssd._fd = self.file.fileno()
            self.ran.append(job)
        for _ in range(min(finish, len(self.ran))):
            self.ran.popleft().finish(self.now)
            self.pool.check()

    @precondition(lambda self: self.ssd is not None and len(self.preparing) < 3)
    @rule(
        kept=st.lists(PROMPTS, min_size=2, max_size=4),
        wanted=PROMPTS,
        steps=st.lists(st.tuples(st.sampled_from(STEPS), PROMPTS), min_size=2, max_size=8),
    )
    def race(
        self,
        kept: list[tuple[int, ...]],
        wanted: tuple[int, ...],
        steps: list[tuple[str, tuple[int, ...]]],
    ) -> None:
        """A pool that is full, and requests that overtake each other at the SSD."""
        for prompt in kept:
            self.serve_one(prompt, prepared=True)
        self.prepare(wanted, pin=False, more=False)
        for step, prompt in steps:
            match step:
                case "prepare" | "prepare pin" if len(self.preparing) < 4:
                    self.prepare(prompt, pin=step == "prepare pin", more=False)
                case "prepare kept" if len(self.preparing) < 4:
                    self.prepare(kept[len(prompt) % len(kept)], pin=True, more=False)
                case "serve":
                    self.serve_one(prompt, prepared=False)
                case "end" if self.preparing:
                    self.preparing.pop(0).end(self.now)
                case "go on":
                    for preparation in self.preparing:
                        self.submit(preparation)
                case "run" | "fail":
                    self.work(["none" if step == "run" else "no space"] * 3, 0)
                case "finish":
                    self.work([], 2)
            self.pool.check()

    # Leases ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        self.pool.commit(lease.id, self.now)
        prompt = self.prompts[lease.id]
        self.reference.commit(lease, hashes_of(prompt))
        assert_resumable(self.pool, lease, prompt, lease.tokens)
        del self.open[lease.id]

    @precondition(lambda self: len(self.prompts) > len(self.open))
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(set(self.prompts) - set(self.open))))
        before = self.pool.tables(lease_id)
        self.pool.commit(lease_id, self.now)
        assert self.pool.tables(lease_id) == before

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def use_an_ended_lease(self, data: st.DataObject) -> None:
        """Of this pool, or of the one before the restart."""
        lease_id = data.draw(st.sampled_from(self.ended))
        assert not self.pool.release(lease_id, self.now)
        with pytest.raises(InputError, match="has ended"):
            self.pool.commit(lease_id, self.now)
        with pytest.raises(InputError, match="has ended"):
            self.pool.tables(lease_id)

    # Seldom: most of what can happen needs a pool that is full.
    @precondition(lambda self: len(self.ended) >= 15 * self.pools)
    @rule()
    def restart(self) -> None:
        """A new pool over the same memory and file. Its process knows nothing of the old one."""
        self.ended += (*self.prompts, *self.answers)
        self.pools += 1
        for job in (*self.ran, *self.queued):
            job.finish(self.now)  # of the old pool; this releases its views of the arena
        self.next_lease_id += 1_000_000
        self.start_pool()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.prompts)))
        assert self.pool.release(lease_id, self.now)
        assert not self.pool.release(lease_id, self.now)
        self.forget(lease_id)

    @precondition(lambda self: len(self.prompts) < 3)
    @rule(prompt=PROMPTS, keep=st.booleans(), prepared=MOSTLY)
    def pin(self, prompt: tuple[int, ...], keep: bool, prepared: bool) -> None:
        hashes = hashes_of(prompt)
        promised = self.pool.match(hashes)
        gone = self.pool.stats.evicted_blocks
        preparation = self.pool.prepare(hashes, None) if prepared else None
        self.carry_out(preparation)
        got = self.pool.pin(hashes, now=self.now)
        assert isinstance(got, Lease), "a pin adds nothing"
        self.note(got)
        if preparation is not None:
            ready = all(block.slot is None for block in preparation.held)
            if ready and gone == self.pool.stats.evicted_blocks:
                assert got.match.tokens == promised.tokens
            preparation.end(self.now)
        assert got.new_bytes == 0
        assert_resumable(self.pool, got, prompt, got.match.tokens)
        if keep:
            self.prompts[got.id] = prompt
        else:
            self.pool.release(got.id, self.now)

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(where=st.integers(0, 4000), truncate=st.booleans())
    def damage_ssd(self, where: int, truncate: bool) -> None:
        size = os.fstat(self.file.fileno()).st_size
        if truncate:
            os.ftruncate(self.file.fileno(), min(size, where))
        elif size:
            at = where % size
            (byte,) = os.pread(self.file.fileno(), 1, at)
            os.pwrite(self.file.fileno(), bytes([byte ^ 1]), at)

    @rule(prompt=PROMPTS)
    def compare(self, prompt: tuple[int, ...]) -> None:
        hashes = hashes_of(prompt)
        match = self.pool.match(hashes)
        best = self.reference.hit_blocks(hashes) * BLOCK
        assert match.tokens <= best
        if not self.pool.stats.evicted_blocks:
            assert match.tokens == best
        assert match.tokens <= match.attention_tokens <= len(hashes) * BLOCK

    @rule(prompt=PROMPTS)
    def journal_keeps_an_index_in_step(self, prompt: tuple[int, ...]) -> None:
        for event in self.journal.take(NODE, BLOCK, self.next_seq):
            assert self.index.apply(event)
            self.next_seq += 1
        held = self.pool.holdings()
        match = self.index.match({BLOCK: hashes_of(prompt)}).get(NODE)
        claimed = match.attention_tokens if match else 0
        if any(not r.closes for r in self.pool.rules):
            assert claimed == self.pool.match(hashes_of(prompt)).attention_tokens
        fresh = PrefixIndex()
        fresh.join(self.index.info(NODE))
        fresh.snapshot(NODE, held, 0)
        assert fresh.match({BLOCK: hashes_of(prompt)}).get(NODE) == match

    @invariant()
    def consistent(self) -> None:
        self.pool.check()

    def forget(self, lease_id: LeaseId) -> None:
        self.prompts.pop(lease_id)
        self.open.pop(lease_id, None)
        self.ended.append(lease_id)

    def note(self, lease: Lease) -> None:
        """No two leases have one id, also across restarts."""
        assert lease.id >= self.next_lease_id
        assert lease.id not in {*self.ended, *self.prompts, *self.answers}

    def submit(self, preparation: Preparation) -> None:
        waiting = {*self.queued, *self.ran}
        self.queued += (job for job in preparation.next_jobs(self.now) if job not in waiting)
        assert list(self.pool._tiers.jobs) == [*self.ran, *self.queued], "a job is never run"

    def carry_out(self, preparation: Preparation | None) -> None:
        """All of it, with the jobs that were queued before."""
        while preparation is not None:
            self.submit(preparation)
            if not self.queued and not self.ran:
                return
            self.finish_jobs()

    def finish_jobs(self) -> None:
        for job in self.ran:
            job.finish(self.now)
        for job in self.queued:
            job.run()
            job.finish(self.now)
        self.ran.clear()
        self.queued.clear()

    def teardown(self) -> None:
        with self.file:
            for preparation in self.preparing:
                preparation.end(self.now)
            for lease_id in (*self.prompts, *self.answers):
                self.pool.release(lease_id, self.now)
            self.finish_jobs()
            self.pool.check()
            occupancy = self.pool.occupancy()
            assert occupancy.used_pages == occupancy.idle_pages, "a page leaked"
            self.arena.close()
        os.close(self.full)


PoolMachine.TestCase.settings = settings(SEEDED, max_examples=80, stateful_step_count=80)
TestPool = PoolMachine.TestCase


@pytest.mark.grid
class TestPoolLonger(PoolMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(SEEDED, max_examples=200, stateful_step_count=80)
