"""The msgpack bodies of all frames except DATA, ACK, PROGRESS and MEASURE."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from prfaas import __version__
from prfaas.errors import WireError
from prfaas.schema import prepare
from prfaas.transport.wire import MAX_PAYLOAD_BYTES

MAX_SEGMENTS = 262_144
MAX_NAME_CHARACTERS = 200
MAX_LABEL_BYTES = 64
MIN_QUANTUM_BYTES = 4 << 10
MAX_QUANTUM_BYTES = 4 << 20

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True):
    """Body of HELLO (from the sender) and of WELCOME (from the receiver)."""

    software: str
    max_payload_bytes: int
    # Whether this side reads PROGRESS frames. Versions before that frame do not send this field.
    progress: bool = False


HELLO = Hello(f"prfaas {__version__}", MAX_PAYLOAD_BYTES, progress=True)


class ManifestSegment(msgspec.Struct, frozen=True, array_like=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]


class Manifest(msgspec.Struct, frozen=True):
    """Every segment of a transfer. Pieces begin at multiples of the quantum and have its size,
    except at a segment's end. The receiver therefore keeps one state per quantum."""

    quantum_bytes: Annotated[int, msgspec.Meta(ge=MIN_QUANTUM_BYTES, le=MAX_QUANTUM_BYTES)]
    segments: Annotated[
        tuple[ManifestSegment, ...], msgspec.Meta(min_length=1, max_length=MAX_SEGMENTS)
    ]
    # For the receiving owner.
    label: Annotated[bytes, msgspec.Meta(max_length=MAX_LABEL_BYTES)] = b""

    @property
    def total_bytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


class Ended(msgspec.Struct, frozen=True):
    committed: bool
    reason: str = ""


class Reason(msgspec.Struct, frozen=True):
    """Body of NACK and ABORT."""

    reason: str


prepare(Hello, Manifest, Ended, Reason)  # several threads decode these types


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a {kind.__name__}: {error}") from None
