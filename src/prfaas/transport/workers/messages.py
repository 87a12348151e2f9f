"""What a kvd and its workers say to each other: one message is one packet of a Unix socket.

A worker has a main socket, and each of its connections a socket of its own. Descriptors travel
beside the packet that needs them.
"""

from __future__ import annotations

import socket
from typing import Annotated, Literal, TypeAlias

import msgspec

from prfaas.errors import ConnectionLost, PeerError, WireError
from prfaas.transport.wire import HEADER_BYTES, MAX_PIECES, PIECE_BYTES

PART_BYTES = 64 << 10  # of a body or of a response in one packet: packets have a size limit
MAX_RANGES = 2 * MAX_PIECES  # in one order
# An order for a whole frame: its header, table and ranges of up to 27 bytes each.
PACKET_BYTES = 1024 + HEADER_BYTES + MAX_PIECES * PIECE_BYTES + MAX_RANGES * 27 + PART_BYTES

Range: TypeAlias = tuple[int, int, int]  # arena (or DISCARDED), offset, bytes


# To a worker's main socket ------------------------------------------------------------------------


class Serve(msgspec.Struct, frozen=True, tag="serve", array_like=True):
    """Beside it: a connected TCP socket, and the socket for orders about that connection."""

    side: Literal["sender", "receiver"]
    tls: Literal["client", "server"] | None
    server_name: str  # in the peer's certificate, for a client
    handshake_s: float
    silence_s: float
    send_files: bool = True  # with `sendfile`, for a sender without TLS


class Map(msgspec.Struct, frozen=True, tag="map", array_like=True):
    """Beside it: the file of an arena. The worker answers `Done`."""

    arena: int
    nbytes: int


class Unmap(msgspec.Struct, frozen=True, tag="unmap", array_like=True):
    """The worker answers `Done`."""

    arena: int


class UseCredentials(msgspec.Struct, frozen=True, tag="credentials", array_like=True):
    """Beside it: a file with certificates and keys in this order, for connections that are served
    from now on. The worker answers `Done`."""

    sizes: tuple[int, int, int, int, int]  # CA, certificate, key, client certificate, client key


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """The worker answers `Done`."""


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    problem: str = ""  # why the order was not carried out


# Orders for one connection ------------------------------------------------------------------------


class SendBytes(msgspec.Struct, frozen=True, tag="bytes", array_like=True):
    """Small frames, or parts of a larger one. Not answered."""

    data: bytes


class SendFrame(msgspec.Struct, frozen=True, tag="frame", array_like=True):
    """A frame whose payload lies in arenas. Answered with `Working` and `Sent`."""

    head: bytes
    ranges: Annotated[list[Range], msgspec.Meta(max_length=MAX_RANGES)]
    checked: bool  # the worker sets the checksum


class ReceiveBody(msgspec.Struct, frozen=True, tag="body", array_like=True):
    """The next bytes of a frame's body, which are answered with `Body`."""

    nbytes: int


class Discard(msgspec.Struct, frozen=True, tag="discard", array_like=True):
    """The next bytes of a frame's body are dropped. Answered with `Working` and `Received`."""

    nbytes: int


class ReceivePayload(msgspec.Struct, frozen=True, tag="payload", array_like=True):
    """The rest of a DATA frame goes into arenas. Answered with `Working` and `Received`."""

    ranges: Annotated[list[Range], msgspec.Meta(max_length=MAX_RANGES)]
    last: bool  # False: more ranges follow in the next order, and this one is not answered


# Reports about one connection ---------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True, tag="started", array_like=True):
    """The TLS handshake, if any, is complete."""


class Head(msgspec.Struct, frozen=True, tag="head", array_like=True):
    """A frame arrives: its header, and its table where it has pieces."""

    data: bytes


class Body(msgspec.Struct, frozen=True, tag="part", array_like=True):
    data: bytes


class Working(msgspec.Struct, frozen=True, tag="working", array_like=True):
    """An order takes longer than a tick; so many bytes of the payload have arrived."""

    nbytes: int


class Received(msgspec.Struct, frozen=True, tag="received", array_like=True):
    verified: bool


class Sent(msgspec.Struct, frozen=True, tag="sent", array_like=True):
    pass


class Input(msgspec.Struct, frozen=True, tag="input", array_like=True):
    """Bytes that the peer of a sender has sent."""

    data: bytes


class Lost(msgspec.Struct, frozen=True, tag="lost", array_like=True):
    """The connection has ended. Nothing follows, and the worker uses no memory for it any more."""

    why: Literal["connection", "protocol", "tls"]
    reason: str

    def error(self) -> PeerError:
        kinds = {"connection": ConnectionLost, "protocol": WireError, "tls": PeerError}
        return kinds[self.why](self.reason)


MainOrder: TypeAlias = Serve | Map | Unmap | UseCredentials | Ping
Order: TypeAlias = SendBytes | SendFrame | ReceiveBody | Discard | ReceivePayload
Report: TypeAlias = Started | Head | Body | Working | Received | Sent | Input | Lost

_MAIN_ORDER: msgspec.msgpack.Decoder[MainOrder] = msgspec.msgpack.Decoder(MainOrder)
_DONE = msgspec.msgpack.Decoder(Done)
_ORDER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_REPORT: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
encode = msgspec.msgpack.Encoder().encode
read_main_order, read_done, read_order, read_report = (
    _MAIN_ORDER.decode,
    _DONE.decode,
    _ORDER.decode,
    _REPORT.decode,
)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a socket for messages."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        # One packet of the largest size has to fit.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PACKET_BYTES)
    return ends
