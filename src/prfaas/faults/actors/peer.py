"""The hostile peer kvd: damaged commands to the HTTP APIs of kvds, and damaged frames to their data
ports.

A valid command of a member is conceded (docs/security.md), so this actor sends none that reads KV,
assigns a role or reserves much memory: it has at most `MOST_GRANTS` small grants at a time.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import msgspec

from prfaas.contracts.kvd_api import KvdReport, OpenTransfer
from prfaas.errors import WireError
from prfaas.faults.actors.connections import Network, Place, http_head, http_request, place_of
from prfaas.faults.actors.lanes import Lane
from prfaas.faults.actors.mutations import mutate_bytes, mutate_json
from prfaas.faults.actors.situation import KvdPlace
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
from prfaas.types import Compat, Grant, TransferId

GRANT_S = 60.0  # a grant that is not used ends after this (`kvd.timeouts.grant_s`)
MOST_GRANTS = 4  # of one kvd at a time
GRANT_BLOCKS = 2
ANSWER_S = 60.0  # for the answer of a kvd to a damaged request
LONG_POLL_S = 90.0
UNPROVEN_S = 30.0  # a connection without a grant must end within this
PROVEN_S = 120.0  # and one with a grant, of which nothing more arrives
MOST_HASHES = 500_000
_REPORT = msgspec.json.Decoder(KvdReport)
_ANSWER = msgspec.json.Decoder(dict[str, Any])
_GREETING = encode_message(Kind.HELLO, encode(HELLO))


class HostilePeer:
    def __init__(self, network: Network, key: str, kvds: list[KvdPlace]) -> None:
        self._network = network
        self._key = key
        self._kvds = kvds
        self._compat: dict[str, Compat] = {}
        self._granted: dict[str, deque[tuple[float, Grant]]] = {
            kvd.http: deque(maxlen=MOST_GRANTS) for kvd in kvds
        }

    def prepare(self) -> None:
        """Makes the long body, which is kept."""
        self._hashes_body  # noqa: B018

    @property
    def lanes(self) -> list[Lane]:
        return [
            Lane("peer: damaged command", self._command, 2),
            Lane("peer: grant abandoned", self._abandon, pause_s=1.0),
            Lane("peer: many hashes", self._many, pause_s=2.0),
            Lane("peer: long poll", self._long_poll, 8),
            Lane("peer: role that is not one", self._role, pause_s=0.5),
            Lane("peer: slow command", self._slow_command, 4),
            Lane("peer: without the key", self._no_key, pause_s=0.5),
            Lane("peer: data, random bytes", self._random_bytes, pause_s=0.2),
            Lane("peer: data, silent", self._silent, 16),
            Lane("peer: data, only HELLO", self._hello, 16),
            Lane("peer: data, slow OPEN", self._slow_open, 8),
            Lane("peer: data, no grant", self._no_grant, 2),
            Lane("peer: data, damaged frames", self._damaged_frames, 2, pause_s=0.2),
            Lane("peer: data, path check", self._measure, pause_s=1.0),
        ]

    # Commands -------------------------------------------------------------------------------------

    async def _request(self, kvd: KvdPlace, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of a valid request's answer, read to its end. Raises OSError, TimeoutError."""
        place = place_of(kvd.http)
        async with self._network.connection(place) as (reader, writer), asyncio.timeout(ANSWER_S):
            writer.write(b"".join(http_request(method, path, self._key, body)))
            return (await reader.read(-1)).partition(b"\r\n\r\n")[2]

    async def _compat_of(self, kvd: KvdPlace) -> Compat | None:
        """The format of the kvd's engine, which a member may know."""
        if kvd.http not in self._compat:
            try:
                report = _REPORT.decode(await self._request(kvd, "GET", "/v1/stats"))
            except msgspec.MsgspecError:
                return None  # the kvd is starting
            if report.pool is None:
                return None
            self._compat[kvd.http] = report.pool.compat
        return self._compat[kvd.http]

    def _open_body(self, compat: Compat, draw: random.Random) -> dict[str, Any]:
        names = tuple(draw.randbytes(32) for _ in range(GRANT_BLOCKS))
        found: dict[str, Any] = msgspec.to_builtins(
            OpenTransfer(
                names,
                GRANT_BLOCKS * compat.block_tokens,
                compat,
                transfer_id=TransferId(str(uuid.UUID(int=draw.getrandbits(128)))),
            )
        )
        return found

    async def _grant(self, kvd: KvdPlace, draw: random.Random) -> Grant | None:
        """A grant of this kvd: one that it has, or a new one while it has few."""
        known = self._granted[kvd.http]
        now_s = time.monotonic()
        while known and now_s - known[0][0] > GRANT_S + 5.0:
            known.popleft()
        if len(known) >= MOST_GRANTS:
            return draw.choice(known)[1]
        compat = await self._compat_of(kvd)
        if compat is None:
            return None
        body = msgspec.json.encode(self._open_body(compat, draw))
        try:
            answer = msgspec.json.decode(
                await self._request(kvd, "POST", "/v1/open", body), type=Grant
            )
        except msgspec.MsgspecError:
            self._compat.pop(kvd.http, None)
            return None  # no room, or another engine
        known.append((now_s, answer))
        return answer

    async def _abandon(self, kind: str, draw: random.Random) -> None:
        """A grant whose transfer never begins."""
        grant = await self._grant(draw.choice(self._kvds), draw)
        self._network.census.record(kind, "refused" if grant is None else "granted", 0.0)

    async def _command(self, kind: str, draw: random.Random) -> None:
        kvd = draw.choice(self._kvds)
        compat = await self._compat_of(kvd) or Compat("m", "1", "x", "x", 64, "canonical")
        names = [msgspec.to_builtins(draw.randbytes(32)) for _ in range(GRANT_BLOCKS)]
        grant = Grant(TransferId(str(uuid.uuid4())), "token", "127.0.0.66:9", {}, 1 << 20, 5.0)
        path, body = draw.choice(
            (
                ("/v1/open", self._open_body(compat, draw)),
                ("/v1/match", {"hashes": names}),
                (
                    "/v1/pull",
                    {"source": draw.choice(_SOURCES), "hashes": names, "within_s": 2.0},
                ),
                (
                    "/v1/push",
                    {
                        "hashes": names,
                        "compat": msgspec.to_builtins(compat),
                        "grant": msgspec.to_builtins(grant),
                    },
                ),
                (f"/v1/transfers/{draw.choice(_IDS)}/abort", {"reason": "x" * 5_000}),
                ("/v1/prove", {"challenge": "0" * 32}),
            )
        )
        data = mutate_json(body, draw)
        if path == "/v1/open" and _reserves(data):
            return
        pieces = http_request("POST", path, self._key, data)
        await self._network.deed(kind, place_of(kvd.http), pieces, ANSWER_S)

    @cached_property
    def _hashes_body(self) -> bytes:
        one = msgspec.json.encode(msgspec.to_builtins(b"h" * 32))
        return b'{"hashes":[' + b",".join([one] * MOST_HASHES) + b"]}"

    async def _many(self, kind: str, draw: random.Random) -> None:
        """Half a million block names in one request."""
        pieces = http_request("POST", "/v1/match", self._key, self._hashes_body)
        await self._network.deed(kind, place_of(draw.choice(self._kvds).http), pieces, ANSWER_S)

    async def _long_poll(self, kind: str, draw: random.Random) -> None:
        kvd = draw.choice(self._kvds)
        path = draw.choice(
            (
                f"/v1/events?node={kvd.node}&since=0&wait_s=30",
                "/v1/events?node=x&since=99999999999999999999&wait_s=nan",
                f"/v1/events?node={kvd.node}&since=-1&wait_s=-5",
                f"/v1/transfers/{draw.choice(_IDS)}?wait_s=1e400",
                "/v1/stats?check=2",
            )
        )
        pieces = http_request("GET", path, self._key)
        await self._network.deed(kind, place_of(kvd.http), pieces, LONG_POLL_S)

    async def _role(self, kind: str, draw: random.Random) -> None:
        """Never a valid role with the current epoch, which a member may assign."""
        body = draw.choice(
            (
                {"role": "prefill", "epoch": -7},
                {"role": "prefill", "epoch": 2**62},
                {"role": "king", "epoch": 0},
                {"role": ["both"], "epoch": 0},
                {"epoch": "0", "role": "decode"},
            )
        )
        pieces = http_request("POST", "/v1/role", self._key, msgspec.json.encode(body))
        await self._network.deed(kind, place_of(draw.choice(self._kvds).http), pieces, ANSWER_S)

    async def _slow_command(self, kind: str, draw: random.Random) -> None:
        """The kvd waits for the rest of a body while its sender leaves after a while."""
        kvd = draw.choice(self._kvds)
        body = msgspec.json.encode({"hashes": []}) + b" " * 40
        head = http_head("POST", "/v1/match", self._key, length=len(body))
        place = place_of(kvd.http)
        await self._network.deed(kind, place, _bytes_of(head, body), ANSWER_S, every_s=0.5)

    async def _no_key(self, kind: str, draw: random.Random) -> None:
        path = draw.choice(("/v1/stats", "/v1/events?since=-1", "/metrics", "/v1/role"))
        pieces = http_request("GET", path, draw.choice((None, "x" * 64)))
        place = place_of(draw.choice(self._kvds).http)
        if await self._network.deed(kind, place, pieces, ANSWER_S) == "HTTP 200":
            self._network.census.record_failure(kind, PermissionError(f"{path} is open"))

    # Frames ---------------------------------------------------------------------------------------

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
        await self._data(kind, draw, _bytes_of(_GREETING, frame), every_s=0.3)

    async def _no_grant(self, kind: str, draw: random.Random) -> None:
        frames = _frames(draw.randbytes(16), draw.randbytes(16), draw)
        await self._data(kind, draw, [_GREETING, draw.choice(frames)])

    async def _damaged_frames(self, kind: str, draw: random.Random) -> None:
        """Frames of a transfer that was granted: another manifest, data before it, damaged
        bytes."""
        kvd = draw.choice(self._kvds)
        grant = await self._grant(kvd, draw)
        if grant is None:
            return
        transfer = uuid.UUID(grant.transfer_id).bytes
        frames = _frames(transfer, auth_of(grant.token), draw)
        sent = [mutate_bytes(f, draw) if draw.random() < 0.7 else f for f in frames]
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
                    writer.write(piece)
                async with asyncio.timeout(5.0):
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
        await self._data(kind, draw, [_GREETING, *[frame] * draw.choice((1, 8))])


_SOURCES = (
    "http://127.0.0.66:9",
    "http://127.0.0.66:9/#",
    "http://169.254.169.254:80",
    "file:///etc/passwd",
    "http://user:pw@127.0.0.1:1",
)
_IDS = ("unknown", "00000000-0000-0000-0000-000000000000", "%00", "x" * 3_000, "..%2f..")


def _reserves(body: bytes) -> bool:
    """Whether a damaged `OpenTransfer` is still a valid one: it would reserve memory, uncounted."""
    try:
        msgspec.json.decode(body, type=OpenTransfer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _bytes_of(head: bytes, slow: bytes) -> Iterator[bytes]:
    yield head
    for byte in slow:
        yield bytes([byte])


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
