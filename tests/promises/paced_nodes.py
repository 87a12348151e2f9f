"""Stand-in nodes of a gateway's backend, all in this process, whose prefills take a given time."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from tests.benches import bench

null_node = bench("_null_node")
_TRANSFERS = b"/v1/transfers/"


class Transfers:
    """Hand-offs between the nodes: each has arrived when its prefill has ended."""

    def __init__(self) -> None:
        self._arrivals: dict[bytes, asyncio.Future[None]] = {}

    def arrival(self, transfer: bytes) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        return self._arrivals.setdefault(transfer, loop.create_future())


class PacedHost(null_node.Host):  # type: ignore[misc]
    """A node that prefills one prompt after the other, each in `prefill_s`. Everything else it
    answers after a millisecond or two, as processes do: two nodes do not report in step."""

    def __init__(self, name: str, port: int, transfers: Transfers) -> None:
        super().__init__(name, port)
        self.prefill_s = 0.0
        self.prefills: list[tuple[float, float]] = []  # when each began, and when it ends
        self._transfers = transfers
        self._random = random.Random(name)

    def pending(self, path: bytes, body: bytes) -> asyncio.Future[None] | None:
        if path.startswith(_TRANSFERS) and not path.endswith(b"/abort"):
            return self._transfers.arrival(path.removeprefix(_TRANSFERS).partition(b"?")[0])
        streams, handed_off = b'"stream":true' in body, b'"kv_transfer_params"' in body
        if path != b"/v1/completions" or (streams and handed_off):
            soon: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            soon.get_loop().call_later(self._random.uniform(0.5e-3, 2e-3), soon.set_result, None)
            return soon
        found = re.search(rb'"transfer_id":"([^"]+)"', body)
        end = self._transfers.arrival(found[1] if found else b"alone " + body)
        loop = asyncio.get_running_loop()
        begun_s = max([loop.time(), *(end_s for _, end_s in self.prefills[-1:])])
        self.prefills.append((begun_s, begun_s + self.prefill_s))
        loop.call_at(begun_s + self.prefill_s, end.set_result, None)
        return end


@asynccontextmanager
async def paced_nodes(
    names: Sequence[str],
) -> AsyncIterator[tuple[dict[str, PacedHost], list[dict[str, str]]]]:
    """The nodes by name, of which `prefill_s` may be changed, and their entries of a deployment."""
    loop = asyncio.get_running_loop()
    nodes: dict[str, PacedHost] = {}
    entries = []
    transfers = Transfers()
    async with AsyncExitStack() as stack:
        for name in names:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listening.getsockname()[1]  # which the node's answers contain
            nodes[name] = PacedHost(name, port, transfers)
            made: Any = partial(null_node.Http, nodes[name])
            server = await loop.create_server(made, sock=listening)
            stack.callback(server.close)
            url = f"http://127.0.0.1:{port}"
            entries.append({"url": url, "kvd_url": url})
        yield nodes, entries
