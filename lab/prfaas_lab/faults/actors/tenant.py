"""The hostile tenant: everything that a client with a valid key can do to a gateway."""

from __future__ import annotations

import asyncio
import random
import re
import time
from itertools import count
from typing import cast

from prfaas.config.gateway import GatewayTimeouts
from prfaas_lab.faults.actors import bodies
from prfaas_lab.faults.actors.connections import (
    OVERDUE,
    Network,
    byte_by_byte,
    http_head,
    http_request,
    place_of,
    write,
)
from prfaas_lab.faults.actors.lanes import Lane

COMPLETIONS, TOKENIZE = "/v1/completions", "/tokenize"
_TIMEOUTS = GatewayTimeouts()
MARGIN_S = 30.0  # of a busy machine
REFUSED_S = _TIMEOUTS.body_s + MARGIN_S  # for the answer to a body that is refused
SLOW_S = _TIMEOUTS.body_s + MARGIN_S  # until a request that does not arrive is given up
SERVED_S = _TIMEOUTS.queue_s + 120.0  # for a valid request
# The tail of a request arrives this slowly.
BYTE_EVERY_S = 0.5
AT_ONCE = {bodies.BRACKETS: 2}  # of a kind of body; one of each other kind
# Of a kind of request that asks for much work in few bytes.
WORK_AT_ONCE = {
    bodies.GRAMMAR: 4,
    bodies.STOPS: 4,
    bodies.SEQUENCES: 2,
    bodies.TOKENIZE: 8,
}
COMPRESSED_AT_ONCE = 3
IDLE = "tenant: idle connections"
IDLE_AT_ONCE = 64
BURST = 100  # short requests on one connection
UNREAD_S = 20.0  # a client that does not read its stream goes away after this
UNREAD_TOKENS = 400
STAYS_S = 1.5  # a client that leaves does so within this
_LENGTH = re.compile(rb"content-length: ([0-9]+)", re.IGNORECASE)


class HostileTenant:
    def __init__(
        self, network: Network, gateways: list[str], key: str, model: str, max_tokens: int
    ) -> None:
        self._network = network
        self._gateways = [place_of(url) for url in gateways]
        self._key = key
        self._model = model
        self._max_tokens = max_tokens
        self._numbers = count()
        self._bodies: dict[str, list[bytes]] = {}
        self._longest = (b"", b"")
        self._compressed = b""

    def prepare(self) -> None:
        """Makes the bodies, which takes seconds. They are kept."""
        self._bodies = bodies.refused_bodies(self._model, self._max_tokens)
        self._longest = bodies.long_prompt(self._model, self._max_tokens - 2)
        self._compressed = bodies.compressed_text(self._model)

    @property
    def lanes(self) -> list[Lane]:
        return [
            *(Lane(kind, self._refused_body, AT_ONCE.get(kind, 1)) for kind in self._bodies),
            *(Lane(kind, self._work, at_once) for kind, at_once in WORK_AT_ONCE.items()),
            Lane(bodies.COMPRESSED, self._compressed_text, COMPRESSED_AT_ONCE),
            Lane(IDLE, self._silent, IDLE_AT_ONCE),
            Lane("tenant: odd framing", self._framing),
            Lane("tenant: long headers", self._headers),
            Lane("tenant: wrong key", self._wrong_key),
            Lane("tenant: another's path", self._other_path),
            Lane("tenant: slow body", self._slow_body, 8),
            Lane("tenant: slow head", self._slow_head, 8),
            Lane("tenant: silent connection", self._silent, 8),
            Lane("tenant: short requests", self._burst, 4),
            Lane("tenant: long valid prompt", self._long_prompt, 4),
            Lane("tenant: leaves", self._leave, 4),
            Lane("tenant: does not read", self._unread, 4),
        ]

    async def _refused_body(self, kind: str, draw: random.Random) -> None:
        """A whole request whose body is made to hurt."""
        body = draw.choice(self._bodies[kind])
        lines = ["Content-Encoding: gzip"] if kind == bodies.BOMB else []
        head = http_head("POST", COMPLETIONS, self._key, *lines, length=len(body))
        await self._network.deed(kind, draw.choice(self._gateways), [head, body], REFUSED_S)

    # Much work in few bytes -----------------------------------------------------------------------

    async def _work(self, kind: str, draw: random.Random) -> None:
        body = bodies.work_body(kind, self._model, draw, f"work {next(self._numbers)}")
        path = TOKENIZE if kind == bodies.TOKENIZE else COMPLETIONS
        pieces = [http_head("POST", path, self._key, length=len(body)), body]
        await self._network.deed(kind, draw.choice(self._gateways), pieces, SERVED_S)

    async def _compressed_text(self, kind: str, draw: random.Random) -> None:
        head = http_head(
            "POST", COMPLETIONS, self._key, "Content-Encoding: gzip", length=len(self._compressed)
        )
        pieces = [head, self._compressed]
        await self._network.deed(kind, draw.choice(self._gateways), pieces, REFUSED_S)

    # Framing, headers and keys --------------------------------------------------------------------

    async def _framing(self, kind: str, draw: random.Random) -> None:
        """Chunks of one byte, a length that is wrong, two lengths, several requests at once."""
        place, key = draw.choice(self._gateways), self._key
        body = bodies.short_prompt(self._model, "framing")
        pieces = draw.choice(
            (
                [
                    http_head("POST", COMPLETIONS, key, "Transfer-Encoding: chunked"),
                    b"".join(b"1;x=%b\r\n%c\r\n" % (b"y" * 100, byte) for byte in body),
                    b"0\r\n\r\n",
                ],
                [http_head("POST", COMPLETIONS, key, length=len(body) // 2), body],
                [
                    http_head("POST", COMPLETIONS, key, "Content-Length: 5", length=len(body)),
                    body,
                ],
                [http_head("POST", COMPLETIONS, key, length=-1), body],
                [http_head("POST", COMPLETIONS, key, length=10**20)],
                [draw.randbytes(2_000)],
                http_request("PRI", "*", key),
            )
        )
        await self._network.deed(kind, place, pieces, SLOW_S)

    async def _headers(self, kind: str, draw: random.Random) -> None:
        lines = draw.choice(
            (
                ["X-Long: " + "x" * 200_000],
                [f"X-{n}: {n}" for n in range(20_000)],
                ["X-Request-Id: " + "\x01" * 200],
                ["Content-Encoding: gzip, gzip, gzip"],
                ["Expect: 200-maybe"],
            )
        )
        body = bodies.short_prompt(self._model, "headers")
        head = http_head("POST", COMPLETIONS, self._key, *lines, length=len(body))
        await self._network.deed(kind, draw.choice(self._gateways), [head, body], REFUSED_S)

    async def _wrong_key(self, kind: str, draw: random.Random) -> None:
        wrong = draw.choice((None, "", "x" * 60_000, self._key[:-1], "\x00", "\udcff"))
        pieces = http_request("POST", COMPLETIONS, wrong, bodies.short_prompt(self._model, "key"))
        await self._network.deed(kind, draw.choice(self._gateways), pieces, REFUSED_S)

    async def _other_path(self, kind: str, draw: random.Random) -> None:
        """Paths of the operator and of members, with the tenant's key."""
        method, path = draw.choice(
            (
                ("GET", "/prfaas/v1/state"),
                ("GET", "/prfaas/v1/plan"),
                ("GET", "/metrics"),
                ("POST", "/prfaas/v1/explain"),
                ("POST", "/prfaas/v1/register"),
                ("GET", "/v1/models/" + "x" * 5_000),
                ("GET", "/v1/../prfaas/v1/state"),
            )
        )
        pieces = http_request(method, path, self._key, b"{}")
        answer = await self._network.deed(kind, draw.choice(self._gateways), pieces, REFUSED_S)
        if answer == "HTTP 200":
            self._network.census.record_failure(kind, PermissionError(f"{path} is open"))

    # Slow clients ---------------------------------------------------------------------------------

    async def _slow_body(self, kind: str, draw: random.Random) -> None:
        body = bodies.short_prompt(self._model, "slow" * 200)
        head = http_head("POST", COMPLETIONS, self._key, length=len(body))
        place = draw.choice(self._gateways)
        await self._network.deed(
            kind, place, byte_by_byte(head, body), SLOW_S, every_s=BYTE_EVERY_S
        )

    async def _slow_head(self, kind: str, draw: random.Random) -> None:
        head = http_head("POST", COMPLETIONS, self._key, "X: " + "x" * 2_000, length=2)
        place = draw.choice(self._gateways)
        await self._network.deed(kind, place, byte_by_byte(b"", head), SLOW_S, every_s=0.5)

    async def _silent(self, kind: str, draw: random.Random) -> None:
        await self._network.deed(kind, draw.choice(self._gateways), [b""], SLOW_S)

    # Valid requests -------------------------------------------------------------------------------

    async def _burst(self, kind: str, draw: random.Random) -> None:
        """Many short requests on one connection, each after the answer to the previous one."""
        network, began_s = self._network, time.monotonic()
        async with network.connection(draw.choice(self._gateways)) as (reader, writer):
            for _ in range(BURST):
                await network.budget.turn()
                salt = f"burst {next(self._numbers)}"
                body = bodies.short_prompt(
                    self._model if draw.random() < 0.5 else "no-such-model", salt
                )
                head = http_head("POST", COMPLETIONS, self._key, length=len(body))
                write(writer, head.replace(b"Connection: close\r\n", b"") + body)
                began_s = time.monotonic()
                try:
                    async with asyncio.timeout(SERVED_S):
                        answer = await reader.readuntil(b"\r\n\r\n")
                        found = _LENGTH.search(answer)
                        await reader.readexactly(int(found[1]) if found else 0)
                except TimeoutError:
                    network.census.record(kind, OVERDUE, time.monotonic() - began_s, overdue=True)
                    return
                status = answer[9:12].decode(errors="replace")
                network.census.record(kind, f"HTTP {status}", time.monotonic() - began_s)

    async def _long_prompt(self, kind: str, draw: random.Random) -> None:
        place = draw.choice(self._gateways)
        await self._network.deed(kind, place, self._valid_long(), SERVED_S)

    def _valid_long(self) -> list[bytes]:
        head, tail = self._longest
        salt = str(next(self._numbers)).encode()
        nbytes = len(head) + len(salt) + len(tail)
        return [http_head("POST", COMPLETIONS, self._key, length=nbytes), head, salt, tail]

    async def _leave(self, kind: str, draw: random.Random) -> None:
        network, stays_s = self._network, draw.uniform(0.0, STAYS_S)
        async with network.connection(draw.choice(self._gateways)) as (_, writer):
            for piece in self._valid_long():
                await network.budget.turn()
                write(writer, piece)
            await asyncio.sleep(stays_s)
        network.census.record(kind, "left", stays_s)

    async def _unread(self, kind: str, draw: random.Random) -> None:
        """The stream's bytes fill the buffers of both ends. The client then goes away."""
        network = self._network
        body = bodies.short_prompt(
            self._model, f"unread {next(self._numbers)}", UNREAD_TOKENS, stream=True
        )
        place = draw.choice(self._gateways)
        async with network.connection(place, receive_bytes=2_048) as (_, writer):
            cast(asyncio.Transport, writer.transport).pause_reading()
            write(writer, http_head("POST", COMPLETIONS, self._key, length=len(body)) + body)
            await asyncio.sleep(UNREAD_S)
        network.census.record(kind, "left", UNREAD_S)
