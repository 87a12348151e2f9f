"""What a node, its grammar host and the processes of grammars say to each other.

node ──► host       Setup ◄── Ready, then a descriptor for each grammar
node ──► grammar    Compile ◄── Begun, Compiled, then
                    Begin and Step ◄── one Mask for each of them; End
"""

from __future__ import annotations

import socket
import struct
from typing import TypeAlias, TypeVar

import msgspec

MOST_FRAME_BYTES = 256 << 20  # a tokenizer.json has up to 30 MB
_LENGTH = struct.Struct("!I")
T = TypeVar("T")


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The vocabulary, as llguidance reads it."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]


class Ready(msgspec.Struct, frozen=True, array_like=True):
    problem: str = ""  # of the tokenizer; empty: grammars can be compiled


class Compile(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a `GrammarDescription`."""

    kind: str
    text: str
    any_whitespace: bool
    whitespace_pattern: str | None


class Begun(msgspec.Struct, frozen=True, array_like=True):
    pid: int  # of the grammar's process


class Compiled(msgspec.Struct, frozen=True, array_like=True):
    memory_bytes: int  # that the grammar takes now
    problem: str = ""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A matcher at the beginning of the grammar."""

    matcher: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The matcher's answer has one token more."""

    matcher: int
    token: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=2):
    matcher: int


Request: TypeAlias = Begin | Step | End


class Mask(msgspec.Struct, frozen=True, array_like=True):
    """What may follow: one bit for each token, the lowest bit of a byte first."""

    matcher: int
    bits: bytes
    is_accepting: bool  # the answer may end here
    memory_bytes: int
    problem: str = ""


def send(connection: socket.socket, message: object) -> None:
    """OSError when the other process has ended."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """None when the other process has ended. TimeoutError after the socket's timeout."""
    head = _read(connection, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > MOST_FRAME_BYTES:
        return None
    data = _read(connection, size)
    return None if data is None else decoder.decode(data)


def _read(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            count = connection.recv_into(view[at:])
        except ConnectionError:
            return None
        if not count:
            return None
        at += count
    return data
