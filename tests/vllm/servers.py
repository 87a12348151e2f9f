"""Real processes: kvds, and vLLM servers on the CPU, each on Unix sockets of a test's directory.

Starting a server takes most of a minute (three processes import torch), so tests share them. Each
has a core of its own: OpenMP threads of two servers on the same cores wait for each other.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm.reference import Generated
from tests.waiting import wait_until

START_S = 240.0
REQUEST_S = 120.0


class UnixHTTP(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=REQUEST_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(REQUEST_S)
        self.sock.connect(str(self._path))


@dataclass(frozen=True, slots=True)
class Answer:
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
        return self.body["kv_transfer_params"]


class VllmServer:
    def __init__(self, process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
        self.process = process
        self.log = log
        self._path = path

    def complete(self, prompt: list[int], max_tokens: int, **more: object) -> Answer:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 0,
            **more,
        }
        return self._ask("POST", "/v1/completions", json.dumps(body))

    def healthy(self) -> bool:
        try:
            return self._ask("GET", "/health").status == 200
        except OSError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all other labels."""
        lines = str(self._ask("GET", "/metrics").body).splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [
            line.rsplit(" ", 1)[1]
            for line in lines
            if _sample_of(line) == name and all(label in line for label in wanted)
        ]
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def kill(self, how: signal.Signals) -> None:
        """All its processes at once, as a lost machine would."""
        os.killpg(self.process.pid, how)

    def _ask(self, method: str, path: str, body: str | None = None) -> Answer:
        connection = UnixHTTP(self._path)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read().decode()
            is_json = "json" in (response.getheader("Content-Type") or "")
            return Answer(response.status, json.loads(data) if is_json else data)
        finally:
            connection.close()


def _sample_of(line: str) -> str:
    return line.split("{")[0].split(" ")[0]


@contextmanager
def vllm_server(
    directory: Path, name: str, model: Path, kvd: Path, *, core: int, flags: list[str]
) -> Iterator[VllmServer]:
    path, log = directory / f"{name}.http", directory / f"{name}.log"
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvd": str(kvd)},
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{directory / name}.events",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "m", "--uds", str(path)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--no-enable-log-requests"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    command += ["--kv-events-config", json.dumps(events), *flags]
    cores = sorted(os.sched_getaffinity(0))
    env = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[core % len(cores)]),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    server = VllmServer(process, path, log)
    try:
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                server.kill(signal.SIGKILL)  # what is left of its session, if anything


def await_health(*servers: VllmServer) -> None:
    """Started together, waited for together."""
    for server in servers:
        wait_until(lambda s=server: s.process.poll() is not None or s.healthy(), within_s=START_S)
        assert server.process.poll() is None, server.log.read_text()[-3000:]
