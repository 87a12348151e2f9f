"""Messages between engines and their kvd on the Unix socket, and their framing.

A frame is a length (4 bytes, big endian) and a msgpack body. A call has a number and gets one
answer; answers may come in any order. `Ready` gets no answer. The kvd sends `TransferEnded` without
a call. Page numbers appear only in these messages: they never leave the host. No sockets, no
asyncio.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from prfaas.cache.storage.places import PageTable
from prfaas.contracts.kvd_api import MAX_GROUPS, MAX_HEADS, BlockName, GroupName, GroupShape
from prfaas.contracts.openai import MAX_CHOICES
from prfaas.errors import WireError
from prfaas.kvspec import Segment, SegmentShare
from prfaas.types import Compat, Grant, NotNow, TenantTag, TransferId

MAX_FRAME_BYTES = 256 << 20  # enough for a ticket of a million blocks; a larger frame is an error
_LENGTH = struct.Struct("!I")
ReadProblem: TypeAlias = Literal["", "other_prompt"]
MAX_COUNT = 1 << 40  # of tokens, and of what they are made of
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Page: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]  # of an arena, or in its pages
_HeadCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_HEADS)]
_EngineId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_GroupNames: TypeAlias = Annotated[tuple[GroupName, ...], msgspec.Meta(min_length=1, max_length=16)]
_GroupNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]


# Pieces ------------------------------------------------------------------------------------------


class SegmentName(msgspec.Struct, frozen=True, array_like=True):
    group: str
    layer: int
    start: _Count
    stop: _Count
    # The heads that are written: `heads` of them, from `first_head` on. 0 and 0: all heads.
    first_head: _HeadCount = 0
    heads: _HeadCount = 0

    @property
    def segment(self) -> Segment:
        return Segment(self.group, self.layer, self.start, self.stop)

    @property
    def share(self) -> SegmentShare:
        heads = None
        if self.heads or self.first_head:  # no heads from some head on: refused as an empty range
            heads = range(self.first_head, self.first_head + self.heads)
        return Segment(self.group, self.layer, self.start, self.stop), heads


class UnitPages(msgspec.Struct, frozen=True, array_like=True):
    """A unit (see `cache.units`) and the pages of the arena that contain it."""

    group: _GroupNumber
    where: _Count
    pages: Annotated[tuple[_Page, ...], msgspec.Meta(min_length=1)]


# Calls -------------------------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag="register"):
    """The first message of a connection. The arena's file descriptor comes with the answer."""

    engine_id: _EngineId
    groups: Annotated[tuple[GroupShape, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    compat: Compat
    whole_blocks: bool = False  # blocks are opaque: they are written, sent and read whole
    # The engine's HTTP address, for gateways.
    url: Annotated[str, msgspec.Meta(max_length=2_048)] | None = None
    # Another form of an engine that has registered its first form on another connection.
    further: bool = False
    # The engine keeps answers: the kvd sets pages aside for those that are being written.
    keeps_answers: bool = False


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Reserve pages for a prefill; with a grant, send its state as it becomes ready. With
    `answer_from` the pages are for an answer that has ended: the engine has full attention from
    this token on, and states after `tokens`, which is a block boundary."""

    hashes: tuple[BlockName, ...]
    tokens: int
    checkpoint_tokens: tuple[int, ...] | None = None
    grant: Grant | None = None
    tail: Annotated[bytes, msgspec.Meta(max_length=64)] = b""  # `tail_hash` of the prompt
    answer_from: _Count | None = None
    tenant: TenantTag = ""  # whose prompt it is, where no grant says so


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    lease_id: int
    segments: tuple[SegmentName, ...]


class Join(msgspec.Struct, frozen=True, tag="join"):
    """This process, too, will use the pages of the lease. `instance` is the ticket's: lease ids
    begin anew with every kvd process, so the id alone may be another request's."""

    lease_id: int
    instance: str = ""


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    lease_id: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    lease_id: int
    reason: str


class Attach(msgspec.Struct, frozen=True, tag="attach", omit_defaults=True):
    """`attachments`: how often this engine will attach the transfer, this time included. The first
    attach decides; each one gets a lease of its own."""

    transfer_id: TransferId
    attachments: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    hashes: tuple[BlockName, ...]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """`problem`: why the engine could not use an attached transfer. Its status then has it."""

    lease_id: int
    problem: ReadProblem = ""


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """One payload of the engine's KV events (vLLM's msgpack); group index -> group name.

    Several group indices may have one name: a block is stored when every one of them holds it. One
    index may have several names: its blocks count for each. With `block_tokens` (the pool's) the
    kvd announces blocks of that size, whatever the engine's own size. 0: the engine's own blocks.
    """

    payload: bytes
    group_names: Annotated[
        Mapping[_GroupNumber, GroupName | _GroupNames], msgspec.Meta(max_length=MAX_GROUPS)
    ]
    block_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """The answer means that every earlier message of this connection has been handled."""


class InvalidCall(msgspec.Struct, frozen=True, tag="invalid"):
    """Takes the place of a call that cannot be read. The kvd refuses it with the problem."""

    problem: str = "the call is invalid"


Call: TypeAlias = (
    Register
    | Begin
    | Ready
    | Join
    | Commit
    | Abort
    | Attach
    | Pin
    | Release
    | Publish
    | Flush
    | InvalidCall
)


class NumberedCall(msgspec.Struct, frozen=True, array_like=True):
    number: int  # 0: the caller expects no answer
    call: Call


# Answers -----------------------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    node: str  # the pool's name in cache events
    http_url: str  # this kvd's address for gateways
    data_address: str
    page_bytes: _Size
    pages: _Size
    instance: str = ""  # identifies the kvd's process: after a restart it is another one


class LeaseTicket(msgspec.Struct, frozen=True, tag="ticket"):
    """Everything about a lease. The engine may pass it to its other processes."""

    lease_id: int
    tokens: _Count
    match_tokens: _Count  # the engine resumes here
    skip_tokens: dict[str, _Count]
    checkpoint_tokens: tuple[_Count, ...]
    readable: tuple[UnitPages, ...]
    writable: tuple[UnitPages, ...]
    sending: bool = False  # a `TransferEnded` follows
    hashes: tuple[bytes, ...] = ()  # of an attached transfer: its whole blocks,
    tail: bytes = b""  # and the hash of the tokens after the last whole block
    instance: str = ""  # of the kvd that made the lease: the ids and pages mean nothing to another


class Done(msgspec.Struct, frozen=True, tag="done"):
    pass


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """`input`: the call is invalid. `transfer`: the transfer or lease is unknown or has ended."""

    kind: Literal["input", "transfer"]
    problem: str


class TransferEnded(msgspec.Struct, frozen=True, tag="sent"):
    """The transfer of a lease has ended. An empty reason: the receiver has committed it."""

    lease_id: int
    reason: str


Answer: TypeAlias = Registered | LeaseTicket | NotNow | Done | Refused


class NumberedAnswer(msgspec.Struct, frozen=True, array_like=True):
    number: int
    answer: Answer | TransferEnded  # a TransferEnded has number 0


# Framing -----------------------------------------------------------------------------------------


def frame(message: NumberedCall | NumberedAnswer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects bytes and yields the bodies of complete frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def add(self, data: bytes) -> int:
        """Keeps the bytes for the next `feed`, and returns how many bytes wait for it."""
        self._pending += data
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """A caller that stops early gets the remaining frames from the next call."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._pending)
            if nbytes > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {nbytes} bytes on the Unix socket exceeds the limit")
            stop = _LENGTH.size + nbytes
            if len(self._pending) < stop:
                return
            body = bytes(self._pending[_LENGTH.size : stop])
            del self._pending[:stop]
            yield body


_NUMBERED = msgspec.msgpack.Decoder(NumberedCall)
_NUMBER = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_ANSWERED = msgspec.msgpack.Decoder(NumberedAnswer)


# Besides its own errors msgspec raises these for invalid UTF-8 and for deeply nested values.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_call(body: bytes) -> NumberedCall:
    """An `InvalidCall` stands for a call that breaks the schema: the connection can be used
    further. WireError when the frame has no number and call at all."""
    try:
        return _NUMBERED.decode(body)
    except _UNREADABLE as error:
        try:
            number, _ = _NUMBER.decode(body)
        except _UNREADABLE:
            raise WireError(f"the frame is not a call: {error}") from None
        return NumberedCall(number, InvalidCall(f"the call is invalid: {error}"))


def decode_answer(body: bytes) -> NumberedAnswer:
    try:
        return _ANSWERED.decode(body)
    except _UNREADABLE as error:
        raise WireError(f"the frame is not an answer: {error}") from None


# Conversions -------------------------------------------------------------------------------------


def units_of(table: PageTable) -> tuple[UnitPages, ...]:
    return tuple(UnitPages(group, where, tuple(pages)) for (group, where), pages in table.items())


def table_of(units: Iterable[UnitPages]) -> Mapping[tuple[int, int], tuple[int, ...]]:
    return {(unit.group, unit.where): unit.pages for unit in units}
