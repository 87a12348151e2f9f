"""The same hand-offs between the same vLLM servers, with PrfaasConnector and with NixlConnector.

\b
    python -m prfaas_lab bench connectors --python .venv-vllm/bin/python [--models qwen3]
                                          [--tokens 2000]

Two vLLM servers on the CPU (float32, no prefix cache, one thread each) receive the same prompts
with one connector at a time: PrfaasConnector with a kvd per server, or vLLM's NixlConnector (UCX,
TCP only). `--python` is the interpreter of an environment with vLLM, prfaas and nixl
(`make bench-vllm`). The benchmark makes the models. Prints JSON, per model and connector:

\b
    to_first_token_s   from the prefill's response to the decode server's first token (median)
    whole_s            from sending the prefill to the decode server's first token (median)
    transfer_s         the part of `to_first_token_s` until the receiving kvd has committed (mean);
                       for NIXL, the value of its own metric
    tokens_equal       prompts whose greedy tokens equal those of a single server

For a connector that refuses a model, or whose server exits, the result is the server's last errors.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click
import msgspec

from prfaas.cache.hashing import block_hashes
from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.contracts.readiness import KvdReady, parse_readiness
from prfaas.engine.checkpoint.architectures import Size
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.types import Compat
from prfaas_lab.testing.vllm_server import VllmServer, await_health, start_vllm

# vLLM's CPU attention requires head sizes that are multiples of 32; the tiny qwen3's is not one.
MODELS: dict[str, Size] = {"qwen3": "small", "gemma3": "tiny", "falcon-h1": "tiny"}
NEW_TOKENS = 16
COMMIT_S = 60.0
CACHE_BYTES = 256 << 20
# With NIXL, each worker had a second thread that was always busy. On one core the two threads
# would share it.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
FLAGS = ["--no-enable-prefix-caching", "--max-num-batched-tokens", "512", "--max-model-len", "4096"]


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of one request, in seconds of one clock."""

    asked_s: float
    prefilled_s: float
    first_token_s: float
    tokens: list[int]


class Pair(Protocol):
    def hand_off(self, prompt: list[int]) -> Timed: ...

    def alone(self, prompt: list[int]) -> list[int]: ...

    def transfer_s(self) -> float | None:
        """Mean seconds that the transfer of one hand-off takes."""


@dataclass(frozen=True, slots=True)
class Servers:
    prefill: VllmServer
    decode: VllmServer

    def alone(self, prompt: list[int]) -> list[int]:
        return self.prefill.complete(prompt, NEW_TOKENS).generated.tokens

    def first_token(self, prompt: list[int], params: dict[str, Any]) -> tuple[float, list[int]]:
        """Returns the time of the first token, and the whole answer."""
        tokens: list[int] = []
        first_s = 0.0
        with self.decode.streaming(prompt, NEW_TOKENS, kv_transfer_params=params) as pieces:
            for piece in pieces:
                if "choices" not in piece:
                    raise RuntimeError(json.dumps(piece))
                first_s = first_s or time.perf_counter()
                tokens += piece["choices"][0].get("token_ids") or ()
        return first_s, tokens


class OurPair:
    """Does a gateway's work for PrfaasConnector: grant, prefill, commit, decode."""

    def __init__(self, servers: Servers, source_url: str, target_url: str) -> None:
        self._servers = servers
        self._target_url = target_url
        pool = _get(f"{source_url}/v1/stats")["pool"]
        self._compat = msgspec.convert(pool["compat"], Compat)
        self._exposed_s: list[float] = []

    def alone(self, prompt: list[int]) -> list[int]:
        return self._servers.alone(prompt)

    def hand_off(self, prompt: list[int]) -> Timed:
        tokens = len(prompt) - 1
        asked_s = time.perf_counter()
        hashes = block_hashes(prompt[:tokens], self._compat.block_tokens)
        opening = OpenTransfer(tuple(hashes), tokens, self._compat)
        grant = _get(f"{self._target_url}/v1/open", msgspec.json.encode(opening))
        assert grant["type"] == "grant", grant
        params = {"do_remote_decode": True, "grant": grant, "handoff_tokens": tokens}
        answer = self._servers.prefill.complete(prompt, 1, kv_transfer_params=params)
        prefilled_s = time.perf_counter()
        assert answer.transfer["do_remote_prefill"], answer.transfer
        transfer_id = grant["transfer_id"]
        status = _get(f"{self._target_url}/v1/transfers/{transfer_id}?wait_s={COMMIT_S}")
        assert status["state"] == "committed", status
        self._exposed_s.append(time.perf_counter() - prefilled_s)
        resumed = {"do_remote_prefill": True, "transfer_id": transfer_id}
        first_s, answered = self._servers.first_token(prompt, resumed)
        return Timed(asked_s, prefilled_s, first_s, answered)

    def transfer_s(self) -> float | None:
        return statistics.mean(self._exposed_s)


class NixlPair:
    """Does a proxy's work for NixlConnector: the prefill's response has the decode parameters."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def alone(self, prompt: list[int]) -> list[int]:
        return self._servers.alone(prompt)

    def hand_off(self, prompt: list[int]) -> Timed:
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        remote = ("engine_id", "block_ids", "host", "port")
        params = {**asked, **{f"remote_{name}": None for name in remote}}
        asked_s = time.perf_counter()
        answer = self._servers.prefill.complete(prompt, 1, kv_transfer_params=params)
        prefilled_s = time.perf_counter()
        first_s, tokens = self._servers.first_token(prompt, answer.transfer)
        return Timed(asked_s, prefilled_s, first_s, tokens)

    def transfer_s(self) -> float | None:
        name = "vllm:nixl_xfer_time_seconds"
        count = self._servers.decode.metric(f"{name}_count")
        return self._servers.decode.metric(f"{name}_sum") / count if count else None


@contextmanager
def our_pair(python: Path, model: Path, folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        urls: list[str] = []
        servers: list[VllmServer] = []
        for core, name in enumerate("pd"):
            path = folder / f"{name}.kvd"
            urls.append(stack.enter_context(_kvd(path)))
            transfer = {
                "kv_connector": "PrfaasConnector",
                "kv_connector_module_path": "prfaas.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"kvd": str(path)},
            }
            log = folder / f"{name}.log"
            server = start_vllm(
                python,
                model,
                log,
                core=core,
                transfer=transfer,
                flags=FLAGS,
                cache_bytes=CACHE_BYTES,
                env=UNBOUND,
            )
            stack.callback(server.stop)
            servers.append(server)
        await_health(*servers)
        yield OurPair(Servers(*servers), *urls)


@contextmanager
def nixl_pair(python: Path, model: Path, folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        servers: list[VllmServer] = []
        for core, name in enumerate("pd"):
            server = start_vllm(
                python,
                model,
                folder / f"{name}.log",
                core=core,
                transfer={"kv_connector": "NixlConnector", "kv_role": "kv_both"}
                | {"kv_buffer_device": "cpu"},
                flags=FLAGS,
                cache_bytes=CACHE_BYTES,
                env={
                    **UNBOUND,
                    "UCX_TLS": "tcp",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + core),
                    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # NIXL requires it with Mamba layers
                },
            )
            stack.callback(server.stop)
            servers.append(server)
        await_health(*servers)
        yield NixlPair(Servers(*servers))


CONNECTORS = {"prfaas": our_pair, "nixl": nixl_pair}


def measured(pair: Pair, prompts: list[list[int]]) -> dict[str, Any]:
    expected = [pair.alone(prompt) for prompt in prompts]
    pair.hand_off(prompts[0][:200])  # warms up: handshakes, connections
    found = [pair.hand_off(prompt) for prompt in prompts]
    transfer_s = pair.transfer_s()
    return {
        "to_first_token_s": _median([one.first_token_s - one.prefilled_s for one in found]),
        "whole_s": _median([one.first_token_s - one.asked_s for one in found]),
        "transfer_s": None if transfer_s is None else round(transfer_s, 4),
        "tokens_equal": f"{sum(a.tokens == b for a, b in zip(found, expected, strict=True))}"
        f" of {len(prompts)}",
    }


def attempt(name: str, python: Path, model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        try:
            with CONNECTORS[name](python, model, folder) as pair:
                return measured(pair, prompts)
        except Exception as error:  # a connector's failure is a result here
            logged = [_errors(folder / f"{end}.log") for end in "pd"]
            return {"failed": str(error)[:500] or type(error).__name__, "log": logged}


def _errors(log: Path) -> list[str]:
    """The last error lines of a server's log."""
    if not log.exists():
        return []
    lines = log.read_text(errors="replace").splitlines()
    return [line[-300:] for line in lines if "ERROR" in line and "Error: " in line][-3:]


@contextmanager
def _kvd(path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "prfaas", "kvd", "--socket", str(path), "--memory", "512MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = parse_readiness(process.stdout.readline(), KvdReady)
            assert ready is not None, "the kvd did not start"
            yield ready.http
        finally:
            process.terminate()


def _get(url: str, body: bytes | None = None) -> Any:
    with urllib.request.urlopen(url, data=body, timeout=COMMIT_S + 30) as answer:
        return json.loads(answer.read())


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


@click.command(help=__doc__)
@click.option(
    "--python",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="Python interpreter with vLLM, prfaas and nixl.",
)
@click.option(
    "--models",
    multiple=True,
    type=click.Choice(list(MODELS)),
    default=list(MODELS),
    help="Model to serve; repeatable.",
)
@click.option("--tokens", default=2000, show_default=True, help="Tokens of each prompt.")
@click.option("--prompts", "count", default=5, show_default=True, help="Prompts per connector.")
def main(python: Path, models: tuple[str, ...], tokens: int, count: int) -> None:
    chance = random.Random(0)
    prompts = [chance.choices(range(256), k=tokens) for _ in range(count)]
    report: dict[str, Any] = {"tokens": tokens, "prompts": count, "models": {}}
    with tempfile.TemporaryDirectory() as directory:
        for arch in models:
            model = Path(directory) / arch
            make_checkpoint(model, arch, MODELS[arch])
            found = {name: attempt(name, python, model, prompts) for name in CONNECTORS}
            ours, theirs = (found[name].get("to_first_token_s") for name in CONNECTORS)
            ratio = round(theirs / ours, 3) if ours and theirs else None
            report["models"][arch] = {**found, "nixl_over_prfaas": ratio}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
