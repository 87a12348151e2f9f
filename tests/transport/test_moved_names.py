"""Peers that are reached by a name, which then names another address."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import pytest

from prfaas.http_client import client
from prfaas.http_client.client import open_client
from prfaas.http_client.connection_pool import IDLE_S
from prfaas.transport.link import TransferLink
from prfaas.transport.listener import Listener
from tests.transport.ends import Owner, expect, nothing_leaks, segments, send
from tests.waiting import PATIENCE_S

NAME = "kvd.example.net"
CONTENTS = segments(300_000, 5)
BEFORE, AFTER = "127.0.0.1", "127.0.0.2"


class Names:
    """What the name service says of `NAME`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address = BEFORE
        resolve = socket.getaddrinfo

        def answer(host: Any, *more: Any, **options: Any) -> Any:
            return resolve(self.address if host == NAME else host, *more, **options)

        monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def deliver(listener: Listener, link: TransferLink) -> None:
    owner = Owner()
    send(link, expect(listener, CONTENTS, owner), CONTENTS).done.result(PATIENCE_S)
    assert owner.wait() is None
    assert owner.memory == CONTENTS


def test_a_link_follows_its_name_once_the_old_address_is_gone(names: Names) -> None:
    with nothing_leaks():
        before = Listener(BEFORE)
        port = before.address.port
        with before, TransferLink((NAME, port)) as link:
            deliver(before, link)
            before.close()
            names.address = AFTER
            with Listener(AFTER, port) as after:
                deliver(after, link)


async def test_calls_follow_the_name_once_the_connection_to_the_old_address_is_idle(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both servers answer, and keep their connections. The client ends its own."""
    assert IDLE_S == 4.0, "as docs/faults.md says"
    monkeypatch.setattr(client, "IDLE_S", 0.05)
    asked: list[str] = []
    ended = {BEFORE: asyncio.Event(), AFTER: asyncio.Event()}

    def serve(address: str) -> Any:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    asked.append(address)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            ended[address].set()
            writer.close()

        return answer

    before = await asyncio.start_server(serve(BEFORE), BEFORE, 0)
    port = before.sockets[0].getsockname()[1]
    after = await asyncio.start_server(serve(AFTER), AFTER, port)
    url = f"http://{NAME}:{port}/x"
    async with before, after, asyncio.timeout(PATIENCE_S):
        async with open_client() as http:
            assert await http.request("GET", url, timeout_s=PATIENCE_S) == b"ok"
            names.address = AFTER
            await ended[BEFORE].wait()
            assert await http.request("GET", url, timeout_s=PATIENCE_S) == b"ok"
        await ended[AFTER].wait()
    assert asked == [BEFORE, AFTER]
