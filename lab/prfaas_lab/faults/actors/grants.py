"""Grants of the hostile peer kvd: few and small, so that they do not take the memory of others."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec

from prfaas.contracts.kvd_api import KvdReport, OpenTransfer
from prfaas.types import Compat, Grant, TransferId
from prfaas_lab.faults.actors.connections import Network, http_request, place_of, write
from prfaas_lab.faults.actors.situation import KvdPlace

GRANT_S = 60.0  # a grant that is not used ends after this (`kvd.timeouts.grant_s`)
MOST_GRANTS = 4  # of one kvd at a time
GRANT_BLOCKS = 2
ANSWER_S = 60.0  # for the answer of a kvd
_REPORT = msgspec.json.Decoder(KvdReport)


class Grants:
    """Opens transfers at the kvds, and remembers their grants."""

    def __init__(self, network: Network, key: str, kvds: list[KvdPlace]) -> None:
        self._network = network
        self._key = key
        self._kvds = kvds
        self._compat: dict[str, Compat] = {}
        self._granted: dict[str, deque[tuple[float, Grant]]] = {
            kvd.http: deque(maxlen=MOST_GRANTS) for kvd in kvds
        }

    async def request(self, kvd: KvdPlace, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of a valid request's answer, read to its end. Raises OSError, TimeoutError."""
        place = place_of(kvd.http)
        async with self._network.connection(place) as (reader, writer), asyncio.timeout(ANSWER_S):
            write(writer, b"".join(http_request(method, path, self._key, body)))
            return (await reader.read(-1)).partition(b"\r\n\r\n")[2]

    async def compat_of(self, kvd: KvdPlace) -> Compat | None:
        """The format of the kvd's engine, which a member may know."""
        if kvd.http not in self._compat:
            try:
                report = _REPORT.decode(await self.request(kvd, "GET", "/v1/stats"))
            except msgspec.MsgspecError:
                return None  # the kvd is starting
            if report.pool is None:
                return None
            self._compat[kvd.http] = report.pool.compat
        return self._compat[kvd.http]

    async def grant(self, kvd: KvdPlace, draw: random.Random) -> Grant | None:
        """A grant of this kvd: one that it has, or a new one while it has few."""
        known = self._granted[kvd.http]
        now_s = time.monotonic()
        while known and now_s - known[0][0] > GRANT_S + 5.0:
            known.popleft()
        if len(known) >= MOST_GRANTS:
            return draw.choice(known)[1]
        compat = await self.compat_of(kvd)
        if compat is None:
            return None
        body = msgspec.json.encode(open_body(compat, draw))
        try:
            answer = msgspec.json.decode(
                await self.request(kvd, "POST", "/v1/open", body), type=Grant
            )
        except msgspec.MsgspecError:
            self._compat.pop(kvd.http, None)
            return None  # no room, or another engine
        known.append((now_s, answer))
        return answer

    async def abort_all(self) -> None:
        """Aborts the grants of the last minute, so that the end of a soak need not wait for them.
        Older ones were abandoned."""
        for kvd, known in zip(self._kvds, self._granted.values(), strict=True):
            for _, grant in known:
                with suppress(OSError):
                    await self.request(kvd, "POST", f"/v1/transfers/{grant.transfer_id}/abort")


def open_body(compat: Compat, draw: random.Random) -> dict[str, Any]:
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
