"""A kvd in a separate process, and a gateway's requests to it."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from prfaas.cache.hashing import block_hashes
from prfaas.contracts.kvd_api import (
    EventPage,
    KvdReport,
    MatchPrefix,
    OpenTransfer,
    PoolReport,
    PrefixMatch,
    PrefixPulled,
    PullPrefix,
    TransferStatus,
    spec_of,
)
from prfaas.contracts.readiness import KvdReady, parse_readiness
from prfaas.kvspec import FullAttention, LinearState, SlidingWindow
from prfaas.types import Compat, Form, Grant, NotNow, TransferId
from tests.waiting import HANG_S

MEMORY_BYTES = 256 << 20
GRANT_S = 10.0
DISPATCH_S = 30.0


class HttpRefusal(Exception):
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class Kvd:
    def __init__(self, socket: Path, process: subprocess.Popen[str], url: str) -> None:
        self.socket = socket
        self.process = process
        self.url = url

    def report(self) -> KvdReport:
        return self._ask(KvdReport, "GET", "/v1/stats?check=1")

    def pool(self, form: Form = "native") -> PoolReport:
        """Of that form, or the only one."""
        pools = self.report().pools
        assert pools, "no engine has registered"
        return next((pool for pool in pools if pool.compat.form == form), pools[0])

    def compat(self, form: Form = "native") -> Compat:
        return self.pool(form).compat

    def open(
        self,
        prompt: list[int],
        tokens: int,
        compat: Compat,
        checkpoint_tokens: int | None = None,
        salt: str = "",
    ) -> Grant | NotNow:
        hashes = block_hashes(prompt[:tokens], compat.block_tokens, salt=salt)
        asked = OpenTransfer(tuple(hashes), tokens, compat, checkpoint_tokens)
        return self._ask(Grant | NotNow, "POST", "/v1/open", msgspec.json.encode(asked))

    def status(self, transfer_id: TransferId, wait_s: float = 0.0) -> TransferStatus:
        return self._ask(TransferStatus, "GET", f"/v1/transfers/{transfer_id}?wait_s={wait_s}")

    def abort(self, transfer_id: TransferId) -> None:
        self._ask(TransferStatus, "POST", f"/v1/transfers/{transfer_id}/abort", b"{}")

    def events(self, engine_id: str, since: int) -> EventPage:
        return self._ask(EventPage, "GET", f"/v1/events?node={engine_id}&since={since}")

    def pull(self, source: str, prompt: list[int], form: Form, salt: str) -> PrefixPulled:
        """Copies a prefix of whole blocks from the kvd at `source`."""
        compat = self.compat(form)
        hashes = tuple(block_hashes(prompt, compat.block_tokens, salt=salt))
        body = msgspec.json.encode(PullPrefix(source, hashes, compat=compat))
        return self._ask(PrefixPulled, "POST", "/v1/pull", body)

    def matched_tokens(self, prompt: list[int]) -> int:
        """How much of the prompt the kvd has, in any form."""
        return max(self._match(prompt, pool.compat).tokens for pool in self.report().pools)

    def handoff_bytes(self, tokens: int, skip_tokens: int = 0) -> int:
        """Of a hand-off at a block boundary: whole blocks."""
        pool = self.pool()
        total = 0
        for group in spec_of(pool.groups).groups:
            match group:
                case LinearState():
                    each = group.state_bytes
                case SlidingWindow():
                    first = group.first_token(tokens) // pool.block_tokens * pool.block_tokens
                    each = (tokens - first) * group.bytes_per_token
                case FullAttention():
                    each = (tokens - skip_tokens) * group.bytes_per_token
            total += len(group.layers) * each
        return total

    def idle(self) -> bool:
        """Nothing is held: no lease of an engine, no transfer under way in either direction, no
        page but those of prefixes that may be evicted."""
        report = self.report()
        busy = [report.incoming.get(key, 0) for key in ("granted", "committed", "attached")]
        busy += [report.outgoing.get("sending", 0), report.held_leases]
        for pool in report.pools:
            occupancy = pool.occupancy
            busy += [occupancy.leases, occupancy.used_pages - occupancy.idle_pages]
        return not any(busy)

    def _match(self, prompt: list[int], compat: Compat) -> PrefixMatch:
        hashes = tuple(block_hashes(prompt, compat.block_tokens))
        body = msgspec.json.encode(MatchPrefix(hashes, compat))
        return self._ask(PrefixMatch, "POST", "/v1/match", body)  # type: ignore[no-any-return]

    def _ask(self, kind: Any, method: str, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self.url + path, data=body, method=method)
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


def start(
    socket: Path,
    memory_bytes: int = MEMORY_BYTES,
    *,
    grant_s: float = GRANT_S,
    dispatch_s: float = DISPATCH_S,
    options: Sequence[str] = (),
) -> Kvd:
    process = subprocess.Popen(
        [sys.executable, "-m", "prfaas", "kvd", "--socket", str(socket)]
        + ["--memory", str(memory_bytes)]
        + ["--set", f"kvd.timeouts.grant_s={grant_s}"]
        + ["--set", f"kvd.timeouts.dispatch_s={dispatch_s}", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = parse_readiness(process.stdout.readline(), KvdReady)
    assert ready is not None, "the kvd did not start"
    return Kvd(socket, process, ready.http)


def stop(running_kvd: Kvd) -> None:
    process = running_kvd.process
    process.kill()
    process.wait(HANG_S)
    assert process.stdout is not None
    process.stdout.close()
