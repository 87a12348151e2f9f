"""HybridPrefixPool: one pool for full-attention KV, windows and linear states (section 3.2).

A hand-off goes through three calls. They decide which pages can be seen:

    reserve ──► lease: run pinned, new pages allocated          writers, by segment
    commit  ──► block-aligned units become *prefix* pages        every later match
    release ──► *transfer* pages (the tail after the last boundary, states at odd lengths)
                are dropped; prefix pages stay until evicted, first to SSD where one is configured

A reservation is all or nothing: a refusal is a `NotNow`, and the pool has reserved and evicted
nothing for it. Written units are immutable: writers get new units only, readers committed ones
only. The pool has no clock: the caller passes the time. It has no locks: it has one owner. Leases
have no deadline: the owner decides when a lease ends, because only the owner knows when the last
writer has stopped.

An answer is reserved and committed in the same way when it has been generated, but within a number
of pages that other reservations cannot count on, and without pinning what precedes it: no other
reservation fails because of it.

What a reservation adds belongs to the tenant that it names, or else to the tenant of the prefix
that it continues. Evictions give tenants equal shares of the pool (`tenants.py`).

No call reads or writes the SSD. `reserve` and `pin` find what is in memory; `prepare` first brings
a prefix there, in jobs that the owner may run in another thread.

`lookup.py` has the reading side, `storage/tiers.py` eviction, spilling and reading back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from prfaas.cache.block_pool import BlockPool
from prfaas.cache.blocks import COMMON, Block, Eviction, PrefixNode
from prfaas.cache.checkpoints import CheckpointPolicy, Checkpoints
from prfaas.cache.groups import Hit, rules_for
from prfaas.cache.journal import Action, Journal
from prfaas.cache.lease import (
    AnswerBasis,
    Lease,
    LeaseId,
    LeaseRecord,
    Match,
    Occupancy,
    PoolStats,
)
from prfaas.cache.lookup import PrefixLookup
from prfaas.cache.storage.arena import PageLayout
from prfaas.cache.storage.places import LeaseTables
from prfaas.cache.storage.preparation import Preparation, Promises
from prfaas.cache.storage.ssd_jobs import ReadJob, SsdJob
from prfaas.cache.storage.tiers import CacheTiers, PoolStorage, in_prompt_order
from prfaas.cache.tree import PrefixTree
from prfaas.cache.units import Demand, UnitKey, closing_units, demand_of
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec
from prfaas.types import BlockHash, NotNow

TOO_LARGE_RETRY_S = 3600.0  # it will not fit later either
BUSY_RETRY_S = 1.0  # leases hold the pages, and the pool cannot know when they end


class _Survey(NamedTuple):
    """What a reservation finds, and what it adds."""

    nodes: list[PrefixNode | None]
    hit: Hit
    runs: dict[int, int]
    pinned: dict[UnitKey, Block]
    plan: Checkpoints
    demand: Demand
    new_pages: int


class HybridPrefixPool:
    """`lease_ids`: the ids of two pools of one owner, or of owners that follow one another, must
    not meet, so that a lease of one pool is not valid at the other. Default: from 1."""

    def __init__(
        self,
        spec: KVSpec,
        block_tokens: int,
        storage: PoolStorage,
        *,
        eviction: Eviction,
        checkpoints: CheckpointPolicy,
        journal: Journal | None = None,
        lease_ids: Iterator[int] | None = None,
    ) -> None:
        self.spec = spec
        self.block_tokens = block_tokens
        self.layout = storage.layout
        self.rules = rules_for(spec)
        self.stats = PoolStats()
        self._blocks = BlockPool(storage.capacity_pages, eviction, storage.share)
        self._tree = PrefixTree(len(self.rules))
        self._lookup = PrefixLookup(self.rules, block_tokens, self._tree)
        self._tiers = CacheTiers(storage, self._blocks, self._tree, self.stats, self._record)
        self._promises = Promises(self._tiers, self._blocks, storage.layout)
        self._checkpoints = checkpoints
        self._journal = journal
        self._leases: dict[LeaseId, LeaseRecord] = {}
        self._ids = count(1) if lease_ids is None else lease_ids

    # Reading --------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """The longest prefix every group can serve, from either tier. Changes nothing and holds
        nothing: `pin` or `reserve` before relying on it."""
        return self._lookup.match(self._lookup.hit(self._lookup.nodes(hashes), resident=False))

    def tenant(self, hashes: Sequence[BlockHash]) -> str:
        """To whom the longest known prefix belongs: its blocks have the names of one tenant."""
        return _tenant_of(self._lookup.nodes(hashes))

    def bytes_by_group(self) -> dict[str, int]:
        """Memory in use, padding included."""
        return {
            rule.name: self._blocks.pages_by_group[index] * self.layout.page_bytes
            for index, rule in enumerate(self.rules)
        }

    def occupancy(self) -> Occupancy:
        blocks = self._blocks
        return Occupancy(
            blocks.capacity_pages,
            blocks.used_pages,
            blocks.idle_pages + blocks.leaving_pages,
            len(self._leases),
            self._tiers.spilled_units,
        )

    def holdings(self) -> dict[str, list[BlockHash]]:
        """Every prefix block held, in either tier: the content of a snapshot for an index."""
        held: dict[str, list[BlockHash]] = {rule.name: [] for rule in self.rules}
        for node in self._tree:
            for rule, block in zip(self.rules, node.blocks, strict=True):
                if block is not None:
                    held[rule.name].append(node.hash)
        return held

    # Leasing --------------------------------------------------------------------------------------

    def prepare(
        self,
        hashes: Sequence[BlockHash],
        tokens: int | None,
        *,
        checkpoint_tokens: Iterable[int] | None = None,
        more_checkpoints: Iterable[int] = (),
        tenant: str = COMMON,
    ) -> Preparation | None:
        """Prepares `reserve`, or with `tokens` of None `pin`, with the same arguments; the caller
        ends the preparation after that call. `more_checkpoints`: boundaries that the reservation
        may have beside those of the policy. None without an SSD: there is nothing to prepare."""
        if not self._tiers.has_ssd:
            return None
        asked = _check_request(hashes, tokens, self.block_tokens, checkpoint_tokens)
        size = self.block_tokens
        more = [n // size for n in more_checkpoints if n % size == 0 and 0 < n <= (tokens or 0)]

        def survey() -> tuple[Iterable[Block], int]:
            found = self._survey(hashes, tokens, asked, more, resident=False)
            return found.pinned.values(), found.new_pages

        return Preparation(self._promises, survey, self._owner(tenant, self._lookup.nodes(hashes)))

    def pin(self, hashes: Sequence[BlockHash], *, now: float) -> Lease | NotNow:
        """Holds what is found in memory until released."""
        return self._lease(hashes, None, None, COMMON, now)

    def reserve(
        self,
        hashes: Sequence[BlockHash],
        tokens: int,
        *,
        now: float,
        checkpoint_tokens: Iterable[int] | None = None,
        tenant: str = COMMON,
    ) -> Lease | NotNow:
        """Holds what is found in memory and all that a prefill up to `tokens` adds, or nothing at
        all.

        `hashes` name the whole blocks of the first `tokens` tokens. The policy chooses the
        checkpoints and the lease lists them: the writer must fill them too. With
        `checkpoint_tokens` the checkpoints are exactly those boundaries (a sender has promised no
        others), and the end of the hand-off where it falls on a boundary.
        """
        asked = _check_request(hashes, tokens, self.block_tokens, checkpoint_tokens)
        return self._lease(hashes, tokens, asked, tenant, now)

    def set_aside(self, pages: int) -> None:
        """From now on reservations leave this many pages to answers that are being written. Idle
        prefixes use them until then."""
        self._blocks.aside.limit_pages = max(pages, self._blocks.aside.used_pages)

    def reserve_answer(
        self,
        hashes: Sequence[BlockHash],
        tokens: int,
        *,
        first_token: int,
        now: float,
        tenant: str = COMMON,
    ) -> Lease | NotNow:
        """Pages for what an engine has generated: its full attention up to `tokens`, a boundary,
        as far as the pool lacks it, and windows and states after `tokens`. The engine has attention
        from `first_token` on; the pool must have what precedes it, and still have it at the commit.
        Nothing stays pinned. Only pages that are left for answers are used; idle prefixes on them
        are evicted when they are worth less than the answer, or belong to a tenant that has more
        pages."""
        _check_request(hashes, tokens, self.block_tokens, (tokens,))
        nodes = self._lookup.nodes(hashes)
        hit = self._lookup.hit(nodes, resident=False)
        runs = self._lookup.runs(nodes, resident=False)
        if any(run * self.block_tokens < first_token for run in runs.values()):
            return NotNow(f"the first {first_token} tokens are not in the pool", TOO_LARGE_RETRY_S)
        complete = hit.blocks == len(hashes)
        firm = () if complete else (len(hashes),)
        demand = demand_of(self.rules, self.block_tokens, tokens, hit.blocks, runs, firm)
        pages = sum(self.layout.pages(group) for group, _ in demand.units)
        nbytes = pages * self.layout.page_bytes
        if not self._blocks.can_make_room(pages, answer=True):
            return NotNow(f"no room for {nbytes} bytes of an answer", BUSY_RETRY_S)
        owner = self._owner(tenant, nodes)
        if not self._blocks.has_room(pages):
            cached = hit.blocks * self.block_tokens
            shares = self._blocks.tenants
            with shares.wanting(owner, pages):
                admitted = shares.admits(owner, tokens - cached, cached, nbytes, now)
            if not admitted:
                return NotNow("the answer is worth less than what it would evict", BUSY_RETRY_S)
            before = self._lookup.blocks_to_pin(nodes, Hit(0, 0), runs).values()
            if not _make_answer_room(self._blocks, self._tiers, pages, before, owner, now):
                return NotNow(f"no room for {nbytes} bytes of an answer", BUSY_RETRY_S)
        new = _allocate(self._blocks, self.layout, demand, owner)
        self._blocks.aside.used_pages += pages
        lease = Lease(
            id=LeaseId(next(self._ids)),
            tokens=tokens,
            match=self._lookup.match(hit),
            skip_tokens={self.rules[g].name: run * self.block_tokens for g, run in runs.items()},
            checkpoint_tokens=tuple(length * self.block_tokens for length in firm),
            new_bytes=sum(self.layout.unit_bytes[group] for group, _ in new),
        )
        self._leases[lease.id] = LeaseRecord(
            hashes=tuple(hashes),
            pinned={},
            new=new,
            promotable=demand.promotable,
            spare_tokens=frozenset(),
            answer=AnswerBasis(runs, complete, pages),
        )
        return lease

    def spill_ahead(self, now: float) -> Sequence[SsdJob]:
        """In a pool with an SSD tier: starts to spill the next victims when not all pages that are
        left for answers are free, because `reserve_answer` would drop the victims. The owner runs
        and finishes the jobs, and calls again until there are none."""
        blocks, jobs = self._blocks, self._tiers.jobs
        while not blocks.has_room(blocks.aside.left_pages - blocks.leaving_pages):
            if not self._tiers.start_spills(now):
                break
            if len(jobs):
                return list(jobs)
        return ()

    def tables(self, lease_id: LeaseId) -> LeaseTables:
        """The pages of the lease's units; units keep their pages until the lease is released.
        Readers see the prefix that was found and, once committed, the rest. Writers see new units
        of an uncommitted lease only. InputError when the lease is not known here."""
        record = _known(self._leases, lease_id)
        readable = {key: block.pages for key, block in record.pinned.items()}
        new = {key: block.pages for key, block in record.new.items()}
        if record.committed:
            return LeaseTables({**readable, **new}, {})
        return LeaseTables(readable, new)

    def commit(self, lease_id: LeaseId, now: float) -> bool:
        """Everything of the lease is written and verified: block-aligned units become prefix.
        A second commit has no effect. False, and nothing has changed, when the pool has lost what
        precedes an answer. InputError when the lease is not known here."""
        record = _known(self._leases, lease_id)
        if record.committed:
            return True
        if record.answer is not None:
            # Checked here although `reserve_answer` has found it: nothing was pinned since, so that
            # memory may have evicted it, and an SSD may have failed to read it back.
            if not self._lookup.holds(record.hashes, record.answer):
                return False
            self.stats.kept_answers += 1
        record.committed = True
        parent: PrefixNode | None = None
        path: list[PrefixNode] = []
        for name in record.hashes:
            parent = self._tree.add(name, parent, answer=record.answer is not None)
            path.append(parent)
        for key in sorted(record.promotable):
            group = key[0]
            node = path[self._lookup.block_number(key)]
            if self._tiers.keep(record.new[key], node) and self.rules[group].closes:
                node.spare = (node.depth * self.block_tokens) in record.spare_tokens
                node.last_used_s = now
        # Chained hashes make one path, and its end would suffice. A client may send others: names
        # that are known under another parent, or the same name twice.
        for node in reversed(path):
            if self._tree.get(node.hash) is node:
                self._tree.prune(node)
        return True

    def release(self, lease_id: LeaseId, now: float) -> bool:
        """Ends a lease and drops what was not committed. False when it had ended before."""
        record = self._leases.pop(lease_id, None)
        if record is None:
            return False
        blocks = [*record.pinned.values(), *record.new.values()]
        self._blocks.release(in_prompt_order(blocks), now)
        if record.answer is not None:
            # Its pages are free, or those of an idle prefix, which the next answer can evict.
            self._blocks.aside.used_pages -= record.answer.new_pages
        return True

    def check(self) -> None:
        """Every invariant: pages, tree, tiers; reference counts are exactly the leases'."""
        self._blocks.check()
        self._tree.check()
        refs: dict[int, int] = {}
        for record in self._leases.values():
            for block in (*record.pinned.values(), *record.new.values()):
                refs[id(block)] = refs.get(id(block), 0) + 1
                assert block.slot is None, f"leased but not in memory: {block}"
            if not record.committed:
                assert all(block.node is None for block in record.new.values()), "seen too early"
            assert record.promotable <= set(record.new)
        answers = [record.answer for record in self._leases.values() if record.answer is not None]
        assert self._blocks.aside.used_pages == sum(answer.new_pages for answer in answers)
        preparing = [block for one in self._promises.active for block in one.held]
        reading = [job.block for job in self._tiers.jobs if isinstance(job, ReadJob)]
        for block in (*preparing, *reading):
            refs[id(block)] = refs.get(id(block), 0) + 1
        for block in self._blocks.live_blocks():
            assert block.refs == refs.get(id(block), 0), f"references do not match: {block}"
            assert len(block.pages) == self.layout.pages(block.group), block
            if block.node is not None:
                assert block.node.blocks[block.group] is block
        self._tiers.check()

    def __repr__(self) -> str:
        blocks = self._blocks
        return (
            f"HybridPrefixPool({len(self._tree)} prefixes, {blocks.used_pages} of "
            f"{blocks.capacity_pages} pages used, {blocks.idle_pages} idle, "
            f"{self._tiers.spilled_units} units on SSD, {len(self._leases)} leases)"
        )

    def _survey(
        self,
        hashes: Sequence[BlockHash],
        tokens: int | None,
        checkpoint_tokens: tuple[int, ...] | None,
        more_checkpoints: Iterable[int] = (),
        *,
        resident: bool,
    ) -> _Survey:
        """`tokens` of None: the lease adds nothing to what is found."""
        lookup = self._lookup
        nodes = lookup.nodes(hashes)
        hit = lookup.hit(nodes, resident=resident)
        plan, demand = Checkpoints(()), Demand()
        if tokens is None:
            runs = lookup.equal_runs(hit.blocks)
        else:
            runs = lookup.runs(nodes, resident=resident)
            size = self.block_tokens
            if checkpoint_tokens is None:
                plan = self._checkpoints.plan(tokens // size, hit.blocks, hit.attention)
            else:
                plan = _asked_checkpoints(tokens, size, hit, checkpoint_tokens)
            firm = (*plan.firm, *(length for length in more_checkpoints if length > hit.blocks))
            demand = demand_of(self.rules, self.block_tokens, tokens, hit.blocks, runs, firm)
        pinned = lookup.blocks_to_pin(nodes, hit, runs)
        pages = sum(self.layout.pages(group) for group, _ in demand.units)
        return _Survey(nodes, hit, runs, pinned, plan, demand, pages)

    def _lease(
        self,
        hashes: Sequence[BlockHash],
        tokens: int | None,
        checkpoint_tokens: tuple[int, ...] | None,
        tenant: str,
        now: float,
    ) -> Lease | NotNow:
        """`tokens` of None: the lease adds nothing to what is found."""
        nodes, hit, runs, pinned, plan, demand, pages = self._survey(
            hashes, tokens, checkpoint_tokens, resident=True
        )
        for block in pinned.values():
            self._blocks.pin(block)
        if not self._blocks.can_make_room(pages):
            self._blocks.release(in_prompt_order(pinned.values()), now)
            self.stats.refused += 1
            return _refusal(self._blocks, self.layout, pages)
        owner = self._owner(tenant, nodes)
        self._tiers.make_room(pages, owner, now)
        taken = self._take_spares(plan.spare, demand) if tokens is not None else ()
        new = _allocate(self._blocks, self.layout, demand, owner)
        match = self._lookup.match(hit)
        lease = Lease(
            id=LeaseId(next(self._ids)),
            tokens=match.tokens if tokens is None else tokens,
            match=match,
            skip_tokens={self.rules[g].name: run * self.block_tokens for g, run in runs.items()},
            checkpoint_tokens=tuple(
                sorted(length * self.block_tokens for length in (*plan.firm, *taken))
            ),
            new_bytes=sum(self.layout.unit_bytes[group] for group, _ in new),
        )
        self._leases[lease.id] = LeaseRecord(
            hashes=tuple(hashes),
            pinned=pinned,
            new=new,
            promotable=demand.promotable,
            spare_tokens=frozenset(length * self.block_tokens for length in taken),
        )
        resumed = nodes[hit.blocks - 1] if hit.blocks else None
        self._tree.continued(resumed)
        _count(self.stats, match, resumed)
        return lease

    def _take_spares(self, spare: Iterable[int], demand: Demand) -> tuple[int, ...]:
        """Adds those spare checkpoints for which pages are free: none is worth an eviction."""
        taken: list[int] = []
        pages = sum(self.layout.pages(group) for group, _ in demand.units)
        for length in spare:
            units = list(closing_units(self.rules, self.block_tokens, length * self.block_tokens))
            more = sum(self.layout.pages(u.key[0]) for u in units if u.key not in demand.units)
            wanted = pages + more
            if not self._blocks.has_room(wanted) or not self._blocks.can_make_room(wanted):
                break
            demand.add(units, keep=True)
            pages = wanted
            taken.append(length)
        return tuple(taken)

    def _owner(self, tenant: str, nodes: Sequence[PrefixNode | None]) -> str:
        """To whom the new blocks of a reservation belong."""
        return self._blocks.tenants.owner(tenant or _tenant_of(nodes))

    def _record(self, action: Action, block: Block, node: PrefixNode) -> None:
        if self._journal is not None:
            self._journal.record(action, self.rules[block.group].name, node.hash)


def _make_answer_room(
    blocks: BlockPool,
    tiers: CacheTiers,
    pages: int,
    before: Collection[Block],
    tenant: str,
    now: float,
) -> bool:
    """Evicts idle blocks, but not `before`: the answer would be useless without what precedes it.
    False, and nothing is evicted, when there is no room."""
    for block in before:
        tiers.hold(block)
    possible = blocks.can_make_room(pages, answer=True)
    if possible:
        tiers.make_room(pages, tenant, now)
    blocks.release(in_prompt_order(before), now)
    return possible


def _asked_checkpoints(
    tokens: int, block_tokens: int, hit: Hit, asked: tuple[int, ...]
) -> Checkpoints:
    aligned = {tokens} if tokens % block_tokens == 0 else set()
    lengths = {length // block_tokens for length in {*asked, *aligned}}
    return Checkpoints(tuple(sorted(length for length in lengths if length > hit.blocks)))


def _count(stats: PoolStats, match: Match, resumed: PrefixNode | None) -> None:
    stats.queries += 1
    stats.hit_tokens += match.tokens
    stats.lost_tokens += match.lost_tokens
    if resumed is not None:
        resumed.hits += 1


def _refusal(blocks: BlockPool, layout: PageLayout, pages: int) -> NotNow:
    nbytes = pages * layout.page_bytes
    if not blocks.can_ever_hold(pages):
        why = f"{nbytes} bytes are more than the pool has"
        if pages <= (blocks.supply.most_pages or 0) - blocks.aside.limit_pages:
            why += ", because another form shares its memory"
        return NotNow(why, TOO_LARGE_RETRY_S)
    return NotNow(f"no room for {nbytes} bytes", BUSY_RETRY_S)


def _allocate(
    blocks: BlockPool, layout: PageLayout, demand: Demand, tenant: str
) -> dict[UnitKey, Block]:
    """In the order of the demand. The pages are in the order of groups and tokens, in which engines
    copy them."""
    sizes = [layout.pages(group) for group in range(len(layout.unit_bytes))]
    order = sorted(demand.units)
    allocated = blocks.allocate([(group, sizes[group]) for group, _ in order], tenant)
    found = dict(zip(order, allocated, strict=True))
    new: dict[UnitKey, Block] = {}
    for key, filled_from in demand.units.items():
        new[key] = found[key]
        new[key].filled_from = filled_from
    return new


def _tenant_of(nodes: Sequence[PrefixNode | None]) -> str:
    held = (block for node in reversed(nodes) if node is not None for block in node.blocks)
    return next((block.tenant for block in held if block is not None), COMMON)


def _check_request(
    hashes: Sequence[BlockHash],
    tokens: int | None,
    block_tokens: int,
    checkpoint_tokens: Iterable[int] | None,
) -> tuple[int, ...] | None:
    """The checkpoints that were asked for. InputError when the numbers do not fit together."""
    if tokens is None:
        return None
    if tokens < 1 or len(hashes) != tokens // block_tokens:
        raise InputError(
            f"{len(hashes)} block hashes for {tokens} tokens in blocks of {block_tokens}",
            fix="send one hash per whole block",
        )
    wanted = None if checkpoint_tokens is None else tuple(checkpoint_tokens)
    for length in wanted or ():
        if length % block_tokens or not 0 < length <= tokens:
            raise InputError(
                f"a checkpoint after {length} of {tokens} tokens",
                fix=f"use a multiple of {block_tokens} within the prompt",
            )
    return wanted


def _known(leases: Mapping[LeaseId, LeaseRecord], lease_id: LeaseId) -> LeaseRecord:
    record = leases.get(lease_id)
    if record is None:
        raise InputError(
            f"lease {lease_id} has ended, or this pool has not given it",
            where="lease_id",
            fix="reserve again",
        )
    return record
