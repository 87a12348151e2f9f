"""A kvd in a process of its own, and what a gateway asks it."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from prfaas.cache.hashing import block_hashes
from prfaas.kvd.events import EventPage
from prfaas.kvd.incoming import TransferStatus
from prfaas.kvd.report import Report
from prfaas.types import Compat, Grant, NotNow, OpenTransfer, TransferId

MEMORY_BYTES = 256 << 20
GRANT_S = 10.0


class HttpRefusal(Exception):
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class Kvd:
    def __init__(self, socket: Path, process: subprocess.Popen[str], url: str) -> None:
        self.socket = socket
        self.process = process
        self._url = url

    def report(self) -> Report:
        return self._ask(Report, "GET", "/v1/stats?check=1")

    def compat(self) -> Compat:
        pool = self.report().pool
        assert pool is not None, "no engine has registered"
        return pool.compat

    def open(
        self,
        prompt: list[int],
        tokens: int,
        compat: Compat,
        checkpoint_tokens: int | None = None,
    ) -> Grant | NotNow:
        hashes = block_hashes(prompt[:tokens], compat.block_tokens)
        asked = OpenTransfer(tuple(hashes), tokens, compat, checkpoint_tokens)
        return self._ask(Grant | NotNow, "POST", "/v1/open", msgspec.json.encode(asked))

    def status(self, transfer_id: TransferId, wait_s: float = 0.0) -> TransferStatus:
        return self._ask(TransferStatus, "GET", f"/v1/transfers/{transfer_id}?wait_s={wait_s}")

    def abort(self, transfer_id: TransferId) -> None:
        self._ask(TransferStatus, "POST", f"/v1/transfers/{transfer_id}/abort", b"{}")

    def stored(self, engine_id: str) -> set[bytes]:
        """Names of the blocks that the engine has reported as cached."""
        page = self._ask(EventPage, "GET", f"/v1/events?node={engine_id}&since=0")
        return {name for event in page.events for name in event.hashes if event.action == "stored"}

    def idle(self) -> bool:
        """Nothing is held: no lease of an engine, no transfer under way in either direction."""
        report = self.report()
        busy = [report.incoming.get(key, 0) for key in ("granted", "committed", "attached")]
        return report.held_leases == 0 and not any(busy) and not report.outgoing.get("sending", 0)

    def _ask(self, kind: Any, method: str, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, data=body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=90) as response:
                return msgspec.json.decode(response.read(), type=kind)
        except urllib.error.HTTPError as error:
            with error:
                raise HttpRefusal(error.code, msgspec.json.decode(error.read())) from None


@contextmanager
def kvd(socket: Path, memory_bytes: int = MEMORY_BYTES) -> Iterator[Kvd]:
    process = start(socket, memory_bytes)
    try:
        yield process
    finally:
        stop(process)


def start(socket: Path, memory_bytes: int = MEMORY_BYTES) -> Kvd:
    process = subprocess.Popen(
        [sys.executable, "-m", "prfaas", "kvd", "--socket", str(socket)]
        + ["--memory", str(memory_bytes), "--grant-s", str(GRANT_S)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    where = process.stdout.readline()
    assert " http " in where, "the kvd did not start"
    return Kvd(socket, process, where.split(" http ")[1].strip())


def stop(running_kvd: Kvd) -> None:
    process = running_kvd.process
    process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()
