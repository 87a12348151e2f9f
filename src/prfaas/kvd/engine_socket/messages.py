"""What engines and their kvd say to each other on the Unix socket, and how it is framed.

A frame is a length (4 bytes, big endian) and a msgpack body. Calls carry a number and are answered
once, in any order; `Ready` is not answered; a `Sent` comes unasked. Page numbers appear here and
nowhere else: they never leave the host. No sockets, no asyncio.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from prfaas.cache.storage.places import PageTable
from prfaas.contracts.kvd_api import GroupShape
from prfaas.errors import WireError
from prfaas.kvspec import Segment
from prfaas.types import Compat, Grant, NotNow, TransferId

MAX_FRAME_BYTES = 256 << 20  # a ticket for a million blocks; anything larger is not ours
_LENGTH = struct.Struct("!I")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


# Pieces ------------------------------------------------------------------------------------------


class SegmentName(msgspec.Struct, frozen=True, array_like=True):
    group: str
    layer: int
    start: _Count
    stop: _Count

    @property
    def segment(self) -> Segment:
        return Segment(self.group, self.layer, self.start, self.stop)


class UnitPages(msgspec.Struct, frozen=True, array_like=True):
    """A unit (see `cache.units`) and the arena's pages that hold it."""

    group: int
    where: int
    pages: tuple[int, ...]


# Calls -------------------------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag="register"):
    """The first message of a connection. The answer brings the arena's file descriptor."""

    engine_id: str
    groups: tuple[GroupShape, ...]
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    compat: Compat
    whole_blocks: bool = False  # blocks are opaque: always written, sent and read whole
    url: str | None = None  # where the engine serves HTTP, for gateways


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    hashes: tuple[bytes, ...]
    tokens: int
    checkpoint_tokens: tuple[int, ...] | None = None
    grant: Grant | None = None
    tail: bytes = b""  # `tail_hash` of what is computed


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    lease_id: int
    segments: tuple[SegmentName, ...]


class Join(msgspec.Struct, frozen=True, tag="join"):
    """This process, too, will touch the lease's pages."""

    lease_id: int


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    lease_id: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    lease_id: int
    reason: str


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    transfer_id: TransferId


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    hashes: tuple[bytes, ...]


class Release(msgspec.Struct, frozen=True, tag="release"):
    lease_id: int


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """One payload of the engine's own KV events (vLLM's msgpack), group index -> our name."""

    payload: bytes
    group_names: dict[int, str]


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Answered when everything sent before on this connection has been acted on."""


Call: TypeAlias = (
    Register | Begin | Ready | Join | Commit | Abort | Attach | Pin | Release | Publish | Flush
)


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    number: int  # 0: no answer is wanted
    call: Call


# Answers -----------------------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    node: str  # under which name the pool's cache events appear
    http_url: str  # where gateways reach this kvd
    data_address: str
    page_bytes: int
    pages: int


class Ticket(msgspec.Struct, frozen=True, tag="ticket"):
    """A lease, whole: may be passed to other processes of the same engine."""

    lease_id: int
    tokens: int
    match_tokens: int  # resume here
    skip_tokens: dict[str, int]
    checkpoint_tokens: tuple[int, ...]
    readable: tuple[UnitPages, ...]
    writable: tuple[UnitPages, ...]
    sending: bool = False  # a `Sent` will follow
    hashes: tuple[bytes, ...] = ()  # of an attached transfer: whose state it is,
    tail: bytes = b""  # and the name of what lies behind its last whole block


class Done(msgspec.Struct, frozen=True, tag="done"):
    pass


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """`input`: the caller's mistake; `transfer`: a transfer or lease that is not (any more)."""

    kind: Literal["input", "transfer"]
    problem: str


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """How a lease's remote transfer ended; empty reason: the receiver has committed."""

    lease_id: int
    reason: str


Answer: TypeAlias = Registered | Ticket | NotNow | Done | Refused


class Answered(msgspec.Struct, frozen=True, array_like=True):
    number: int
    answer: Answer | Sent  # a Sent has number 0


# Framing -----------------------------------------------------------------------------------------


def frame(message: Numbered | Answered) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Bytes in, bodies out."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._pending)
            if nbytes > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {nbytes} bytes on the local socket")
            stop = _LENGTH.size + nbytes
            if len(self._pending) < stop:
                return
            body = bytes(self._pending[_LENGTH.size : stop])
            del self._pending[:stop]
            yield body


_NUMBERED = msgspec.msgpack.Decoder(Numbered)
_ANSWERED = msgspec.msgpack.Decoder(Answered)


def decode_call(body: bytes) -> Numbered:
    try:
        return _NUMBERED.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a call: {error}") from None


def decode_answer(body: bytes) -> Answered:
    try:
        return _ANSWERED.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not an answer: {error}") from None


# Conversions -------------------------------------------------------------------------------------


def units_of(table: PageTable) -> tuple[UnitPages, ...]:
    return tuple(UnitPages(group, where, tuple(pages)) for (group, where), pages in table.items())


def table_of(units: tuple[UnitPages, ...]) -> Mapping[tuple[int, int], tuple[int, ...]]:
    return {(unit.group, unit.where): unit.pages for unit in units}
