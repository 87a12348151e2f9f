"""The JSON of a request to a node, as parts that are sent one after the other.

A chat with images may have 60 MB. Joining such a body would stop every stream for as long as the
copy takes, so long values stay where they are and the connection sends them from there. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from prfaas.http_client.paced_writer import Buffer, RequestBody

JOINED_BYTES = 1 << 16  # up to this size, joining is faster than several writes


class JsonParts:
    """One JSON value, in parts that are never joined."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Buffer) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


def encode_body(fields: Mapping[str, Any]) -> RequestBody:
    """The fields as a JSON object. Values that are `JsonParts` follow the others, and are copied
    only when the whole body is short."""
    short = {name: value for name, value in fields.items() if not isinstance(value, JsonParts)}
    begun = msgspec.json.encode(short)
    if len(short) == len(fields):
        return begun
    parts: list[Buffer] = [begun[:-1]]
    comma = b"," if short else b""
    for name, value in fields.items():
        if isinstance(value, JsonParts):
            parts += [comma + msgspec.json.encode(name) + b":", *value.parts]
            comma = b","
    parts.append(b"}")
    return b"".join(parts) if sum(map(len, parts)) <= JOINED_BYTES else tuple(parts)
