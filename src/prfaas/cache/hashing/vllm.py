"""From vLLM's KV events to `HashEvent`s: the tokens stay on the host, only block hashes leave it.

`hash_events` is a pure step over `EngineHashes`, which maps engine hashes to block hashes. It runs
on the engine's host, in the kvd. It relies on these facts (vLLM 0.18 to 0.32):

- One `BlockStored` per group. A full-attention event names every block of `token_ids`. A sparse one
  (Mamba, windows) names only retained blocks, possibly none, without their position: the same
  engine hash in an event that names every block has the position.
- `extra_keys` of a block: LoRA name, then images as pairs, then (first block only) the cache salt,
  then embeddings as bytes.
- `BlockRemoved` has engine hashes only.
- An engine hash stands for a prefix. Groups with blocks of different sizes use the same hash for
  the same prefix.

Block hashes are those of blocks of `block_tokens` tokens, whatever the size of vLLM's blocks
(`wire_blocks`), or of vLLM's own blocks. Several of vLLM's groups may have one name; a block then
counts as stored when every one of them holds it. One of vLLM's groups may have several names, and
then counts for each. An event lists the blocks that changed: a block that vLLM stores twice is
listed once.

A block that cannot be named is not claimed. An event that cannot be read may have been a removal,
so it leaves a gap in the sequence numbers, and the next reader of the events gets a snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Literal, TypeAlias

from prfaas.cache.hashing.chain import chain_seed, token_bytes
from prfaas.cache.hashing.equal_blocks import EqualBlocks
from prfaas.cache.hashing.vllm_payloads import (
    UNREADABLE,
    Cleared,
    Event,
    Removed,
    Stored,
    decode_event,
    raw_events,
    split_extra_keys,
)
from prfaas.cache.hashing.wire_blocks import (
    MOST_CHANGES,
    Change,
    TooManyChanges,
    WireBlocks,
)
from prfaas.types import BlockHash, HashEvent, NodeId

GroupNames: TypeAlias = str | tuple[str, ...]  # of one group number
Action: TypeAlias = Literal["stored", "removed"]
_Blocks: TypeAlias = EqualBlocks | WireBlocks  # the engine's blocks of one size
_Listed: TypeAlias = dict[tuple[str, int], list[BlockHash]]  # by group and block size

_LOG = logging.getLogger(__name__)
MOST_RECORDS = 4_000_000  # of one engine: enough for 2 million blocks, or a gigabyte
MOST_SIZES = 16  # different block sizes of one engine's groups


class EngineHashes:
    """What one engine holds, by engine hash and block hash. Sequence numbers count per node.

    `group_names`: vLLM's group number -> name, or several names. `block_tokens`: the size of the
    blocks to announce; 0 stands for the size that each of vLLM's events has. `states`: names of the
    groups whose blocks are linear states.
    """

    def __init__(
        self,
        node: NodeId,
        group_names: Mapping[int, GroupNames],
        first_seq: int = 0,
        block_tokens: int = 0,
        states: Set[str] = frozenset(),
    ) -> None:
        self.node = node
        self.next_seq = first_seq
        self.malformed = 0  # payloads or events that could not be read
        self.unnamed = 0  # blocks that could not be named, and so are not claimed
        self._group_names = dict(group_names)
        self._block_tokens = block_tokens
        self._state_names = frozenset(states)
        self._masks: dict[str, int] = {}  # name -> bit per group number
        self._names_of: dict[int, tuple[str, ...]] = {}
        for number, names in group_names.items():
            self._names_of[number] = (
                (names,) if isinstance(names, str) else (*dict.fromkeys(names),)
            )
            for name in self._names_of[number]:
                self._masks[name] = self._masks.get(name, 0) | 1 << number
        self._states = 0
        for name in self._state_names & set(self._masks):
            self._states |= self._masks[name]
        self._by_size: dict[int, _Blocks] = {}
        self._changes = 0  # of wire blocks, by the current payload
        self._warned: set[str] = set()

    def has_settings(
        self, group_names: Mapping[int, GroupNames], block_tokens: int, states: Set[str]
    ) -> bool:
        return (self._group_names, self._block_tokens, self._state_names) == (
            group_names,
            block_tokens,
            states,
        )

    def holdings(self) -> dict[str, list[BlockHash]]:
        """Everything held, per group: together with `next_seq`, a snapshot for an index."""
        held: dict[str, list[BlockHash]] = {name: [] for name in self._masks}
        for (name, _), hashes in self._held().items():
            held[name] += hashes
        return held

    @property
    def records(self) -> int:
        """Records in memory: at most `MOST_RECORDS`, and none when nothing is held."""
        return sum(map(len, self._by_size.values()))

    def check(self) -> None:
        assert self.records <= MOST_RECORDS
        for blocks in self._by_size.values():
            assert len(blocks), "a size without blocks"
            blocks.check()

    # Reading --------------------------------------------------------------------------------------

    def _decoded(self, payload: bytes) -> list[Event]:
        try:
            raw = raw_events(payload)
        except UNREADABLE as error:
            self._unreadable(error)
            return []
        events: list[Event] = []
        for one in raw:
            try:
                events.append(decode_event(one, self._group_names))
            except UNREADABLE as error:
                self._unreadable(error)
        return events

    def _unreadable(self, detail: object) -> None:
        self.malformed += 1
        self.next_seq += 1  # a gap: it may have been a removal
        self._warn_once("an event is unreadable", detail)

    def _warn_once(self, about: str, detail: object) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _LOG.warning("%s: KV events: %s (%s); logged once", self.node, about, detail)

    # Translating ----------------------------------------------------------------------------------

    def _name(self, event: Stored) -> None:
        """Computes the block hashes of an event that names every block."""
        size = event.block_size
        blocks = self._by_size.get(size)
        if blocks is None:
            if len(self._by_size) >= MOST_SIZES:
                return
            wire_tokens = self._block_tokens or size
            equal = size == wire_tokens
            blocks = EqualBlocks(size) if equal else WireBlocks(size, wire_tokens, self._states)
            self._by_size[size] = blocks
        adapter = event.lora_name or ""
        salt, extras = split_extra_keys(event, adapter)
        origin = event.parent_block_hash, chain_seed(blocks.wire_tokens, salt=salt, adapter=adapter)
        room = MOST_RECORDS - self.records
        blocks.name(event.block_hashes, token_bytes(event.token_ids), extras, origin, room)

    def _stored(self, event: Stored) -> list[HashEvent]:
        number = event.group_idx or 0
        group = 1 << number
        places = self._places(event.block_size, group)
        listed: _Listed = {}
        for key in event.block_hashes:
            changes: list[Change] = []
            place = next((blocks for blocks in places if blocks.hold(key, group, changes)), None)
            if place is None:
                self.unnamed += 1
                self._warn_once("a block cannot be named", f"group {number}")
            else:
                self._list(place, number, changes, listed)
        return self._events(listed, "stored")

    def _removed(self, event: Removed) -> list[HashEvent]:
        number = event.group_idx or 0
        group = 1 << number
        listed: _Listed = {}
        for key in event.block_hashes:
            for blocks in self._by_size.values():
                changes: list[Change] = []
                blocks.release(key, group, changes)
                self._list(blocks, number, changes, listed)
        return self._events(listed, "removed")

    def _cleared(self) -> list[HashEvent]:
        gone = self._held()
        for blocks in self._by_size.values():
            blocks.clear()
        return self._events(gone, "removed")

    def _settle(self) -> None:
        for size, blocks in list(self._by_size.items()):
            blocks.settle()
            if not len(blocks):
                del self._by_size[size]

    def _forget(self) -> None:
        """Nothing is claimed any more, and a gap makes the next reader request a snapshot."""
        self._by_size.clear()
        self._unreadable("it changes too many blocks")

    # Groups ---------------------------------------------------------------------------------------

    def _places(self, block_size: int, group: int) -> list[_Blocks]:
        """Where an engine hash of the group may be known. A block of tokens has one certain size. A
        state is known by its end alone, which a block of another size may have named."""
        own = self._by_size.get(block_size)
        places = [] if own is None else [own]
        if group & self._states and self._block_tokens:
            places += (blocks for blocks in self._by_size.values() if blocks is not own)
        return places

    def _list(
        self, blocks: _Blocks, number: int, changes: Sequence[Change], listed: _Listed
    ) -> None:
        """Adds the changes that matter to all of vLLM's groups of a name."""
        if not changes:
            return
        self._changes += len(changes)
        if self._changes > MOST_CHANGES:
            raise TooManyChanges
        several = len(self._by_size) > 1
        for group in self._names_of[number]:
            mask = self._masks[group]
            names = listed.setdefault((group, blocks.wire_tokens), [])
            for name, before, after in changes:
                elsewhere = self._elsewhere(blocks, name) if several else 0
                held = (before | elsewhere) & mask == mask
                if held != ((after | elsewhere) & mask == mask):
                    names.append(name)

    def _elsewhere(self, here: _Blocks, name: BlockHash) -> int:
        """The groups that hold the block in engine blocks of other sizes."""
        bits = 0
        for blocks in self._by_size.values():
            if blocks is not here:
                bits |= blocks.groups_of(name)
        return bits

    def _held(self) -> _Listed:
        bits: dict[tuple[BlockHash, int], int] = {}
        for blocks in self._by_size.values():
            for name, groups in blocks:
                key = (name, blocks.wire_tokens)
                bits[key] = bits.get(key, 0) | groups
        held: _Listed = {}
        for (name, wire_tokens), groups in bits.items():
            for group, mask in self._masks.items():
                if groups & mask == mask:
                    held.setdefault((group, wire_tokens), []).append(name)
        return held

    def _events(self, listed: _Listed, action: Action) -> list[HashEvent]:
        return [
            self._event(group, block_tokens, names, action)
            for (group, block_tokens), names in listed.items()
            if names
        ]

    def _event(
        self, group: str, block_tokens: int, hashes: Iterable[BlockHash], action: Action
    ) -> HashEvent:
        event = HashEvent(
            seq=self.next_seq,
            node=self.node,
            group=group,
            block_tokens=block_tokens,
            hashes=tuple(hashes),
            action=action,
        )
        self.next_seq += 1
        return event


def hash_events(engine: EngineHashes, payload: bytes) -> list[HashEvent]:
    """Translates one payload. Never raises on an engine's data: see the module's last rule."""
    events = engine._decoded(payload)
    # Names in a first pass: a sparse group's event may precede the event with its position.
    for event in events:
        if isinstance(event, Stored) and event.names_every_block:
            try:
                engine._name(event)
            except UNREADABLE as error:  # in `extra_keys`: its blocks are not claimed
                engine._warn_once("the keys of a block are unreadable", error)
    translated: list[HashEvent] = []
    engine._changes = 0
    try:
        for event in events:
            match event:
                case Stored() if event.on_device:
                    translated += engine._stored(event)
                case Removed() if event.on_device:
                    translated += engine._removed(event)
                case Cleared():
                    translated += engine._cleared()
    except TooManyChanges:
        engine._forget()
        return []
    engine._settle()
    return translated
