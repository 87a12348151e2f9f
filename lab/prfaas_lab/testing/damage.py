"""A proxy between an engine and its kvd that changes one head's state before the kvd sends it.

Every checksum of the transfer is right, because the bytes change before the kvd has seen them. Only
their meaning is wrong. A check that compares answers has to notice that. The engine and the kvd are
the real ones, in their own processes:

    prfaas kvd --socket KVD --http ...
    with DamageGate(gate_path, KVD, HeadOfLayer.of_model(checkpoint, layer=2)) as gate:
        prfaas node --model CHECKPOINT --kvd gate_path --kvd-url ...      is the prefill node
        gate.damaging = True
        prfaas doctor pair PREFILL DECODE --tokens 900 --try              has to fail
        assert gate.damaged_segments

The gate passes everything through unchanged while `damaging` is false, which it is at first. It
changes the canonical form only: an engine's own blocks (vLLM's native form) pass unchanged, and
`damaged_segments` stays empty.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prfaas.cache.storage.arena import Arena
from prfaas.catalog.hf_file import read_hf_config
from prfaas.clock import Clock
from prfaas.contracts.kvd_api import spec_of
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.leases import MappedArena
from prfaas.kvd.engine_socket.messages import (
    Abort,
    Commit,
    FrameReader,
    LeaseTicket,
    NumberedCall,
    Ready,
    Register,
    Registered,
    decode_answer,
    table_of,
)
from prfaas.kvspec import Geometry, KVSpec, Linear, Segment, layer_parts, segment_bytes
from prfaas.kvspec.geometry import dtype_bytes
from prfaas.types import CANONICAL, Compat
from prfaas_lab.testing.ready_gate import ReadyGate

# In the highest byte of a number, which begins with the sign and the exponent. It multiplies or
# divides a bfloat16 or a float32 by 256, and makes no NaN of numbers between 1e-30 and 1e30.
EXPONENT_BIT = 0x04


@dataclass(frozen=True, slots=True)
class HeadOfLayer:
    """One head of one layer of a model, in the canonical form: of a linear layer its state, of an
    attention layer the keys of every token. A latent (MLA) has no heads and is one."""

    geometry: Geometry
    layer: int
    head: int = 0

    @classmethod
    def of_model(cls, model: Path, layer: int | None = None, head: int = 0) -> HeadOfLayer:
        """`model`: the folder of a checkpoint. Without `layer`, the first linear layer; in a model
        that has none, layer 0. InputError when the model has no such layer or head."""
        geometries = read_hf_config(model).geometries
        if layer is None:
            linear = [g.layers[0] for g in geometries if isinstance(g, Linear)]
            layer = min(linear, default=0)
        for geometry in geometries:
            if layer in geometry.layers:
                place = cls(geometry, layer, head)
                place.columns("float32", "float32")
                return place
        raise InputError(
            f"the model has no state in layer {layer}", where="layer", fix="name another layer"
        )

    def columns(self, kv_dtype: str, state_dtype: str) -> tuple[slice, int, int]:
        """(the head's bytes in a row, bytes of a row, bytes of a number). A row is a segment's part
        of one token, or a linear state."""
        parts = layer_parts(self.geometry, kv_dtype=kv_dtype, state_dtype=state_dtype)
        first = parts[0]
        heads = first.shape[0] if len(first.shape) == 2 else 1
        if not 0 <= self.head < heads:
            raise InputError(
                f"layer {self.layer} has no head {self.head}",
                where="head",
                fix=f"its heads are 0 to {heads - 1}",
            )
        nbytes = first.nbytes // heads
        row = sum(part.nbytes for part in parts)
        at = slice(self.head * nbytes, (self.head + 1) * nbytes)
        return at, row, dtype_bytes(first.dtype)


class DamageGate(ReadyGate):
    """`with DamageGate(path, kvd_socket, place) as gate:`; engines use `path` as their kvd's
    socket. Set `damaging` only while no prefill runs."""

    def __init__(
        self, path: Path, kvd: Path | str, place: HeadOfLayer, clock: Clock | None = None
    ) -> None:
        self.place = place
        self.damaging = False
        self.damaged_segments: list[str] = []
        self.damaged_numbers = 0
        self._connections: dict[socket.socket, _Connection] = {}
        self._tickets: dict[int, tuple[_Connection, LeaseTicket]] = {}  # by lease
        super().__init__(path, kvd, clock)

    def _filter(self, engine: socket.socket, numbered: NumberedCall) -> bytes:
        call = numbered.call
        if isinstance(call, Register):
            with self._lock:
                self._connections[engine] = _Connection(spec_of(call.groups), call)
        elif isinstance(call, Commit | Abort):
            with self._lock:
                self._tickets.pop(call.lease_id, None)
        elif isinstance(call, Ready) and self.damaging:
            with self._lock:
                found = self._tickets.get(call.lease_id)
                if found is not None:
                    self._damage(*found, [name.segment for name in call.segments])
        return super()._filter(engine, numbered)

    def _watch(self, engine: socket.socket, data: bytes, descriptors: list[int]) -> None:
        with self._lock:
            connection = self._connections.get(engine)
            if connection is None:
                return  # its registration was not readable: the kvd refuses it
            for ticket in connection.read(data, descriptors):
                self._tickets[ticket.lease_id] = connection, ticket

    def _damage(
        self, connection: _Connection, ticket: LeaseTicket, segments: list[Segment]
    ) -> None:
        if connection.compat.form != CANONICAL:
            return
        for segment in segments:
            # A layer that has attention and a state is in two groups.
            if segment.layer == self.place.layer and _is_of(self.place, connection, segment):
                self.damaged_numbers += connection.damage(self.place, ticket, segment)
                self.damaged_segments.append(segment.name)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for connection in self._connections.values():
            connection.close()


@dataclass(slots=True, eq=False)
class _Connection:
    """What an engine has registered, and its kvd's memory."""

    spec: KVSpec
    register: Register
    frames: FrameReader = field(default_factory=FrameReader)
    arena: Arena | None = None
    descriptor: int | None = None

    @property
    def compat(self) -> Compat:
        return self.register.compat

    def read(self, data: bytes, descriptors: list[int]) -> Iterator[LeaseTicket]:
        """The tickets in the kvd's answers, and the arena on the way."""
        if descriptors and self.descriptor is None:
            self.descriptor = os.dup(descriptors[0])
        for body in self.frames.feed(data):
            answer = decode_answer(body).answer
            if isinstance(answer, Registered) and self.descriptor is not None:
                self.arena = Arena(self.descriptor, answer.page_bytes, answer.pages)
            elif isinstance(answer, LeaseTicket):
                yield answer

    def damage(self, place: HeadOfLayer, ticket: LeaseTicket, segment: Segment) -> int:
        """Changes the head's numbers in place and returns how many they are."""
        assert self.arena is not None, "a ticket comes after the registration"
        mapped = MappedArena(self.spec, self.register.block_tokens, self.arena)
        views = mapped.views(segment, table_of(ticket.writable))
        at, row, number = place.columns(self.compat.kv_dtype, self.compat.state_dtype)
        whole = np.concatenate([np.frombuffer(view, np.uint8) for view in views])
        rows: npt.NDArray[np.uint8] = whole.reshape(-1, row)
        # Numbers are little endian: the highest byte is the last one.
        highest = rows[:, at][:, number - 1 :: number]
        highest ^= EXPONENT_BIT
        done = 0
        for view in views:
            np.frombuffer(view, np.uint8)[:] = whole[done : done + view.nbytes]
            done += view.nbytes
        return int(highest.size)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        if self.descriptor is not None:
            os.close(self.descriptor)


def _is_of(place: HeadOfLayer, connection: _Connection, segment: Segment) -> bool:
    row = place.columns(connection.compat.kv_dtype, connection.compat.state_dtype)[1]
    tokens = 1 if isinstance(place.geometry, Linear) else segment.stop - segment.start
    return segment_bytes(connection.spec, segment) == row * tokens
