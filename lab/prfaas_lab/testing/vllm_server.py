"""A real vLLM server in separate processes, on the CPU, with a given KV connector.

A start takes most of a minute (three processes import torch), so tests and benchmarks share
servers. Each server has its own core, because OpenMP threads of two servers on the same cores wait
for each other. This module has no notion of kvds or hand-offs.

Requests use the standard library's client, not `prfaas.http_client`: the server is foreign, and
tests call it from code that has no event loop.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

START_S = 480.0  # only a hang takes so long, also on a busy machine
REQUEST_S = 120.0
MAX_LOGPROB_DIFFERENCE = 0.002  # allows another order of additions, but not a lost state
_HOST = "127.0.0.1"
# Below the kernel's range of ephemeral ports (32768 and up, on Linux).
_PORTS = range(20_000, 32_000)
_POLL_S = 0.1


class Generated(NamedTuple):
    tokens: list[int]
    logprobs: list[float]

    def same(self, other: Generated) -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and all(
            abs(one - two) <= MAX_LOGPROB_DIFFERENCE for one, two in pairs
        )


@dataclass(frozen=True, slots=True)
class VllmResponse:
    status: int
    body: Any

    @property
    def generated(self) -> Generated:
        assert self.status == 200, self.body
        (choice,) = self.body["choices"]
        return Generated(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    @property
    def transfer(self) -> dict[str, Any]:
        assert self.status == 200, self.body
        params: dict[str, Any] = self.body["kv_transfer_params"]
        return params

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of the prompt, as vLLM reports them (--enable-prompt-tokens-details)."""
        assert self.status == 200, self.body
        details = self.body["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)


class VllmServer:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self.url = f"http://{_HOST}:{port}"
        self._port = port

    def complete(self, prompt: list[int], max_tokens: int, **more: object) -> VllmResponse:
        return self._request("POST", "/v1/completions", _body(prompt, max_tokens, more))

    def post(self, path: str, body: Mapping[str, object]) -> VllmResponse:
        """A request with exactly these fields."""
        return self._request("POST", path, json.dumps(body))

    @contextmanager
    def streaming(
        self, prompt: list[int], max_tokens: int, **more: object
    ) -> Iterator[Iterator[Any]]:
        """Yields the response's events as they arrive. Leaving the context early disconnects. The
        context begins before the first event has arrived."""
        connection = self._connection()
        try:
            body = _body(prompt, max_tokens, {"stream": True, **more})
            connection.request("POST", "/v1/completions", body, _JSON)
            yield _events(connection)
        finally:
            connection.close()

    def healthy(self) -> bool:
        try:
            return self._request("GET", "/health").status == 200
        except OSError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """The metric's value, summed over all other labels."""
        lines = str(self._request("GET", "/metrics").body).splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [
            line.rsplit(" ", 1)[1]
            for line in lines
            if _sample_of(line) == name and all(label in line for label in wanted)
        ]
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def idle(self) -> bool:
        """Whether the engine has no request, and every block is free or an evictable prefix."""
        held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(f"vllm:{name}") for name in held)

    def kill(self, how: signal.Signals) -> None:
        """Signals all processes of the server at once, as a lost machine would."""
        os.killpg(self.process.pid, how)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                self.kill(signal.SIGKILL)  # remaining processes of its session

    def _request(self, method: str, path: str, body: str | None = None) -> VllmResponse:
        connection = self._connection()
        try:
            connection.request(method, path, body, _JSON)
            response = connection.getresponse()
            data = response.read().decode()
            is_json = "json" in (response.getheader("Content-Type") or "")
            return VllmResponse(response.status, json.loads(data) if is_json else data)
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(_HOST, self._port, timeout=REQUEST_S)


_JSON = {"Content-Type": "application/json"}


def start_vllm(
    python: Path,
    model: Path,
    log: Path,
    *,
    core: int,
    transfer: Mapping[str, object],
    flags: Sequence[str] = (),
    cache_bytes: int = 64 << 20,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
) -> VllmServer:
    """Starts a server; `await_health` waits until it serves. `python` is the interpreter of vLLM's
    environment. `launcher` is a command that runs the command line after it."""
    port = _free_port()
    command = [*launcher, str(python), "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "m"]
    command += ["--host", _HOST, "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", "--no-enable-log-requests"]
    command += ["--enable-prompt-tokens-details", "--kv-cache-memory-bytes", str(cache_bytes)]
    command += ["--structured-outputs-config", json.dumps({"backend": "xgrammar"})]
    command += ["--kv-transfer-config", json.dumps(transfer), *flags]
    cores = sorted(os.sched_getaffinity(0))
    settings = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[core % len(cores)]),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **(env or {}),
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env=settings, stdout=out, stderr=out, start_new_session=True
        )
    return VllmServer(process, port, log)


def await_health(*servers: VllmServer) -> None:
    """Waits until all servers are healthy."""
    until_s = time.monotonic() + START_S
    for server in servers:
        while not server.healthy():
            assert server.process.poll() is None, server.log.read_text()[-3000:]
            assert time.monotonic() < until_s, (
                f"the server is not healthy in time; see {server.log}"
            )
            time.sleep(_POLL_S)


def _body(prompt: list[int], max_tokens: int, more: Mapping[str, object]) -> str:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0,
    }
    return json.dumps({**body, **more})


def _events(connection: http.client.HTTPConnection) -> Iterator[Any]:
    for line in connection.getresponse():
        data = line.strip().removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield json.loads(data)


def _sample_of(line: str) -> str:
    return line.split("{")[0].split(" ")[0]


def _free_port() -> int:
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((_HOST, port))
            return port
