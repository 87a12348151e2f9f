"""HybridPrefixPool: one pool for full-attention KV, windows and linear states (section 3.2).

The life of a hand-off, and who may see its pages:

    reserve ──► lease: run pinned, new pages allocated          writers, by segment
    commit  ──► block-aligned units become *prefix* pages        every later match
    release ──► *transfer* pages (the tail behind the last boundary, states at odd lengths)
                are dropped; prefix pages stay until evicted, first to SSD where there is one

All or nothing: a refusal is a `NotNow`, and nothing was reserved or evicted for it. Written units
are immutable: writers get new units only, readers committed ones only.
No clock: whoever calls says what time it is. No locks: one owner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from prfaas.cache.block_pool import Block, BlockPool, Eviction
from prfaas.cache.checkpoints import CheckpointPolicy, Checkpoints
from prfaas.cache.groups import Hit, hybrid_hit, rules_for
from prfaas.cache.journal import Action, Journal
from prfaas.cache.lease import Held, Lease, LeaseId, Match, Occupancy, PoolStats
from prfaas.cache.storage.arena import Arena, PageLayout
from prfaas.cache.storage.places import LeaseTables, segment_ranges
from prfaas.cache.storage.ssd import SpillFile
from prfaas.cache.tree import Node, PrefixTree
from prfaas.cache.units import Demand, UnitKey, closing_units, growing_units
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec, Segment
from prfaas.types import BlockHash, NotNow

TOO_LARGE_RETRY_S = 3600.0  # it will not fit later either; come back with another pool
BUSY_RETRY_S = 1.0  # when no lease says when it ends


class HybridPrefixPool:
    def __init__(
        self,
        spec: KVSpec,
        block_tokens: int,
        layout: PageLayout,
        *,
        capacity_pages: int | None,
        eviction: Eviction,
        checkpoints: CheckpointPolicy,
        arena: Arena | None = None,
        ssd: SpillFile | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Without an arena it keeps books only. `capacity_pages` of None is for such replays."""
        assert ssd is None or arena is not None, "only real bytes can be spilled"
        if arena is not None:
            assert capacity_pages is not None and arena.pages >= capacity_pages
            assert arena.page_bytes == layout.page_bytes
        self.spec = spec
        self.block_tokens = block_tokens
        self.layout = layout
        self.rules = rules_for(spec)
        self.stats = PoolStats()
        self._has_full = any(not rule.closes for rule in self.rules)
        self._blocks = BlockPool(capacity_pages, eviction)
        self._tree = PrefixTree(len(self.rules))
        self._checkpoints = checkpoints
        self._arena = arena
        self._ssd = ssd
        self._spilled: OrderedDict[int, Block] = OrderedDict()  # oldest spill first
        self._journal = journal
        self._leases: dict[LeaseId, Held] = {}
        self._ids = count(1)

    # Asking ---------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """The longest prefix every group can serve. Changes nothing and holds nothing: `pin` or
        `reserve` before relying on it."""
        hit = self._hit(self._nodes(hashes))
        return self._as_match(hit)

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
            blocks.idle_pages,
            len(self._leases),
            len(self._spilled),
        )

    def holdings(self) -> dict[str, list[BlockHash]]:
        """Every prefix block held, in either tier: what a snapshot for an index says."""
        held: dict[str, list[BlockHash]] = {rule.name: [] for rule in self.rules}
        for node in self._tree:
            for rule, block in zip(self.rules, node.blocks, strict=True):
                if block is not None:
                    held[rule.name].append(node.hash)
        return held

    # Taking ---------------------------------------------------------------------------------------

    def pin(self, hashes: Sequence[BlockHash], *, now: float, ttl_s: float) -> Lease | NotNow:
        """Holds what `match` finds, in memory, until released."""
        return self._lease(hashes, None, None, now, ttl_s)

    def reserve(
        self,
        hashes: Sequence[BlockHash],
        tokens: int,
        *,
        now: float,
        ttl_s: float,
        checkpoint_tokens: Iterable[int] | None = None,
    ) -> Lease | NotNow:
        """Holds what is found and all that a prefill up to `tokens` adds, or nothing at all.

        `hashes` name the whole blocks of the first `tokens` tokens. Checkpoints are the policy's
        choice, and the lease says which: whoever fills it must fill them too. With
        `checkpoint_tokens` they are exactly those boundaries (a sender that has promised no
        others), and the hand-off itself where it falls on one.
        """
        if tokens < 1 or len(hashes) != tokens // self.block_tokens:
            raise InputError(
                f"{len(hashes)} block hashes for {tokens} tokens in blocks of {self.block_tokens}",
                fix="send one hash per whole block",
            )
        wanted = None if checkpoint_tokens is None else tuple(checkpoint_tokens)
        for length in wanted or ():
            if length % self.block_tokens or not 0 < length <= tokens:
                raise InputError(
                    f"a checkpoint after {length} of {tokens} tokens",
                    fix=f"use a multiple of {self.block_tokens} within the prompt",
                )
        return self._lease(hashes, tokens, wanted, now, ttl_s)

    def write_views(self, lease_id: LeaseId, segment: Segment) -> list[memoryview]:
        """Where a segment's bytes go, in order. New units of an uncommitted lease only."""
        held = self._leases[lease_id]
        assert not held.committed, "committed units are immutable"
        return self._views(segment, held.new.get)

    def read_views(self, lease_id: LeaseId, segment: Segment) -> list[memoryview]:
        """A segment's bytes, in order: of the prefix found and, once committed, of the rest."""
        return self._views(segment, self._leases[lease_id].readable)

    def tables(self, lease_id: LeaseId) -> LeaseTables:
        """Which pages the lease's units are on: they stay there until it is released. For whoever
        reads and writes them elsewhere; the rules of `read_views` and `write_views` hold."""
        held = self._leases[lease_id]
        readable = {key: block.pages for key, block in held.pinned.items()}
        new = {key: block.pages for key, block in held.new.items()}
        if held.committed:
            return LeaseTables({**readable, **new}, {})
        return LeaseTables(readable, new)

    # Giving back ----------------------------------------------------------------------------------

    def commit(self, lease_id: LeaseId, now: float) -> None:
        """Everything of the lease is written and verified: block-aligned units become prefix."""
        held = self._leases[lease_id]
        if held.committed:
            return
        held.committed = True
        parent: Node | None = None
        path: list[Node] = []
        for name in held.hashes:
            parent = self._tree.add(name, parent)
            path.append(parent)
        for key in sorted(held.promotable):
            group = key[0]
            node = path[self._block_number(key)]
            if self._keep(held.new[key], node) and self.rules[group].closes:
                node.spare = (node.depth * self.block_tokens) in held.spare_tokens
                node.last_used_s = now
        if path:
            self._tree.prune(path[-1])

    def renew(self, lease_id: LeaseId, now: float) -> None:
        held = self._leases[lease_id]
        held.deadline_s = now + held.ttl_s

    def release(self, lease_id: LeaseId, now: float) -> bool:
        """Lets go; what was not committed is gone. False when the lease has ended before."""
        held = self._leases.pop(lease_id, None)
        if held is None:
            return False
        self._blocks.release(held.blocks_in_order(), now)
        return True

    def overdue(self, now: float) -> tuple[LeaseId, ...]:
        """Leases past their deadline. Whoever lets others write into pages waits for them to stop,
        then releases; `expire` is for everybody else."""
        return tuple(i for i, held in self._leases.items() if held.deadline_s <= now)

    def expire(self, now: float) -> tuple[LeaseId, ...]:
        ended = self.overdue(now)
        for lease_id in ended:
            self.release(lease_id, now)
        return ended

    def check(self) -> None:
        """Every invariant: pages, tree, tiers; reference counts are exactly the leases'."""
        self._blocks.check()
        self._tree.check()
        refs: dict[int, int] = {}
        for held in self._leases.values():
            for block in (*held.pinned.values(), *held.new.values()):
                refs[id(block)] = refs.get(id(block), 0) + 1
                assert block.slot is None, f"leased but not in memory: {block}"
            if not held.committed:
                assert all(block.node is None for block in held.new.values()), "seen too early"
            assert held.promotable <= set(held.new)
        for block in self._blocks.live_blocks():
            assert block.refs == refs.get(id(block), 0), f"references do not match: {block}"
            assert len(block.pages) == self.layout.pages(block.group), block
            if block.node is not None:
                assert block.node.blocks[block.group] is block
        spilled = [b for node in self._tree for b in node.blocks if b is not None and b.slot]
        assert {id(block) for block in spilled} == set(self._spilled)
        assert all(block.refs == 0 and not block.pages for block in spilled)
        if self._ssd is not None:
            self._ssd.check()

    def __repr__(self) -> str:
        blocks = self._blocks
        return (
            f"HybridPrefixPool({len(self._tree)} prefixes, {blocks.used_pages} of "
            f"{blocks.capacity_pages} pages used, {blocks.idle_pages} idle, "
            f"{len(self._spilled)} units on SSD, {len(self._leases)} leases)"
        )

    # Inside ---------------------------------------------------------------------------------------

    def _nodes(self, hashes: Sequence[BlockHash]) -> list[Node | None]:
        nodes: list[Node | None] = []
        for name in hashes:
            node = self._tree.get(name)
            if node is None and self._has_full:
                break  # no attention run gets past it
            nodes.append(node)
        return nodes

    def _hit(self, nodes: Sequence[Node | None]) -> Hit:
        def has(group: int, block: int, unneeded: int) -> bool:
            node = nodes[block]
            held = node.blocks[group] if node is not None else None
            return held is not None and held.filled_from <= unneeded

        return hybrid_hit(self.rules, has, len(nodes), self.block_tokens)

    def _as_match(self, hit: Hit) -> Match:
        return Match(hit.blocks * self.block_tokens, hit.attention * self.block_tokens)

    def _lease(
        self,
        hashes: Sequence[BlockHash],
        tokens: int | None,
        checkpoint_tokens: tuple[int, ...] | None,
        now: float,
        ttl_s: float,
    ) -> Lease | NotNow:
        """`tokens` of None: nothing is to be added to what is found."""
        while True:
            nodes = self._nodes(hashes)
            hit = self._hit(nodes)
            runs = self._runs(nodes) if tokens is not None else self._all_runs(hit.blocks)
            pinned = self._found(nodes, hit, runs)
            plan, demand = Checkpoints(()), Demand()
            if tokens is not None:
                plan = self._plan(tokens, hit, checkpoint_tokens)
                demand = self._demand(tokens, plan.firm, hit, runs)
            pages = sum(self.layout.pages(group) for group, _ in demand.units)
            pages += sum(self.layout.pages(b.group) for b in pinned.values() if b.slot is not None)
            for block in pinned.values():
                self._blocks.pin(block)
            if not self._blocks.can_make_room(pages):
                self._blocks.release(_in_order(pinned.values()), now)
                return self._refusal(pages, now)
            self._make_room(pages, now)
            if self._read_back(pinned, now):
                break
            # Something on SSD was not what was written. It is gone, and the hit is another.

        taken = self._take_spares(plan.spare, demand) if tokens is not None else ()
        new = {key: self._allocate(key, demand.units[key]) for key in demand.units}
        match = self._as_match(hit)
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
        self._leases[lease.id] = Held(
            lease=lease,
            hashes=tuple(hashes),
            deadline_s=now + ttl_s,
            ttl_s=ttl_s,
            pinned=pinned,
            new=new,
            promotable=demand.promotable,
            spare_tokens=frozenset(length * self.block_tokens for length in taken),
        )
        self._count(match, nodes[hit.blocks - 1] if hit.blocks else None)
        return lease

    def _runs(self, nodes: Sequence[Node | None]) -> dict[int, int]:
        """Per full-attention group, the blocks it holds from the start without a hole."""
        runs: dict[int, int] = {}
        for group, rule in enumerate(self.rules):
            if not rule.closes:
                run = 0
                while run < len(nodes) and (node := nodes[run]) and node.blocks[group] is not None:
                    run += 1
                runs[group] = run
        return runs

    def _all_runs(self, blocks: int) -> dict[int, int]:
        return {group: blocks for group, rule in enumerate(self.rules) if not rule.closes}

    def _found(
        self, nodes: Sequence[Node | None], hit: Hit, runs: dict[int, int]
    ) -> dict[UnitKey, Block]:
        """What a lease pins: the runs, and the closing groups' units at the hit."""
        keys = [(group, block) for group, run in runs.items() for block in range(run)]
        if hit.blocks:
            length = hit.blocks * self.block_tokens
            keys += (unit.key for unit in closing_units(self.rules, self.block_tokens, length))
        found: dict[UnitKey, Block] = {}
        for key in keys:
            node = nodes[self._block_number(key)]
            block = node.blocks[key[0]] if node is not None else None
            assert block is not None, f"matched but not there: {key}"
            found[key] = block
        return found

    def _plan(self, tokens: int, hit: Hit, asked: tuple[int, ...] | None) -> Checkpoints:
        if asked is None:
            return self._checkpoints.plan(tokens // self.block_tokens, hit.blocks, hit.attention)
        aligned = {tokens} if tokens % self.block_tokens == 0 else set()
        lengths = {length // self.block_tokens for length in {*asked, *aligned}}
        return Checkpoints(tuple(sorted(length for length in lengths if length > hit.blocks)))

    def _demand(self, tokens: int, firm: Iterable[int], hit: Hit, runs: dict[int, int]) -> Demand:
        size = self.block_tokens
        demand = Demand()
        demand.add(growing_units(self.rules, size, runs, tokens), keep_before=tokens // size)
        if tokens > hit.blocks * size:
            demand.add(closing_units(self.rules, size, tokens))  # the hand-off itself
        for length in firm:
            demand.add(closing_units(self.rules, size, length * size), keep=True)
        return demand

    def _take_spares(self, spare: Iterable[int], demand: Demand) -> tuple[int, ...]:
        """Adds those checkpoints for which there are free pages: none is worth an eviction."""
        taken: list[int] = []
        pages = sum(self.layout.pages(group) for group, _ in demand.units)
        for length in spare:
            units = list(closing_units(self.rules, self.block_tokens, length * self.block_tokens))
            more = sum(self.layout.pages(u.key[0]) for u in units if u.key not in demand.units)
            if not self._blocks.has_room(pages + more):
                break
            demand.add(units, keep=True)
            pages += more
            taken.append(length)
        return tuple(taken)

    def _allocate(self, key: UnitKey, filled_from: int) -> Block:
        block = self._blocks.allocate(key[0], self.layout.pages(key[0]))
        block.filled_from = filled_from
        return block

    def _refusal(self, pages: int, now: float) -> NotNow:
        self.stats.refused += 1
        nbytes = pages * self.layout.page_bytes
        if not self._blocks.can_ever_hold(pages):
            return NotNow(f"{nbytes} bytes are more than the pool has", TOO_LARGE_RETRY_S)
        deadlines = [held.deadline_s for held in self._leases.values()]
        wait_s = min(deadlines, default=now + BUSY_RETRY_S) - now
        return NotNow(f"no room for {nbytes} bytes", max(0.0, wait_s))

    def _make_room(self, pages: int, now: float) -> None:
        while not self._blocks.has_room(pages):
            victims = self._blocks.next_victims(now)
            assert victims, "idle pages were promised"
            for block in victims:
                self._evict(block)

    def _evict(self, block: Block) -> None:
        """Out of memory; to SSD where there is room or something older, else for good."""
        node = block.node
        assert node is not None
        slot = None
        if self._ssd is not None and self._arena is not None:
            count = len(block.pages)
            while self._ssd.free_pages < count and (oldest := self._oldest_spill()) is not None:
                self._forget(oldest)
            slot = self._ssd.write(self._arena.views(block.pages))
        self._blocks.evict(block)
        if slot is not None:
            block.slot = slot
            self._tree.resident(node, -1)
            self._spilled[id(block)] = block
            self.stats.spilled_blocks += 1
        else:
            self._tree.detach(block)
            self._gone(block, node)

    def _oldest_spill(self) -> Block | None:
        """Not one that is about to be read back."""
        return next((block for block in self._spilled.values() if not block.refs), None)

    def _forget(self, block: Block) -> None:
        """A spilled block is dropped from SSD too."""
        node = block.node
        assert self._ssd is not None and node is not None and block.slot is not None
        self._tree.detach(block)
        del self._spilled[id(block)]
        self._ssd.free(block.slot)
        block.slot = None
        self._gone(block, node)

    def _gone(self, block: Block, node: Node) -> None:
        self.stats.evicted_blocks += 1
        self._record("removed", block, node)

    def _record(self, action: Action, block: Block, node: Node) -> None:
        if self._journal is not None:
            self._journal.record(action, self.rules[block.group].name, node.hash)

    def _read_back(self, pinned: dict[UnitKey, Block], now: float) -> bool:
        """Brings pinned blocks into memory. False when one was unreadable: everything is then let
        go, and that one forgotten."""
        for block in pinned.values():
            if block.slot is None:
                continue
            assert self._ssd is not None and self._arena is not None
            self._blocks.restore(block, self.layout.pages(block.group))
            if not self._ssd.read(block.slot, self._arena.views(block.pages)):
                self._forget(block)
                self.stats.unreadable_blocks += 1
                self._blocks.release(_in_order(pinned.values()), now)
                return False
            del self._spilled[id(block)]
            self._ssd.free(block.slot)
            block.slot = None
            assert block.node is not None
            self._tree.resident(block.node, +1)
            self.stats.promoted_blocks += 1
        return True

    def _keep(self, block: Block, node: Node) -> bool:
        """Makes a written block the node's, unless the node has one that is as full."""
        existing = node.blocks[block.group]
        if existing is not None and existing.slot is None:
            if existing.filled_from <= block.filled_from:
                return False
            if existing.refs == 0:
                self._blocks.evict(existing)
            self._tree.detach(existing, prune=False)  # its readers keep it until they release it
        elif existing is not None:
            assert self._ssd is not None and existing.slot is not None
            if existing.filled_from < block.filled_from:
                return False
            self._tree.detach(existing, prune=False)
            del self._spilled[id(existing)]
            self._ssd.free(existing.slot)
            existing.slot = None
        self._tree.attach(node, block)
        if existing is None:
            self._record("stored", block, node)
        return True

    def _count(self, match: Match, resumed: Node | None) -> None:
        self.stats.queries += 1
        self.stats.hit_tokens += match.tokens
        self.stats.lost_tokens += match.lost_tokens
        if resumed is not None:
            resumed.hits += 1

    def _block_number(self, key: UnitKey) -> int:
        """The block of the prompt at whose end a whole unit is filed."""
        group, where = key
        return where // self.block_tokens - 1 if self.rules[group].kind == "linear" else where

    def _views(self, segment: Segment, unit: Callable[[UnitKey], Block | None]) -> list[memoryview]:
        arena = self._arena
        assert arena is not None, "a pool that keeps books only has no bytes"

        def pages_of(key: UnitKey) -> Sequence[int] | None:
            block = unit(key)
            return None if block is None else block.pages

        ranges = segment_ranges(self.spec, self.block_tokens, arena, segment, pages_of)
        return [arena.view(start, stop) for start, stop in ranges]


def _in_order(blocks: Iterable[Block]) -> list[Block]:
    return sorted(blocks, key=lambda block: block.node.depth if block.node is not None else 0)
