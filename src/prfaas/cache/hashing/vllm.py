"""From vLLM's KV events to `HashEvent`s: the tokens stay on the host, only block hashes leave it.

`hash_events` is a pure step over `EngineHashes`, which maps engine hashes to block hashes. It runs
on the engine's host, in the kvd. It relies on these facts (vLLM 0.18 to 0.32):

- A payload is `[timestamp, [event, ...], rank]`; events are arrays before v0.24 and maps since.
- One `BlockStored` per group. A full-attention event names every block of `token_ids`. A sparse one
  (Mamba, windows) names only retained blocks, possibly none, without their position: the same
  engine hash in a full-attention event has the position.
- `extra_keys` of a block: LoRA name, then images as pairs, then (first block only) the cache salt,
  then embeddings as bytes.
- `BlockRemoved` has engine hashes only.

A block that cannot be named is not claimed. An event that cannot be read may have been a removal,
so it leaves a gap in the sequence numbers, and the next reader of the events gets a snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from prfaas.cache.hashing.chain import block_hashes
from prfaas.types import BlockHash, HashEvent, NodeId

EngineHash: TypeAlias = int | bytes
Action: TypeAlias = Literal["stored", "removed"]

_LOG = logging.getLogger(__name__)
# What reading an engine's data may raise; RecursionError: values that are nested too deeply.
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
_MOST_BLOCK_TOKENS = 1 << 20
_ON_DEVICE = (None, "GPU")  # other components announce offloaded copies


class _Stored(msgspec.Struct, frozen=True):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None

    @property
    def names_every_block(self) -> bool:
        return len(self.block_hashes) * self.block_size == len(self.token_ids)


class _Removed(msgspec.Struct, frozen=True):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, frozen=True):
    pass


_KINDS: dict[str, type[_Stored] | type[_Removed] | type[_Cleared]] = {
    "BlockStored": _Stored,
    "BlockRemoved": _Removed,
    "AllBlocksCleared": _Cleared,
}
_Event: TypeAlias = _Stored | _Removed | _Cleared


class EngineHashes:
    """What one engine holds, by engine hash and block hash. Sequence numbers count per node."""

    def __init__(self, node: NodeId, group_names: Mapping[int, str], first_seq: int = 0) -> None:
        self.node = node
        self.next_seq = first_seq
        self.malformed = 0  # payloads or events that could not be read
        self.unnamed = 0  # blocks that could not be named, and so are not claimed
        self._group_names = dict(group_names)
        self._block_tokens: dict[int, int] = {}  # per group index, from its last stored event
        self._names: dict[tuple[int, EngineHash], BlockHash] = {}
        self._groups: dict[tuple[int, EngineHash], int] = {}  # bit per group index that holds it
        self._warned: set[str] = set()

    def holdings(self) -> dict[str, list[BlockHash]]:
        """Everything held, per group: together with `next_seq`, a snapshot for an index."""
        held: dict[str, list[BlockHash]] = {name: [] for name in self._group_names.values()}
        for (group, _), hashes in self._held().items():
            held[self._group_names[group]] += hashes
        return held

    def check(self) -> None:
        assert set(self._groups) <= set(self._names), "a held block without a name"
        assert all(self._groups.values()), "an entry that no group holds"
        assert set(self._names) == set(self._groups), "a name without a held block"

    def _event(
        self, group: int, block_tokens: int, hashes: Iterable[BlockHash], action: Action
    ) -> HashEvent:
        event = HashEvent(
            seq=self.next_seq,
            node=self.node,
            group=self._group_names[group],
            block_tokens=block_tokens,
            hashes=tuple(hashes),
            action=action,
        )
        self.next_seq += 1
        return event

    def _warn_once(self, about: str, detail: object) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _LOG.warning("%s: KV events: %s (%s); logged once", self.node, about, detail)

    def _unreadable(self, detail: object) -> None:
        self.malformed += 1
        self.next_seq += 1  # a gap: it may have been a removal
        self._warn_once("an event is unreadable", detail)

    def _name(self, event: _Stored) -> None:
        """Computes the block hashes of an event that names every block."""
        size = event.block_size
        parent = None
        if event.parent_block_hash is not None:
            parent = self._names.get((size, event.parent_block_hash))
            if parent is None:
                return
        adapter = event.lora_name or ""
        salt, extras = _split_extra_keys(event, adapter)
        names = block_hashes(
            event.token_ids, size, salt=salt, adapter=adapter, parent=parent, extras=extras
        )
        self._names.update(zip(((size, h) for h in event.block_hashes), names, strict=True))

    def _stored(self, event: _Stored) -> list[HashEvent]:
        group = event.group_idx or 0
        self._block_tokens[group] = event.block_size
        known: list[BlockHash] = []
        for engine_hash in event.block_hashes:
            key = (event.block_size, engine_hash)
            name = self._names.get(key)
            if name is None:
                self.unnamed += 1
                self._warn_once("a block cannot be named", f"group {group}")
                continue
            self._groups[key] = self._groups.get(key, 0) | 1 << group
            known.append(name)
        return [self._event(group, event.block_size, known, "stored")] if known else []

    def _removed(self, event: _Removed) -> list[HashEvent]:
        group = event.group_idx or 0
        block_tokens = self._block_tokens.get(group)
        if block_tokens is None:
            return []
        gone: list[BlockHash] = []
        for engine_hash in event.block_hashes:
            key = (block_tokens, engine_hash)
            bits = self._groups.get(key, 0)
            if bits >> group & 1:
                gone.append(self._names[key])
                self._groups[key] = bits & ~(1 << group)
        return [self._event(group, block_tokens, gone, "removed")] if gone else []

    def _cleared(self) -> list[HashEvent]:
        gone = self._held()
        self._groups.clear()
        return [
            self._event(group, block_tokens, hashes, "removed")
            for (group, block_tokens), hashes in gone.items()
        ]

    def _held(self) -> dict[tuple[int, int], list[BlockHash]]:
        """Names by group index and block size."""
        held: dict[tuple[int, int], list[BlockHash]] = {}
        for key, bits in self._groups.items():
            for group in _bits(bits):
                held.setdefault((group, key[0]), []).append(self._names[key])
        return held

    def _forget_unheld(self, touched: Iterable[tuple[int, EngineHash]]) -> None:
        for key in touched:
            if not self._groups.get(key):
                self._groups.pop(key, None)
                self._names.pop(key, None)


def hash_events(engine: EngineHashes, payload: bytes) -> list[HashEvent]:
    """Translates one payload. Never raises on an engine's data: see the module's last rule."""
    events = _decoded(engine, payload)
    # Names in a first pass: a sparse group's event may precede the event with its position.
    for event in events:
        if isinstance(event, _Stored) and event.names_every_block:
            try:
                engine._name(event)
            except _UNREADABLE as error:  # in `extra_keys`: its blocks are not claimed
                engine._warn_once("the keys of a block are unreadable", error)
    translated: list[HashEvent] = []
    touched: list[tuple[int, EngineHash]] = []
    for event in events:
        match event:
            case _Stored():
                touched += ((event.block_size, h) for h in event.block_hashes)
                if event.medium in _ON_DEVICE:
                    translated += engine._stored(event)
            case _Removed():
                size = engine._block_tokens.get(event.group_idx or 0, 0)
                touched += ((size, h) for h in event.block_hashes)
                if event.medium in _ON_DEVICE:
                    translated += engine._removed(event)
            case _Cleared():
                touched += engine._names
                translated += engine._cleared()
    engine._forget_unheld(touched)
    return translated


def _decoded(engine: EngineHashes, payload: bytes) -> list[_Event]:
    try:
        _, raw_events = msgspec.msgpack.decode(payload, type=tuple[Any, ...])[:2]
        raw_events = list(raw_events)
    except _UNREADABLE as error:
        engine._unreadable(error)
        return []
    events: list[_Event] = []
    for raw in raw_events:
        try:
            event = _decoded_event(raw)
            if (
                not isinstance(event, _Cleared)
                and (event.group_idx or 0) not in engine._group_names
            ):
                raise ValueError(f"group {event.group_idx} does not belong to this engine")
        except _UNREADABLE as error:
            engine._unreadable(error)
        else:
            events.append(event)
    return events


def _decoded_event(raw: object) -> _Event:
    if isinstance(raw, dict):
        tag = raw.get("type")
    elif isinstance(raw, list) and raw:
        tag = raw[0]
    else:
        raise ValueError(f"an event is a {type(raw).__name__}")
    kind = _KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise ValueError(f"unknown event {tag!r}")
    if isinstance(raw, list):
        raw = dict(zip(kind.__struct_fields__, raw[1:], strict=False))
    event = msgspec.convert(raw, kind)
    if isinstance(event, _Stored):
        if not 1 <= event.block_size <= _MOST_BLOCK_TOKENS:
            raise ValueError(f"a block of {event.block_size} tokens")
        if len(event.token_ids) % event.block_size:
            raise ValueError(
                f"{len(event.token_ids)} tokens do not fill blocks of {event.block_size}"
            )
        if len(event.block_hashes) * event.block_size > len(event.token_ids):
            raise ValueError("more hashes than blocks")
        if any(not 0 <= token < 2**32 for token in event.token_ids):
            raise ValueError("a token id is larger than 32 bits")
    return event


def _split_extra_keys(event: _Stored, adapter: str) -> tuple[str, list[bytes]]:
    """The tenant's salt, and per block everything else its content depends on."""
    salt = ""
    extras: list[bytes] = []
    for position, keys in enumerate(event.extra_keys or ()):
        rest = list(keys or ())
        if adapter and rest and rest[0] == adapter:
            rest.pop(0)
        if position == 0 and event.parent_block_hash is None:
            for key in rest:
                if isinstance(key, str):
                    salt = key
                    rest.remove(key)
                    break
        extras.append(msgspec.msgpack.encode(rest) if rest else b"")
    return salt, extras if any(extras) else []


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
