"""A prefill server and a decode server with their kvds, and the gateway's part between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prfaas.types import Grant, TransferId
from tests.vllm import kvds
from tests.vllm.reference import Generated
from tests.vllm.servers import Answer, VllmServer, await_health, vllm_server

PATIENCE_S = 60.0


@dataclass(slots=True)
class Pair:
    prefill: VllmServer
    decode: VllmServer
    source: kvds.Kvd  # the prefill server's
    target: kvds.Kvd  # the decode server's

    def grant(self, prompt: list[int], tokens: int) -> Grant:
        grant = self.target.open(prompt, tokens, self.source.compat())
        assert isinstance(grant, Grant), grant
        return grant

    def run_prefill(self, prompt: list[int], tokens: int, grant: Grant) -> Answer:
        params = {
            "do_remote_decode": True,
            "grant": msgspec.to_builtins(grant),
            "handoff_tokens": tokens,
        }
        return self.prefill.complete(prompt, 1, kv_transfer_params=params)

    def hand_off(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Committed at the decode side's kvd; its parameters."""
        grant = self.grant(prompt, tokens)
        params = self.run_prefill(prompt, tokens, grant).transfer
        assert params["do_remote_prefill"], params
        status = self.target.status(grant.transfer_id, wait_s=PATIENCE_S)
        assert status.state == "committed", status
        return params

    def resume(self, prompt: list[int], max_tokens: int, transfer_id: str) -> Answer:
        params = {"do_remote_prefill": True, "transfer_id": transfer_id}
        return self.decode.complete(prompt, max_tokens, kv_transfer_params=params)

    def generate(self, prompt: list[int], handoff_tokens: int, max_tokens: int) -> Generated:
        """The whole way of an offloaded request."""
        params = self.hand_off(prompt, handoff_tokens)
        return self.resume(prompt, max_tokens, params["transfer_id"]).generated

    def sent_bytes(self, params: dict[str, Any]) -> int:
        return self.target.status(TransferId(params["transfer_id"])).nbytes

    def nothing_held(self) -> bool:
        """Pages and blocks are back on both sides."""
        servers = (self.prefill, self.decode)
        usage = sum(server.metric("vllm:kv_cache_usage_perc") for server in servers)
        return usage == 0 and self.source.idle() and self.target.idle()


@contextmanager
def pair(directory: Path, model: Path, flags: list[str]) -> Iterator[Pair]:
    with ExitStack() as stack:
        source = kvds.start(directory / "p.kvd")
        target = kvds.start(directory / "d.kvd")
        servers = [
            stack.enter_context(
                vllm_server(directory, name, model, kvd.socket, core=core, flags=flags)
            )
            for core, (name, kvd) in enumerate((("p", source), ("d", target)))
        ]
        await_health(*servers)
        both = Pair(servers[0], servers[1], source, target)
        try:
            yield both
        finally:  # tests of faults replace them
            kvds.stop(both.source)
            kvds.stop(both.target)
