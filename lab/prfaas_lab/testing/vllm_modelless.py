"""An engine without a model: it records the states that arrive at its kvd, and sends recorded ones.

What it sees is what travels: the bytes of committed transfers, not the blocks of the engine that
sends them. What it sends may be damaged or mislabelled on purpose.
"""

from __future__ import annotations

import secrets
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from prfaas.cache.hashing import block_hashes, tail_hash
from prfaas.contracts.kvd_api import OpenTransfer, PoolReport, TransferStatus, spec_of
from prfaas.engine.chunks import resume_segments
from prfaas.errors import TransferFailed
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import WriteLease
from prfaas.kvd.engine_socket.messages import SegmentName
from prfaas.kvspec import Segment
from prfaas.types import Grant, NotNow
from prfaas_lab.testing.vllm_server import VllmServer

COMMIT_S = 60.0
Recorded: TypeAlias = dict[Segment, bytes]  # one state of a model, by segment


class ModellessEngine:
    """Registered at the kvd of this socket and URL with the format of `pool`, which is another
    engine's."""

    def __init__(self, socket: Path, url: str, pool: PoolReport) -> None:
        self.spec = spec_of(pool.groups)
        self.compat = pool.compat
        self._url = url
        self._client = KvdClient(
            socket,
            engine_id="modelless",
            spec=self.spec,
            block_tokens=pool.block_tokens,
            compat=pool.compat,
        )

    def close(self) -> None:
        self._client.close()

    def record(self, server: VllmServer, prompt: list[int], tokens: int) -> Recorded:
        """The state after `tokens` tokens, as `server` computes and sends it. TransferFailed when
        the state does not arrive."""
        salt = secrets.token_hex(8)  # no pool has a part of the state
        hashes = tuple(block_hashes(prompt[:tokens], self.compat.block_tokens, salt=salt))
        body = msgspec.json.encode(OpenTransfer(hashes, tokens, self.compat))
        grant = self._ask("/v1/open", body, Grant | NotNow)
        if isinstance(grant, NotNow):
            raise TransferFailed(grant.reason)
        params = {"do_remote_decode": True, "grant": msgspec.to_builtins(grant)}
        params["handoff_tokens"] = tokens
        answer = server.complete(prompt, 1, kv_transfer_params=params, cache_salt=salt)
        if answer.status != 200:
            raise TransferFailed(f"the prefill failed: {answer.body}")
        path = f"/v1/transfers/{grant.transfer_id}?wait_s={COMMIT_S:g}"
        status = self._ask(path, None, TransferStatus)
        if status.state != "committed":
            raise TransferFailed(f"the transfer is {status.state}: {status.reason} {answer.body}")
        with self._client.attach(grant.transfer_id) as lease:
            return {
                segment: b"".join(lease.views(segment))
                for segment in resume_segments(self.spec, tokens)
            }

    def write(
        self,
        prompt: list[int],
        tokens: int,
        grant: Grant,
        salt: str,
        state: Mapping[Segment, bytes],
    ) -> WriteLease:
        """A lease with these bytes; no segment is reported as ready."""
        block_tokens = self.compat.block_tokens
        hashes = block_hashes(prompt[:tokens], block_tokens, salt=salt)
        tail = tail_hash(prompt[:tokens], hashes, block_tokens, salt=salt)
        lease = self._client.begin(hashes, tokens, checkpoint_tokens=(), grant=grant, tail=tail)
        if isinstance(lease, NotNow):
            raise TransferFailed(lease.reason)
        for segment, data in state.items():
            at = 0
            for view in lease.buffers(segment):
                view[:] = data[at : at + len(view)]
                at += len(view)
        return lease

    def report_ready(self, lease: WriteLease, names: Iterable[SegmentName]) -> None:
        """Past the client's own checks. Returns when the kvd has handled the reports."""
        connection = self._client._connected()
        for name in names:
            connection.ready(lease.ticket.lease_id, name)
        self._client.flush()

    def _ask(self, path: str, body: bytes | None, kind: Any) -> Any:
        request = urllib.request.Request(self._url + path, body)
        with urllib.request.urlopen(request, timeout=COMMIT_S + 30) as answer:
            return msgspec.json.decode(answer.read(), type=kind)
