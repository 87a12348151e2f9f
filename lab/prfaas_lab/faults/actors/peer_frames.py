"""The hostile peer kvd at the data ports: frames without a grant, damaged frames, silence."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterable

from prfaas.errors import WireError
from prfaas.transport.messages import HELLO, Manifest, ManifestSegment, Reason, encode
from prfaas.transport.wire import (
    HEADER_BYTES,
    Decoder,
    Kind,
    SegmentPiece,
    auth_of,
    encode_data,
    encode_message,
    parse_header,
)
from prfaas_lab.faults.actors.connections import Network, Place, byte_by_byte, place_of, write
from prfaas_lab.faults.actors.grants import Grants
from prfaas_lab.faults.actors.lanes import Lane
from prfaas_lab.faults.actors.situation import KvdPlace
from prfaas_lab.testing.hostile import mutate_bytes

UNPROVEN_S = 30.0  # a connection without a grant must end within this; the listener's limit is 10 s
MEASURED_S = 210.0  # and a path check within this; its limit is 180 s
STAYS_S = 5.0  # a peer with a grant leaves after this
_GREETING = encode_message(Kind.HELLO, encode(HELLO))


class PeerFrames:
    def __init__(self, network: Network, kvds: list[KvdPlace], grants: Grants) -> None:
        self._network = network
        self._kvds = kvds
        self._grants = grants

    @property
    def lanes(self) -> list[Lane]:
        return [
            Lane("peer: data, random bytes", self._random_bytes, pause_s=0.2),
            Lane("peer: data, silent", self._silent, 16),
            Lane("peer: data, only HELLO", self._hello, 16),
            Lane("peer: data, slow OPEN", self._slow_open, 8),
            Lane("peer: data, no grant", self._no_grant, 2),
            Lane("peer: data, damaged frames", self._damaged_frames, 2, pause_s=0.2),
            Lane("peer: data, path check", self._measure, pause_s=1.0),
        ]

    async def _data(
        self,
        kind: str,
        draw: random.Random,
        pieces: Iterable[bytes],
        limit_s: float = UNPROVEN_S,
        *,
        every_s: float = 0.0,
    ) -> None:
        place = place_of(draw.choice(self._kvds).data)
        await self._network.deed(kind, place, pieces, limit_s, every_s=every_s)

    async def _random_bytes(self, kind: str, draw: random.Random) -> None:
        await self._data(kind, draw, [draw.randbytes(draw.choice((1, 64, 5_000)))])

    async def _silent(self, kind: str, draw: random.Random) -> None:
        await self._data(kind, draw, [b""])

    async def _hello(self, kind: str, draw: random.Random) -> None:
        await self._data(kind, draw, [_GREETING * draw.choice((1, 2))])

    async def _slow_open(self, kind: str, draw: random.Random) -> None:
        frame = encode_message(Kind.OPEN, encode(_manifest(draw)), transfer_id=draw.randbytes(16))
        await self._data(kind, draw, byte_by_byte(_GREETING, frame), every_s=0.3)

    async def _no_grant(self, kind: str, draw: random.Random) -> None:
        frames = _frames(draw.randbytes(16), draw.randbytes(16), draw)
        await self._data(kind, draw, [_GREETING, draw.choice(frames)])

    async def _damaged_frames(self, kind: str, draw: random.Random) -> None:
        """Frames of a transfer that was granted: another manifest, data before it, damaged
        bytes."""
        kvd = draw.choice(self._kvds)
        grant = await self._grants.grant(kvd, draw)
        if grant is None:
            return
        transfer = uuid.UUID(grant.transfer_id).bytes
        frames = _frames(transfer, auth_of(grant.token), draw)
        sent = [mutate_bytes(f, draw, 64) if draw.random() < 0.7 else f for f in frames]
        draw.shuffle(sent)
        pieces = [_GREETING, *sent]
        await self._until_closed(kind, place_of(kvd.data), pieces)

    async def _until_closed(self, kind: str, place: Place, pieces: list[bytes]) -> None:
        """A connection with a grant may stay open for a minute; its sender leaves before."""
        began_s = time.monotonic()
        kinds: list[str] = []
        decoder = Decoder()
        async with self._network.connection(place) as (reader, writer):
            try:
                for piece in pieces:
                    await self._network.budget.turn()
                    write(writer, piece)
                async with asyncio.timeout(STAYS_S):
                    while data := await reader.read(65536):
                        kinds += [frame.header.kind.name for frame in decoder.feed(data)]
            except TimeoutError:
                kinds.append("left")
            except (OSError, WireError):
                pass
        seen = kinds[-1] if kinds else "closed"
        self._network.census.record(kind, seen, time.monotonic() - began_s)

    async def _measure(self, kind: str, draw: random.Random) -> None:
        frame = encode_message(Kind.MEASURE, bytes(1 << 20))
        await self._data(kind, draw, [_GREETING, *[frame] * draw.choice((1, 8))], MEASURED_S)


def _manifest(draw: random.Random) -> Manifest:
    count = draw.choice((1, 9, 2_000))
    return Manifest(1 << 20, tuple(ManifestSegment(f"s{n}", 10 + n) for n in range(count)))


def _frames(transfer_id: bytes, auth: bytes, draw: random.Random) -> list[bytes]:
    parts = [b"a" * 100, b"b" * 7]
    pieces = [SegmentPiece(n, 0, 4096 * n, len(part), len(part)) for n, part in enumerate(parts)]
    data = encode_data(
        pieces, parts, sequence=3, transfer_id=transfer_id, auth=auth, checked=draw.random() < 0.5
    )
    manifest = encode(_manifest(draw))
    frames = [
        encode_message(Kind.OPEN, manifest, transfer_id=transfer_id, auth=auth),
        bytes(data) + b"".join(parts),
        encode_message(Kind.PROBE, transfer_id=transfer_id, auth=auth),
        encode_message(Kind.ABORT, encode(Reason("x")), transfer_id=transfer_id, auth=auth),
        encode_message(Kind.WELCOME, encode(HELLO), transfer_id=transfer_id, auth=auth),
    ]
    assert all(parse_header(frame[:HEADER_BYTES]) for frame in frames)
    return frames
