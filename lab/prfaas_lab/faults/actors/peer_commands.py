"""The hostile peer kvd at the HTTP APIs of kvds: damaged commands.

A valid command of a member is conceded (docs/security.md), so this actor sends none that reads KV,
assigns a role or reserves much memory.
"""

from __future__ import annotations

import random
import uuid

import msgspec

from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.types import Compat, Grant, TransferId
from prfaas_lab.faults.actors.connections import (
    Network,
    byte_by_byte,
    http_head,
    http_request,
    place_of,
)
from prfaas_lab.faults.actors.grants import ANSWER_S, GRANT_BLOCKS, Grants, open_body
from prfaas_lab.faults.actors.lanes import Lane
from prfaas_lab.faults.actors.situation import KvdPlace
from prfaas_lab.testing.hostile import mutate_json

LONG_POLL_S = 90.0
MOST_HASHES = 170_000  # more do not fit into a body that a kvd reads
_SOURCES = (
    "http://127.0.0.66:9",
    "http://127.0.0.66:9/#",
    "http://169.254.169.254:80",
    "file:///etc/passwd",
    "http://user:pw@127.0.0.1:1",
)
_IDS = ("unknown", "00000000-0000-0000-0000-000000000000", "%00", "x" * 3_000, "..%2f..")


class PeerCommands:
    def __init__(self, network: Network, key: str, kvds: list[KvdPlace], grants: Grants) -> None:
        self._network = network
        self._key = key
        self._kvds = kvds
        self._grants = grants
        self._hashes_body = b""

    def prepare(self) -> None:
        """Makes the long body, which is kept."""
        one = msgspec.json.encode(msgspec.to_builtins(b"h" * 32))
        self._hashes_body = b'{"hashes":[' + b",".join([one] * MOST_HASHES) + b"]}"

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
        ]

    async def _abandon(self, kind: str, draw: random.Random) -> None:
        """A grant whose transfer never begins."""
        grant = await self._grants.grant(draw.choice(self._kvds), draw)
        self._network.census.record(kind, "refused" if grant is None else "granted", 0.0)

    async def _command(self, kind: str, draw: random.Random) -> None:
        kvd = draw.choice(self._kvds)
        compat = await self._grants.compat_of(kvd) or Compat("m", "1", "x", "x", 64, "canonical")
        names = [msgspec.to_builtins(draw.randbytes(32)) for _ in range(GRANT_BLOCKS)]
        grant = Grant(TransferId(str(uuid.uuid4())), "token", "127.0.0.66:9", {}, 1 << 20, 5.0)
        path, body = draw.choice(
            (
                ("/v1/open", open_body(compat, draw)),
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

    async def _many(self, kind: str, draw: random.Random) -> None:
        """As many block names as fit into one request."""
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
        await self._network.deed(kind, place, byte_by_byte(head, body), ANSWER_S, every_s=0.5)

    async def _no_key(self, kind: str, draw: random.Random) -> None:
        path = draw.choice(("/v1/stats", "/v1/events?since=-1", "/metrics", "/v1/role"))
        pieces = http_request("GET", path, draw.choice((None, "x" * 64)))
        place = place_of(draw.choice(self._kvds).http)
        if await self._network.deed(kind, place, pieces, ANSWER_S) == "HTTP 200":
            self._network.census.record_failure(kind, PermissionError(f"{path} is open"))


def _reserves(body: bytes) -> bool:
    """Whether a damaged `OpenTransfer` is still a valid one: it would reserve memory, uncounted."""
    try:
        msgspec.json.decode(body, type=OpenTransfer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True
