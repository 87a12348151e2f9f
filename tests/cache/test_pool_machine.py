"""The pool against a model that forgets nothing: real bytes, two tiers, faults, all policies."""

from __future__ import annotations

import os
import tempfile

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
from prfaas.cache.storage.ssd import SpillFile
from prfaas.cache.units import closing_units
from prfaas.types import BlockHash, ClusterId, NodeId, NotNow
from tests.cache.builders import BLOCK, SEEDED, SPECS, hashes_of, layout_of, make_pool
from tests.cache.filling import assert_resumable, write

NODE = NodeId("n")
# Prompts over two kinds of block share prefixes and diverge all the time.
PROMPTS = st.builds(
    lambda blocks, tail: tuple(t for b in blocks for t in [b] * BLOCK) + (9,) * tail,
    st.lists(st.integers(0, 1), min_size=1, max_size=7),
    st.integers(0, BLOCK - 1),
)
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
        ssd_pages=st.sampled_from([None, 0, 8, 100]),
    )
    def build(
        self, spec: str, evict: str, checkpoints: str, pages: int, ssd_pages: int | None
    ) -> None:
        layout = layout_of(SPECS[spec])
        self.file = tempfile.TemporaryFile()
        memory = os.memfd_create("pool")
        os.ftruncate(memory, pages * layout.page_bytes)
        self.arena = Arena(memory, layout.page_bytes, pages)
        os.close(memory)  # the mapping stays
        ssd = None
        if ssd_pages is not None:
            ssd = SpillFile(self.file.fileno(), layout.page_bytes, ssd_pages)
        self.journal = Journal()
        self.pool = make_pool(
            SPECS[spec],
            pages=pages,
            evict=evict,
            checkpoints=checkpoint_policy(checkpoints, BLOCK),
            arena=self.arena,
            ssd=ssd,
            journal=self.journal,
        )
        self.reference = Reference(self.pool.rules)
        self.index = PrefixIndex()
        self.index.join(NodeInfo(NODE, ClusterId("c"), BLOCK, self.pool.rules))
        self.next_seq = 0
        self.now = 0.0
        self.open: dict[LeaseId, Lease] = {}  # not committed yet
        self.prompts: dict[LeaseId, tuple[int, ...]] = {}  # of every lease

    # Few leases at a time, or everything is refused.
    @precondition(lambda self: len(self.prompts) < 2)
    @rule(prompt=PROMPTS | SHORT, ask=st.booleans())
    def reserve(self, prompt: tuple[int, ...], ask: bool) -> None:
        hashes = hashes_of(prompt)
        asked = (BLOCK,) if ask and hashes else None
        before = self.pool.match(hashes)
        damage = self.pool.stats.unreadable_blocks
        used = self.pool.bytes_by_group()
        got = self.pool.reserve(hashes, len(prompt), now=self.now, checkpoint_tokens=asked)
        if isinstance(got, NotNow):
            assert got.retry_after_s >= 0
            if damage == self.pool.stats.unreadable_blocks:
                assert self.pool.match(hashes) == before, "a refusal evicted something"
                assert self.pool.bytes_by_group() == used
            return
        if damage == self.pool.stats.unreadable_blocks:
            assert got.match == before
        write(self.pool, got, prompt)
        assert_resumable(self.pool, got, prompt, got.match.tokens)
        self.open[got.id] = got
        self.prompts[got.id] = prompt

    @rule(prompt=PROMPTS)
    def serve(self, prompt: tuple[int, ...]) -> None:
        """A whole request at once: what fills the pool."""
        hashes = hashes_of(prompt)
        lease = self.pool.reserve(hashes, len(prompt), now=self.now)
        if isinstance(lease, NotNow):
            return
        write(self.pool, lease, prompt)
        self.pool.commit(lease.id, self.now)
        self.reference.commit(lease, hashes)
        self.pool.check()
        assert self.pool.release(lease.id, self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        self.pool.commit(lease.id, self.now)
        prompt = self.prompts[lease.id]
        self.reference.commit(lease, hashes_of(prompt))
        assert_resumable(self.pool, lease, prompt, lease.tokens)
        del self.open[lease.id]

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.prompts)))
        assert self.pool.release(lease_id, self.now)
        assert not self.pool.release(lease_id, self.now)
        self.forget(lease_id)

    @precondition(lambda self: len(self.prompts) < 3)
    @rule(prompt=PROMPTS, keep=st.booleans())
    def pin(self, prompt: tuple[int, ...], keep: bool) -> None:
        hashes = hashes_of(prompt)
        got = self.pool.pin(hashes, now=self.now)
        if isinstance(got, NotNow):
            return
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

    def teardown(self) -> None:
        with self.file:
            for lease_id in list(self.prompts):
                self.pool.release(lease_id, self.now)
            self.pool.check()
            self.arena.close()


PoolMachine.TestCase.settings = settings(SEEDED, max_examples=80, stateful_step_count=80)
TestPool = PoolMachine.TestCase


@pytest.mark.slow
class TestPoolLonger(PoolMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(SEEDED, max_examples=200, stateful_step_count=80)
