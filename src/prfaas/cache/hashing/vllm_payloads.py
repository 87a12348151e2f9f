"""Reads vLLM's KV events. No hashes are computed here.

vLLM 0.18 to 0.32: a payload is `[timestamp, [event, ...], rank]`; events are arrays before v0.24
and maps since. `BlockStored` has the tokens of a chain of blocks after `parent_block_hash`.
`BlockRemoved` has engine hashes only.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Annotated, Any, TypeAlias

import msgspec

EngineHash: TypeAlias = int | Annotated[bytes, msgspec.Meta(max_length=64)]

# What reading an engine's data may raise; RecursionError: values that are nested too deeply.
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
_MOST_BLOCK_TOKENS = 1 << 20
_ON_DEVICE = (None, "GPU")  # other components announce offloaded copies


class Stored(msgspec.Struct, frozen=True):
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

    @property
    def on_device(self) -> bool:
        return self.medium in _ON_DEVICE


class Removed(msgspec.Struct, frozen=True):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None

    @property
    def on_device(self) -> bool:
        return self.medium in _ON_DEVICE


class Cleared(msgspec.Struct, frozen=True):
    pass


Event: TypeAlias = Stored | Removed | Cleared
_KINDS: dict[str, type[Stored] | type[Removed] | type[Cleared]] = {
    "BlockStored": Stored,
    "BlockRemoved": Removed,
    "AllBlocksCleared": Cleared,
}


def raw_events(payload: bytes) -> list[object]:
    """The events of a payload, still to be decoded. Raises one of `UNREADABLE`."""
    _, events = msgspec.msgpack.decode(payload, type=tuple[Any, ...])[:2]
    return list(events)


def decode_event(raw: object, groups: Collection[int]) -> Event:
    """Raises one of `UNREADABLE`. `groups`: the group numbers that an event may have."""
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
    if isinstance(event, Stored):
        _check_sizes(event)
    if not isinstance(event, Cleared) and (event.group_idx or 0) not in groups:
        raise ValueError(f"group {event.group_idx} does not belong to this engine")
    return event


def split_extra_keys(event: Stored, adapter: str) -> tuple[str, list[bytes]]:
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


def _check_sizes(event: Stored) -> None:
    if not 1 <= event.block_size <= _MOST_BLOCK_TOKENS:
        raise ValueError(f"a block of {event.block_size} tokens")
    if len(event.token_ids) % event.block_size:
        raise ValueError(f"{len(event.token_ids)} tokens do not fill blocks of {event.block_size}")
    if len(event.block_hashes) * event.block_size > len(event.token_ids):
        raise ValueError("more hashes than blocks")
    array("I", event.token_ids)  # OverflowError: a token id is larger than 32 bits, or negative
