"""A prefill server and a decode server with their kvds, and the gateway's part between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prfaas.types import Form, Grant, TransferId
from prfaas_lab.testing.vllm_server import Generated, VllmResponse, VllmServer, await_health
from tests.vllm import kvds
from tests.vllm.servers import connected_server
from tests.waiting import wait_until

PATIENCE_S = 60.0
# On a busy machine a kvd may need longer than the default to find a prefix.
SETTINGS = {"lookup_timeout_s": 10.0}


@dataclass(slots=True)
class Pair:
    """Tests of faults replace its members."""

    directory: Path
    model: Path
    flags: Sequence[str]
    source: kvds.Kvd  # the prefill server's
    target: kvds.Kvd  # the decode server's
    prefill: VllmServer
    decode: VllmServer

    # A gateway's part -----------------------------------------------------------------------------

    def grant(self, prompt: list[int], tokens: int) -> Grant:
        grant = self.target.open(prompt, tokens, self.source.compat())
        assert isinstance(grant, Grant), grant
        return grant

    def run_prefill(self, prompt: list[int], tokens: int, grant: Grant) -> VllmResponse:
        params = prefill_params(tokens, grant)
        return self.prefill.complete(prompt, 1, kv_transfer_params=params)

    def hand_off(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Committed at the decode side's kvd; its parameters."""
        return self.send(prompt, tokens, self.grant(prompt, tokens))

    def send(self, prompt: list[int], tokens: int, grant: Grant) -> dict[str, Any]:
        params = self.run_prefill(prompt, tokens, grant).transfer
        assert params["do_remote_prefill"], params
        status = self.target.status(grant.transfer_id, wait_s=PATIENCE_S)
        assert status.state == "committed", status
        return params

    def resume(self, prompt: list[int], max_tokens: int, transfer_id: str) -> VllmResponse:
        return self.decode.complete(
            prompt, max_tokens, kv_transfer_params=decode_params(transfer_id)
        )

    def generate(self, prompt: list[int], handoff_tokens: int, max_tokens: int) -> Generated:
        """The whole way of an offloaded request."""
        params = self.hand_off(prompt, handoff_tokens)
        return self.resume(prompt, max_tokens, params["transfer_id"]).generated

    def sent_bytes(self, params: dict[str, Any]) -> int:
        return self.target.status(TransferId(params["transfer_id"])).nbytes

    # What a test looks at, and breaks -------------------------------------------------------------

    def nothing_held(self) -> bool:
        """Pages and blocks are back on both sides."""
        ends = (self.prefill, self.decode, self.source, self.target)
        return all(end.idle() for end in ends)

    def restart_source(self, **options: Any) -> None:
        self.source = self._restarted(self.source, options)

    def restart_target(self, **options: Any) -> None:
        self.target = self._restarted(self.target, options)

    def start_engines(self) -> None:
        self.prefill, self.decode = _engines(
            self.directory, self.model, self.flags, self.source, self.target
        )
        await_health(self.prefill, self.decode)

    def _restarted(self, kvd: kvds.Kvd, options: dict[str, Any]) -> kvds.Kvd:
        forms = len(kvd.report().pools)
        kvds.stop(kvd)
        anew = kvds.start(kvd.socket, **options)
        # Its engine comes back by itself.
        wait_until(lambda: len(anew.report().pools) == forms)
        return anew


def prefill_params(tokens: int, grant: Grant) -> dict[str, Any]:
    return {
        "do_remote_decode": True,
        "grant": msgspec.to_builtins(grant),
        "handoff_tokens": tokens,
    }


def decode_params(transfer_id: str, form: Form = "native") -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": transfer_id, "form": form}


@contextmanager
def pair(directory: Path, model: Path, flags: Sequence[str]) -> Iterator[Pair]:
    source, target = (kvds.start(directory / f"{name}.kvd") for name in "pd")
    engines = _engines(directory, model, flags, source, target)
    both = Pair(directory, model, flags, source, target, *engines)
    try:
        await_health(both.prefill, both.decode)
        yield both
    finally:
        for server in (both.prefill, both.decode):
            server.stop()
        for kvd in (both.source, both.target):
            kvds.stop(kvd)


def _engines(
    directory: Path, model: Path, flags: Sequence[str], source: kvds.Kvd, target: kvds.Kvd
) -> tuple[VllmServer, VllmServer]:
    prefill, decode = (
        connected_server(
            directory, name, model, kvd.socket, core=core, flags=flags, settings=SETTINGS
        )
        for core, (name, kvd) in enumerate((("p", source), ("d", target)))
    )
    return prefill, decode
