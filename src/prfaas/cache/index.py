"""The prefix index: which node could resume a prompt, and after how many tokens.

Every (node, group) has one lane in `BlockHolders`. A match walks the prompt's hashes once per block
size in use and notes where the holders change; it stops where the last full-attention run ends.
Each node's length is then read off those few places.

The index is fed with `HashEvent`s, which each node numbers without gaps. It applies them in order
only: it drops an event that it has applied before, and an event that comes too early. It does not
ask for the events it lacks. The kvd that serves the events does the repair: when it cannot send
every event since the number it was asked for, it sends a snapshot, and a snapshot replaces
everything the index holds about that node. So the index may claim what a node has lost only until
the next page of events arrives.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prfaas.cache.groups import GroupRule
from prfaas.cache.holders import BlockHolders, Stretch
from prfaas.types import BlockHash, ClusterId, Compat, HashEvent, NodeId

_LOG = logging.getLogger(__name__)
_SHOWN_GROUPS = 3  # in a log line


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node reports when it joins. Nodes may differ in block size. A node with several pools
    joins once for each, under different names."""

    node: NodeId
    cluster: ClusterId
    block_tokens: int
    rules: tuple[GroupRule, ...]
    # Of a pool. Prefixes are copied between pools of equal formats. None: formats are not told
    # apart.
    compat: Compat | None = None
    owner: NodeId | None = None  # the node whose cache this is, where its name is another one

    @property
    def at(self) -> NodeId:
        """The node itself, whichever of its caches this is."""
        return self.owner or self.node

    @property
    def is_pool(self) -> bool:
        """False for an engine's own cache, from which nothing can be copied."""
        return self.owner is None or self.compat is not None


@dataclass(frozen=True, slots=True)
class NodeMatch:
    tokens: int  # every group of the node can resume here
    attention_tokens: int  # what an index without states and windows would claim
    pool_tokens: int | None = None  # see `scheduler.view.CachedPrefix`
    remote_pool_tokens: int | None = None


@dataclass(slots=True)
class IndexStats:
    applied_events: int = 0
    duplicate_events: int = 0
    early_events: int = 0
    unknown_node_events: int = 0
    malformed_events: int = 0
    snapshots: int = 0


@dataclass(slots=True)
class _Member:
    info: NodeInfo
    lanes: dict[str, int]  # group -> bit mask of its lane
    full_mask: int
    closing: tuple[tuple[GroupRule, int], ...]  # rule and bit of each closing group
    closing_mask: int
    next_seq: int


@dataclass(slots=True)
class _SameSize:
    """The members with one block size, and what a match needs to know of all of them."""

    members: list[_Member] = field(default_factory=list)
    full_mask: int = 0
    runs_decide: bool = True  # every member has full-attention groups: no run, no hit

    def update_masks(self) -> None:
        self.full_mask = sum(member.full_mask for member in self.members)
        self.runs_decide = all(member.full_mask for member in self.members)


class PrefixIndex:
    def __init__(self) -> None:
        self.stats = IndexStats()
        self._holders = BlockHolders()
        self._members: dict[NodeId, _Member] = {}
        self._by_size: dict[int, _SameSize] = {}
        self._warned: set[tuple[str, str]] = set()

    # Membership -----------------------------------------------------------------------------------

    def join(self, info: NodeInfo, next_seq: int = 0) -> None:
        """Adds a node, or resets a known one (a restarted node counts its events from 0). The node
        holds nothing until its events arrive. Its next event is number `next_seq`."""
        assert info.rules and len({rule.name for rule in info.rules}) == len(info.rules), info
        self.leave(info.node)
        lanes = self._holders.new_lanes(len(info.rules))
        named = {rule.name: lane for rule, lane in zip(info.rules, lanes, strict=True)}
        closing = tuple((rule, named[rule.name]) for rule in info.rules if rule.closes)
        member = _Member(
            info=info,
            lanes=named,
            full_mask=sum(named[rule.name] for rule in info.rules if not rule.closes),
            closing=closing,
            closing_mask=sum(lane for _, lane in closing),
            next_seq=next_seq,
        )
        self._members[info.node] = member
        same_size = self._by_size.setdefault(info.block_tokens, _SameSize())
        same_size.members.append(member)
        same_size.update_masks()

    def leave(self, node: NodeId) -> None:
        """Removes a node and every claim about it. Costs nothing: see `sweep`."""
        member = self._members.pop(node, None)
        if member is None:
            return
        self._holders.retire(sum(member.lanes.values()))
        same_size = self._by_size[member.info.block_tokens]
        same_size.members.remove(member)
        same_size.update_masks()
        if not same_size.members:
            del self._by_size[member.info.block_tokens]

    def nodes(self) -> Iterator[NodeInfo]:
        return (member.info for member in self._members.values())

    def info(self, node: NodeId) -> NodeInfo:
        return self._members[node].info

    def block_sizes(self) -> tuple[int, ...]:
        """The sizes a prompt has to be hashed at."""
        return tuple(self._by_size)

    # Events ---------------------------------------------------------------------------------------

    def apply(self, event: HashEvent) -> bool:
        """True when the event was applied. False when the index has dropped it: the node is
        unknown, the number is not the node's next one, or the event does not fit the node."""
        member = self._members.get(event.node)
        if member is None:
            self.stats.unknown_node_events += 1
            self._warn_once("from an unknown node", event.node, event.group)
            return False
        if event.seq < member.next_seq:
            self.stats.duplicate_events += 1
            return False
        if event.seq > member.next_seq:
            self.stats.early_events += 1
            self._warn_once("missing", event.node, f"{member.next_seq} to {event.seq - 1}")
            return False
        member.next_seq = event.seq + 1
        lane = member.lanes.get(event.group)
        if lane is None or event.block_tokens != member.info.block_tokens:
            self.stats.malformed_events += 1
            detail = f"group {event.group} in blocks of {event.block_tokens} tokens"
            self._warn_once("that do not fit the node", event.node, detail)
            return False
        self.stats.applied_events += 1
        if event.action == "stored":
            self._holders.store(event.hashes, lane)
        else:
            self._holders.remove(event.hashes, lane)
        return True

    def snapshot(
        self, node: NodeId, held: Mapping[str, Iterable[BlockHash]], next_seq: int
    ) -> bool:
        """Replaces everything the index holds about a node; its next event is number `next_seq`."""
        member = self._members.get(node)
        if member is None or not set(held) <= set(member.lanes):
            self.stats.unknown_node_events += member is None
            self.stats.malformed_events += member is not None
            unknown = sorted(set(held) - set(() if member is None else member.lanes))
            shown = ", ".join(unknown[:_SHOWN_GROUPS])
            detail = f"{len(unknown)} unknown groups, such as {shown}" if member else "no member"
            self._warn_once("in a bad snapshot", node, detail)
            return False
        self.join(member.info, next_seq)
        member = self._members[node]
        for group, hashes in held.items():
            self._holders.store(hashes, member.lanes[group])
        self.stats.snapshots += 1
        return True

    # Matching -------------------------------------------------------------------------------------

    def match(self, hashes: Mapping[int, Sequence[BlockHash]]) -> dict[NodeId, NodeMatch]:
        """Per node, how much of the prompt it can resume from. `hashes` has the prompt's chain at
        each of `block_sizes()`; nodes with nothing are left out."""
        found: dict[NodeId, NodeMatch] = {}
        for size, same_size in self._by_size.items():
            chain = hashes.get(size)
            if chain:
                self._match_size(chain, same_size, found)
        return found

    def __len__(self) -> int:
        """Distinct blocks with an entry. Blocks of nodes that left count until swept."""
        return len(self._holders)

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self._holders)} blocks, {len(self._members)} nodes)"

    # Housekeeping ---------------------------------------------------------------------------------

    def sweep(self, max_blocks: int = 10_000) -> int:
        """Clears what nodes that left or resynchronised have held, in up to `max_blocks` entries;
        0 when nothing is left to clear. Call it when idle."""
        return self._holders.sweep(max_blocks)

    def check(self) -> None:
        """Asserts every invariant."""
        members = self._members
        self._holders.check([lane for member in members.values() for lane in member.lanes.values()])
        for node, member in members.items():
            assert member.info.node == node
            assert member in self._by_size[member.info.block_tokens].members
        assert sum(len(same.members) for same in self._by_size.values()) == len(members)
        for same in self._by_size.values():
            assert same.full_mask == sum(member.full_mask for member in same.members)
            assert same.runs_decide == all(member.full_mask for member in same.members)

    def _match_size(
        self,
        chain: Sequence[BlockHash],
        same_size: _SameSize,
        found: dict[NodeId, NodeMatch],
    ) -> None:
        stretches, end = self._holders.stretches(chain, same_size.full_mask, same_size.runs_decide)
        first = stretches[0].mask
        for member in same_size.members:
            # A node without the first block of every run has nothing to resume from.
            if first & member.full_mask == member.full_mask:
                match = _match_member(member, stretches, end)
                if match.attention_tokens:
                    found[member.info.node] = match

    def _warn_once(self, about: str, node: str, detail: object) -> None:
        if (about, node) not in self._warned:
            self._warned.add((about, node))
            _LOG.warning("cache events %s: node %s (%s); logged once", about, node, detail)


def _match_member(member: _Member, stretches: Sequence[Stretch], end: int) -> NodeMatch:
    size = member.info.block_tokens
    run = end
    if member.full_mask:
        # The group whose run ends first decides.
        wanted = member.full_mask
        run = next((first for first, mask in stretches if mask & wanted != wanted), end)
    length = run
    if member.closing:
        length = _closing_length(member, stretches, run)
    return NodeMatch(length * size, (run if member.full_mask else length) * size)


def _closing_length(member: _Member, stretches: Sequence[Stretch], run: int) -> int:
    """The longest length within `run` blocks that every closing group of the node can serve."""
    if all(rule.kind == "linear" for rule, _ in member.closing):
        wanted = member.closing_mask
        stop = run
        for first, mask in reversed(stretches):
            if first < run and mask & wanted == wanted:
                return stop
            stop = min(stop, first)
        return 0
    starts = [stretch.first for stretch in stretches]
    length, before = run, -1
    while length != before:
        before = length
        for rule, lane in member.closing:

            def has(block: int, unneeded: int, lane: int = lane) -> bool:
                return stretches[bisect_right(starts, block) - 1].mask & lane != 0

            length = rule.longest(has, length, member.info.block_tokens)
    return length
