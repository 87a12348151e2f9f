"""The prefix index: which node could resume a prompt, and after how many tokens.

Every (node, group) has one lane in `BlockHolders`. A match walks the prompt's hashes once per block
size in use and notes where the holders change; it stops where the last full-attention run ends.
The nodes are then grouped by their lengths, at those few places and with operations on whole masks:
the cost of a match does not grow with the number of nodes that hold a popular prefix.

The index is fed with `HashEvent`s, which each node numbers without gaps. It applies them in order
only: it drops an event that it has applied before, and an event that comes too early. It does not
ask for the events it lacks. The kvd that serves the events does the repair: when it cannot send
every event since the number it was asked for, it sends a snapshot, and a snapshot replaces
everything the index holds about that node. So the index may claim what a node has lost only until
the next page of events arrives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    pool_tokens: int | None = None  # see `scheduler.lookup.prefixes.CachedPrefix`
    remote_pool_tokens: int | None = None


@dataclass(slots=True)
class IndexStats:
    applied_events: int = 0
    duplicate_events: int = 0
    early_events: int = 0
    unknown_node_events: int = 0
    malformed_events: int = 0
    snapshots: int = 0


class HolderGroup(NamedTuple):
    """Nodes with the same match."""

    match: NodeMatch
    nodes: int  # a bit for each node: see `PrefixIndex.numbers`


@dataclass(slots=True)
class _Member:
    info: NodeInfo
    lanes: dict[str, int]  # group -> bit mask of its lane
    next_seq: int

    @property
    def first_lane(self) -> int:
        return next(iter(self.lanes.values()))


class _Kind:
    """The members with one block size and the same groups. Their lanes are in the order of the
    groups, so the mask of a block, shifted by a group's place, has that group's holders at the
    first lane of each member: there are no loops over members."""

    __slots__ = ("block_tokens", "closing", "first_lanes", "full", "full_mask")

    def __init__(self, block_tokens: int, rules: Sequence[GroupRule]) -> None:
        self.block_tokens = block_tokens
        self.full = [place for place, rule in enumerate(rules) if not rule.closes]
        self.closing = [(place, rule) for place, rule in enumerate(rules) if rule.closes]
        self.first_lanes = 0  # of all members
        self.full_mask = 0  # the lanes of all full-attention groups

    def add(self, first_lane: int) -> None:
        self.first_lanes |= first_lane
        for place in self.full:
            self.full_mask |= first_lane << place

    def remove(self, first_lane: int) -> None:
        self.first_lanes &= ~first_lane
        for place in self.full:
            self.full_mask &= ~(first_lane << place)

    def match(self, stretches: Sequence[Stretch], end: int) -> Iterator[HolderGroup]:
        """The members that hold something, by their match."""
        runs = self._runs(stretches, end)
        if self.closing:
            yield from self._closed(stretches, end, runs)
            return
        for run, nodes in runs:
            tokens = run * self.block_tokens
            yield HolderGroup(NodeMatch(tokens, tokens), nodes)

    def _runs(self, stretches: Sequence[Stretch], end: int) -> list[tuple[int, int]]:
        """Lengths of full-attention runs in blocks, ascending, and the members with that length.
        The group whose run ends first decides."""
        alive = self.first_lanes
        runs: list[tuple[int, int]] = []
        for first, mask in stretches:
            held = alive
            for place in self.full:
                held &= mask >> place
            if held != alive:
                if first:
                    runs.append((first, alive & ~held))
                alive = held
                if not alive:
                    return runs
        runs.append((end, alive))
        return runs

    def _closed(
        self, stretches: Sequence[Stretch], end: int, runs: list[tuple[int, int]]
    ) -> Iterator[HolderGroup]:
        """Cuts each run to the longest length that every closing group of the member can serve.

        Such a length is the end of a stretch: if a length within a stretch can be served, so can
        the stretch's end, because its blocks have the same holders. So the stretches are tried from
        the last one back, for all runs that are as long."""
        size = self.block_tokens
        pending: list[tuple[int, int]] = []  # runs that no length has been found for
        waiting = 0  # the members in them
        stop = end
        for at in range(len(stretches) - 1, -1, -1):
            if stretches[at].first == stop:
                continue  # the walk ended where this stretch begins
            while runs and runs[-1][0] >= stop:
                pending.append(runs.pop())
                waiting |= pending[-1][1]
            found = self._served(stretches, at, stop, waiting) if waiting else 0
            if found:
                waiting &= ~found
                left = []
                for run, nodes in pending:
                    if nodes & found:
                        attention = run if self.full else stop
                        yield HolderGroup(NodeMatch(stop * size, attention * size), nodes & found)
                    if nodes & ~found:
                        left.append((run, nodes & ~found))
                pending = left
            stop = stretches[at].first
        if self.full:
            for run, nodes in pending:
                yield HolderGroup(NodeMatch(0, run * size), nodes)

    def _served(self, stretches: Sequence[Stretch], at: int, stop: int, nodes: int) -> int:
        """Those of `nodes` whose closing groups can all serve the length `stop`, which is the end
        of stretch `at`."""
        for place, rule in self.closing:
            needed = rule.needs(stop, self.block_tokens)
            back = at
            while needed and nodes:
                nodes &= stretches[back].mask >> place
                if stretches[back].first <= needed.start:
                    break
                back -= 1
        return nodes


class PrefixIndex:
    def __init__(self) -> None:
        self.stats = IndexStats()
        self._holders = BlockHolders()
        self._members: dict[NodeId, _Member] = {}
        self._kinds: dict[int, dict[tuple[GroupRule, ...], _Kind]] = {}  # by block size
        self._numbers: dict[NodeId, int] | None = None
        self._warned: set[tuple[str, str]] = set()

    # Membership -----------------------------------------------------------------------------------

    def join(self, info: NodeInfo, next_seq: int = 0) -> None:
        """Adds a node, or resets a known one (a restarted node counts its events from 0). The node
        holds nothing until its events arrive. Its next event is number `next_seq`."""
        assert info.rules and len({rule.name for rule in info.rules}) == len(info.rules), info
        self.leave(info.node)
        lanes = self._holders.new_lanes(len(info.rules))
        named = {rule.name: lane for rule, lane in zip(info.rules, lanes, strict=True)}
        self._members[info.node] = _Member(info, named, next_seq)
        self._numbers = None
        kinds = self._kinds.setdefault(info.block_tokens, {})
        kind = kinds.get(info.rules)
        if kind is None:
            kind = kinds[info.rules] = _Kind(info.block_tokens, info.rules)
        kind.add(lanes[0])

    def leave(self, node: NodeId) -> None:
        """Removes a node and every claim about it. Costs nothing: see `sweep`."""
        member = self._members.pop(node, None)
        if member is None:
            return
        self._numbers = None
        self._holders.retire(sum(member.lanes.values()))
        kinds = self._kinds[member.info.block_tokens]
        kind = kinds[member.info.rules]
        kind.remove(member.first_lane)
        if not kind.first_lanes:
            del kinds[member.info.rules]
        if not kinds:
            del self._kinds[member.info.block_tokens]

    def nodes(self) -> Iterator[NodeInfo]:
        return (member.info for member in self._members.values())

    def info(self, node: NodeId) -> NodeInfo:
        return self._members[node].info

    def block_sizes(self) -> tuple[int, ...]:
        """The sizes a prompt has to be hashed at."""
        return tuple(self._kinds)

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

    @property
    def numbers(self) -> Mapping[NodeId, int]:
        """The bit of each node in a `HolderGroup`. Another object after nodes joined or left."""
        if self._numbers is None:
            self._numbers = {
                node: member.first_lane.bit_length() - 1 for node, member in self._members.items()
            }
        return self._numbers

    def match(self, hashes: Mapping[int, Sequence[BlockHash]]) -> dict[NodeId, NodeMatch]:
        """Per node, how much of the prompt it can resume from. `hashes` has the prompt's chain at
        each of `block_sizes()`; nodes with nothing are left out."""
        groups = self.match_groups(hashes)
        held = 0
        for _, nodes in groups:
            held |= nodes
        return {
            node: next(match for match, nodes in groups if nodes >> number & 1)
            for node, number in self.numbers.items()
            if held >> number & 1
        }

    def match_groups(self, hashes: Mapping[int, Sequence[BlockHash]]) -> list[HolderGroup]:
        """The same, by match. The cost does not depend on the number of nodes, apart from the
        length of the masks. No node is in two groups."""
        found: list[HolderGroup] = []
        for size, kinds in self._kinds.items():
            chain = hashes.get(size)
            if not chain:
                continue
            full_mask = 0
            for kind in kinds.values():
                full_mask |= kind.full_mask
            runs_decide = all(kind.full for kind in kinds.values())
            stretches, end = self._holders.stretches(chain, full_mask, runs_decide)
            for kind in kinds.values():
                found += kind.match(stretches, end)
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
        lanes: dict[tuple[int, tuple[GroupRule, ...]], int] = {}
        for node, member in members.items():
            info = member.info
            assert info.node == node and list(member.lanes) == [rule.name for rule in info.rules]
            key = (info.block_tokens, info.rules)
            lanes[key] = lanes.get(key, 0) | member.first_lane
        kinds = {
            (size, rules): kind
            for size, same_size in self._kinds.items()
            for rules, kind in same_size.items()
        }
        assert lanes == {key: kind.first_lanes for key, kind in kinds.items()}
        for (_, rules), kind in kinds.items():
            full = [place for place, rule in enumerate(rules) if not rule.closes]
            assert kind.full_mask == sum(kind.first_lanes << place for place in full)

    def _warn_once(self, about: str, node: str, detail: object) -> None:
        if (about, node) not in self._warned:
            self._warned.add((about, node))
            _LOG.warning("cache events %s: node %s (%s); logged once", about, node, detail)
