"""A real vLLM server that accepts embeddings: what it cannot hand off gets an error, and the server
lives."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.types import Grant
from prfaas_lab.testing.vllm_server import VllmServer, await_health
from tests.vllm import kvds
from tests.vllm.cases import UNCACHED
from tests.vllm.pairs import decode_params, prefill_params
from tests.vllm.servers import connected_server
from tests.waiting import wait_until

pytestmark = [pytest.mark.grid, pytest.mark.timeout(900)]  # a server starts and stops within it
TOKENS = 40


@dataclass(frozen=True)
class Served:
    kvd: kvds.Kvd
    server: VllmServer

    def complete(self, params: dict[str, Any] | None, embeds: str | None) -> Any:
        prompt = {"prompt": [7] * TOKENS} if embeds is None else {"prompt_embeds": embeds}
        body = {"model": "m", "max_tokens": 1, "kv_transfer_params": params, **prompt}
        return self.server.post("/v1/completions", body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("embeds")
    make_checkpoint(folder / "model", "gemma3")
    with kvds.kvd(folder / "kvd") as kvd:
        flags = [*UNCACHED, "--enable-prompt-embeds"]
        server = connected_server(folder, "s", folder / "model", kvd.socket, core=0, flags=flags)
        try:
            await_health(server)
            yield Served(kvd, server)
        finally:
            server.stop()


def hidden_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["hidden_size"])


@pytest.fixture(scope="module")
def embeds(served: Served) -> str:
    model = served.kvd.socket.parent / "model"
    data = io.BytesIO()
    torch.save(torch.randn(TOKENS, hidden_size(model)), data)
    return base64.b64encode(data.getvalue()).decode()


@pytest.mark.parametrize("kind", ["prefill", "malformed", "decode"])
def test_embeddings_with_a_hand_off_get_an_error_and_the_engine_lives(
    served: Served, embeds: str, kind: str
) -> None:
    plain = served.complete(None, embeds)
    assert plain.status == 200, plain.body
    compat = served.kvd.compat()
    grant = served.kvd.open([7] * TOKENS, TOKENS, compat)
    assert isinstance(grant, Grant), grant
    params = {
        "prefill": prefill_params(TOKENS, grant),
        "malformed": {"do_remote_decode": True},
        "decode": decode_params(grant.transfer_id),
    }[kind]
    answer = served.complete(params, embeds)
    if kind == "decode":
        assert answer.status == 500
    else:
        assert answer.transfer["error"]["code"] == "invalid_request", answer.body
    served.kvd.abort(grant.transfer_id)
    assert served.server.healthy() and served.server.process.poll() is None
    assert served.complete(None, None).status == 200
    wait_until(lambda: served.kvd.idle() and served.server.idle())
