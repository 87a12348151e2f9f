"""The deployments of `bench/turns.py` whose nodes are vLLM servers with PrfaasConnector, on a CPU.

Each node is a kvd and a vLLM server. The two servers of a deployment have a core each; those of the
other deployment share the cores and are idle meanwhile.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from _engine_rack import PROCESS_BYTES, Child, await_memory, await_server, end, post, say
from prfaas.contracts.readiness import KvdReady
from prfaas.launch.attached_process import PROGRAM, attached_prefix
from prfaas_lab.testing.vllm_configurations import transfer_config
from prfaas_lab.testing.vllm_server import start_vllm

ARCH = "falcon-h1"  # Mamba-2 and attention: vLLM computes it on a CPU
BLOCK_TOKENS = 128  # of vLLM's blocks, and of prefixes in either form
MAX_TOKENS = 16_384
# vLLM's Mamba kernels on a CPU cannot cut a chunk at a block boundary: one block at a time.
_FLAGS = (
    *("--max-model-len", str(MAX_TOKENS), "--max-num-batched-tokens", str(BLOCK_TOKENS)),
    *("--enable-prefix-caching", "--mamba-cache-mode", "align"),
    *("--block-size", str(BLOCK_TOKENS)),
)
_CACHE_BYTES = 256 << 20


class Node(NamedTuple):
    """An engine and its kvd."""

    url: str
    kvd_url: str


@contextmanager
def vllm_nodes(
    python: Path, model: Path, folder: Path, kvd_options: Sequence[str], *, keep: bool
) -> Iterator[tuple[Node, Node]]:
    """A prefill node and a decode node, when both serve."""
    with ExitStack() as stack:
        # Paths of sockets have at most about 100 characters.
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-")))
        await_memory(6 * PROCESS_BYTES, "a pair of vLLM servers")
        started = []
        for core, name in enumerate(("prefill", "decode")):
            say(f"starting {folder.name} {name}")
            socket = sockets / name
            kvd = Child(folder / f"{name}-kvd.log", "kvd", "--socket", str(socket), *kvd_options)
            stack.callback(kvd.stop)
            settings = {"block_tokens": BLOCK_TOKENS, "keep_answers": keep}
            log = folder / f"{name}.log"
            kvd_url = kvd.ready(KvdReady).http
            server = start_vllm(
                python,
                model,
                log,
                core=core,
                transfer=transfer_config(str(socket), **settings),
                flags=_FLAGS,
                cache_bytes=_CACHE_BYTES,
                launcher=[*attached_prefix(), PROGRAM],
            )
            stack.callback(end, server.process)
            started.append((server, name, log, kvd_url))
        for server, name, log, _ in started:
            await_server(server, name, log)
        prefill, decode = (Node(server.url, kvd_url) for server, _, _, kvd_url in started)
        yield prefill, decode


def computed_by_vllm(url: str, prompt: Sequence[int], answer_tokens: int) -> list[int]:
    """The answer of a server that keeps no answers, with an unused salt: no cache has the
    prompt."""
    answer = post(
        f"{url}/v1/completions",
        {
            "model": "m",
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": secrets.token_hex(8),
        },
    )
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens
