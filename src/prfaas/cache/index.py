"""Who holds which block: block hash -> one bit per (node, group), for every node of every cluster.

    holders[hash] = ...0110     bit = lane = (node, group)
                        ││
                        │└ lane 1: node a, full0
                        └─ lane 2: node a, linear0

A match walks the prompt's hashes once per block size in use and notes where the holders change; it
stops where the last full-attention run ends. Each node's length is then read off those few places.

Leaving and resynchronising nodes give up their lanes at once; `sweep` clears the bits later, before
a lane is used again.

Fed by `HashEvent`s, numbered per node without gaps. A duplicate is dropped, an early one waits for
those before it, and heartbeats announce the last; while some are missing the node is listed in
`gaps()`, and a snapshot settles whatever a replay cannot. So the index may claim what a node has
lost only until that is answered.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from prfaas.cache.groups import GroupRule
from prfaas.types import BlockHash, ClusterId, HashEvent, NodeId

_LOG = logging.getLogger(__name__)
MAX_WAITING_EVENTS = 1024  # early events kept per node; beyond it only a snapshot helps
MAX_SHARED_MASKS = 1 << 16


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node announces when it joins. Its block size is its own."""

    node: NodeId
    cluster: ClusterId
    block_tokens: int
    rules: tuple[GroupRule, ...]


@dataclass(frozen=True, slots=True)
class NodeMatch:
    tokens: int  # every group of the node can resume here
    attention_tokens: int  # what an index without states and windows would claim


@dataclass(frozen=True, slots=True)
class Gap:
    """Ask `node` for its events from `next_seq` on, or for a snapshot when `snapshot` is set."""

    node: NodeId
    next_seq: int
    snapshot: bool


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
    announced_seq: int = 0  # what the node says its next number is
    waiting: dict[int, HashEvent] = field(default_factory=dict)
    needs_snapshot: bool = False


@dataclass(slots=True)
class _SameSize:
    """The members with one block size, and what a match needs to know of all of them."""

    members: list[_Member] = field(default_factory=list)
    full_mask: int = 0
    runs_decide: bool = True  # every member has full-attention groups: no run, no hit

    def changed(self) -> None:
        self.full_mask = sum(member.full_mask for member in self.members)
        self.runs_decide = all(member.full_mask for member in self.members)


class _Stretch(NamedTuple):
    """Consecutive blocks with the same holders."""

    first: int
    mask: int


class PrefixIndex:
    def __init__(self) -> None:
        self.stats = IndexStats()
        self._holders: dict[bytes, int] = {}
        self._masks: dict[int, int] = {}  # equal masks share one object: 32 bytes a block saved
        self._members: dict[NodeId, _Member] = {}
        self._live = 0  # lanes whose bits count
        self._retired = 0  # lanes given up whose bits may still be set
        self._by_size: dict[int, _SameSize] = {}
        self._to_sweep: list[bytes] = []
        self._sweeping = 0
        self._warned: set[tuple[str, str]] = set()

    # Membership -----------------------------------------------------------------------------------

    def join(self, info: NodeInfo, next_seq: int = 0) -> None:
        """A node appears, or reappears (a restarted one counts its events anew): it holds nothing
        until it says so. Events before `next_seq` are not needed; an index that comes late has a
        gap with the first event it hears, and asks."""
        assert info.rules and len({rule.name for rule in info.rules}) == len(info.rules), info
        self.leave(info.node)
        lanes = self._new_lanes(len(info.rules))
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
        same_size.changed()

    def leave(self, node: NodeId) -> None:
        """A node is gone, and so is every claim about it. Costs nothing: see `sweep`."""
        member = self._members.pop(node, None)
        if member is None:
            return
        self._retire(member)
        same_size = self._by_size[member.info.block_tokens]
        same_size.members.remove(member)
        same_size.changed()
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

    def apply_encoded(self, payload: bytes) -> bool:
        """Applies one msgpack-encoded event; False when it is none. Whose it was cannot be known,
        but its number is then missing and shows as a gap."""
        try:
            event = msgspec.msgpack.decode(payload, type=HashEvent)
        except msgspec.MsgspecError as error:
            self.stats.malformed_events += 1
            self._warn_once("malformed", "", error)
            return False
        return self.apply(event)

    def apply(self, event: HashEvent) -> bool:
        """True when the index has changed; False when the event was unknown, old, early or bad."""
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
            self._keep_waiting(member, event)
            return False
        self._take(member, event)
        while (following := member.waiting.pop(member.next_seq, None)) is not None:
            self._take(member, following)
        return True

    def announce(self, node: NodeId, next_seq: int) -> None:
        """A node says in a heartbeat what number its next event will have: the only way to see
        that the last one was lost."""
        member = self._members.get(node)
        if member is not None:
            member.announced_seq = max(member.announced_seq, next_seq)

    def gaps(self) -> list[Gap]:
        """Nodes whose claims may be out of date, and what to ask them for."""
        return [
            Gap(node, member.next_seq, member.needs_snapshot)
            for node, member in self._members.items()
            if member.waiting or member.needs_snapshot or member.next_seq < member.announced_seq
        ]

    def snapshot(
        self, node: NodeId, held: Mapping[str, Iterable[BlockHash]], next_seq: int
    ) -> bool:
        """Replaces everything known of a node; its next event is number `next_seq`."""
        member = self._members.get(node)
        if member is None or not set(held) <= set(member.lanes):
            self.stats.unknown_node_events += member is None
            self.stats.malformed_events += member is not None
            self._warn_once("bad snapshot", node, sorted(held))
            return False
        waiting = {seq: event for seq, event in member.waiting.items() if seq >= next_seq}
        self.join(member.info, next_seq)
        member = self._members[node]
        for group, hashes in held.items():
            self._store(hashes, member.lanes[group])
        self.stats.snapshots += 1
        for seq in sorted(waiting):
            self.apply(waiting[seq])
        return True

    # Asking ---------------------------------------------------------------------------------------

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
        """Distinct blocks with an entry, those of retired lanes included until swept."""
        return len(self._holders)

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self._holders)} blocks, {len(self._members)} nodes)"

    # Housekeeping ---------------------------------------------------------------------------------

    def sweep(self, max_blocks: int = 10_000) -> int:
        """Clears bits of retired lanes in up to `max_blocks` entries; 0 when there is nothing left
        to do. Call it when idle: matches never see those bits, they only hold memory."""
        if not self._to_sweep:
            if not self._retired:
                return 0
            self._sweeping = self._retired
            self._to_sweep = list(self._holders)
        batch = self._to_sweep[-max_blocks:]
        del self._to_sweep[-max_blocks:]
        keep = ~self._sweeping
        for name in batch:
            self._set(name, self._holders.get(name, 0) & keep)
        if not self._to_sweep:
            self._retired &= keep
            self._sweeping = 0
        return len(batch)

    def check(self) -> None:
        lanes = [lane for member in self._members.values() for lane in member.lanes.values()]
        assert sum(lanes) == self._live, "two lanes share a bit, or a live one is nobody's"
        assert all(lane & (lane - 1) == 0 for lane in lanes), "a lane is one bit"
        assert not self._live & self._retired
        for name, mask in self._holders.items():
            assert mask and not mask & ~(self._live | self._retired), f"{name.hex()}: {mask:b}"
        if not self._retired:
            assert not self._to_sweep
        for node, member in self._members.items():
            assert member.info.node == node
            assert member in self._by_size[member.info.block_tokens].members
            assert all(seq > member.next_seq for seq in member.waiting)
            assert not (member.waiting and member.needs_snapshot)
        assert sum(len(same.members) for same in self._by_size.values()) == len(self._members)
        for same in self._by_size.values():
            assert same.full_mask == sum(member.full_mask for member in same.members)
            assert same.runs_decide == all(member.full_mask for member in same.members)

    # Inside ---------------------------------------------------------------------------------------

    def _match_size(
        self,
        chain: Sequence[BlockHash],
        same_size: _SameSize,
        found: dict[NodeId, NodeMatch],
    ) -> None:
        stretches, end = self._stretches(chain, same_size)
        first = stretches[0].mask
        for member in same_size.members:
            # A node without the first block of every run has nothing to resume from.
            if first & member.full_mask == member.full_mask:
                match = _member_match(member, stretches, end)
                if match.attention_tokens:
                    found[member.info.node] = match

    def _stretches(
        self, chain: Sequence[BlockHash], same_size: _SameSize
    ) -> tuple[list[_Stretch], int]:
        """The prompt, cut where the holders change, up to where the last full run ends.

        Equal masks are nearly always the same object, so that comparing identities finds the cuts:
        a block costs one look-up and one comparison.
        """
        alive = same_size.full_mask
        stretches: list[_Stretch] = []
        get = self._holders.get
        last: object = stretches  # no mask yet
        for block, mask in enumerate(map(get, chain)):
            if mask is last:
                continue
            last = mask
            stretches.append(_Stretch(block, mask or 0))
            alive &= mask or 0
            if not alive and same_size.runs_decide:
                return stretches, block
        return stretches, len(chain)

    def _keep_waiting(self, member: _Member, event: HashEvent) -> None:
        if member.needs_snapshot:
            return
        member.waiting[event.seq] = event
        if len(member.waiting) > MAX_WAITING_EVENTS:
            self._lose(member, "too many events are missing")

    def _take(self, member: _Member, event: HashEvent) -> None:
        """The next event in order."""
        member.next_seq = event.seq + 1
        lane = member.lanes.get(event.group)
        if lane is None or event.block_tokens != member.info.block_tokens:
            self.stats.malformed_events += 1
            # It may have been a removal: what it said is needed, and lost.
            self._lose(member, f"group {event.group} in blocks of {event.block_tokens}")
            return
        self.stats.applied_events += 1
        if len(self._masks) > MAX_SHARED_MASKS:
            self._masks.clear()  # only sharing is lost
        if event.action == "stored":
            self._store(event.hashes, lane)
        else:
            for name in event.hashes:
                self._set(name, self._holders.get(name, 0) & ~lane)

    def _lose(self, member: _Member, why: str) -> None:
        """Only a snapshot can tell what the node holds."""
        member.needs_snapshot = True
        member.waiting.clear()
        self._warn_once("out of step", member.info.node, why)

    def _store(self, hashes: Iterable[bytes], lane: int) -> None:
        holders, masks = self._holders, self._masks
        get, share = holders.get, masks.setdefault
        for name in hashes:
            mask = get(name, 0) | lane
            holders[name] = share(mask, mask)

    def _set(self, name: bytes, mask: int) -> None:
        if mask:
            self._holders[name] = self._masks.setdefault(mask, mask)
        else:
            self._holders.pop(name, None)

    def _new_lanes(self, count: int) -> list[int]:
        taken = self._live | self._retired
        lanes: list[int] = []
        lane = 1
        while len(lanes) < count:
            if not lane & taken:
                lanes.append(lane)
            lane <<= 1
        self._live |= sum(lanes)
        return lanes

    def _retire(self, member: _Member) -> None:
        lanes = sum(member.lanes.values())
        self._live &= ~lanes
        self._retired |= lanes
        if not self._live and not self._sweeping:
            self._holders.clear()
            self._retired = 0

    def _warn_once(self, about: str, node: str, detail: object) -> None:
        if (about, node) not in self._warned:
            self._warned.add((about, node))
            _LOG.warning("cache events %s: %s (%s); logged once", about, node or "?", detail)


def _member_match(member: _Member, stretches: Sequence[_Stretch], end: int) -> NodeMatch:
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


def _closing_length(member: _Member, stretches: Sequence[_Stretch], run: int) -> int:
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
