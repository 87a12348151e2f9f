"""Runs a deployment of `prfaas init` exactly as its output says, and probes its ports."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from prfaas.launch.commands import VLLM_READY
from prfaas.launch.request_outcomes import RequestOutcome, RequestOutcomes
from prfaas.security.shared_key import bearer
from prfaas.security.tls import client_context, trust_context
from prfaas_lab.testing.vllm_server import START_S
from tests.cli.runner import run
from tests.waiting import PATIENCE_S, wait_until

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
ANSWER_S = 30.0  # for one response; only a process that hangs takes longer
CALM = {"OMP_NUM_THREADS": "1"}  # several engines share this machine

CATALOG = """\
[[models]]
name = "toy"
title = "Toy"
layers = 4
status = "inferred"
source = "made up for tests"

[[models.groups]]
kind = "gqa"
layers = [0, 2]
kv_heads = 2
k_dim = 32
v_dim = 32

[[models.groups]]
kind = "linear"
layers = "rest"
k_heads = 2
v_heads = 2
k_dim = 16
v_dim = 16
conv_kernel = 4
"""
PROFILE = """\
[[accelerators]]
name = "chip"
title = "Chip"

[[profiles]]
model = "{model}"
accelerator = "chip"
gpus = 1
status = "inferred"
source = "made up for tests"
prefill = [{{ new = 64, seconds = 0.02 }}, {{ new = 4096, seconds = 0.4 }}]
decode = [{{ batch = 1, step_s = 0.01 }}, {{ batch = 4, step_s = 0.012 }}]
"""


def write_catalog(folder: Path, model: str = "toy") -> Path:
    """A catalog file with a profile of the model, and the model itself if it is `toy`."""
    file = folder / "toy.toml"
    described = CATALOG if model == "toy" else ""
    file.write_text(described + "\n" + PROFILE.format(model=model))
    return file


def init(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> dict[str, Any]:
    """Runs `prfaas init` with these arguments; the output of --json."""
    result = run(capsys, monkeypatch, "init", *arguments, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = result.json
    return found


# Running it ---------------------------------------------------------------------------------------


@dataclass
class RunningDeployment:
    summary: dict[str, Any]
    log: Path  # of the gateway

    @property
    def services(self) -> Iterator[tuple[str, str]]:
        """The service and the URL of every process."""
        for host in self.summary["hosts"]:
            for one in host["commands"]:
                yield one["service"], one["url"]

    @property
    def folder(self) -> Path:
        return Path(self.summary["folder"])

    def key(self, name: str) -> dict[str, str]:
        """The header with the key that is in this file of the folder."""
        return bearer((self.folder / name).read_text().strip())

    def outcome(self, request_id: str) -> RequestOutcome:
        """The line of a request in the gateway's log."""

        def found() -> list[RequestOutcome]:
            outcomes = RequestOutcomes()
            for line in self.log.read_text().splitlines():
                outcomes.read_line(line)
            return [one for one in outcomes.latest if one.id == request_id]

        wait_until(lambda: bool(found()))
        return found()[0]


@contextmanager
def running(
    summary: dict[str, Any],
    logs: Path,
    prefix: Callable[[str], Sequence[str]] = lambda _: (),
    vllm: Callable[[str], str] = str,
) -> Iterator[RunningDeployment]:
    """Runs the printed commands: every kvd, then every node, then the gateway. `prefix` goes before
    the commands of a host, such as `ip netns exec NAME`. `vllm` changes the command of a vLLM
    server for this machine."""
    with ExitStack() as stack:
        for service in ("kvd", "node", "gateway"):
            started = []
            for host in summary["hosts"]:
                for one in host["commands"]:
                    if one["service"] == service:
                        log = logs / f"{service}-{one['name']}.log"
                        line = _this_python(one["command"], vllm)
                        command = [*prefix(host["host"]), "sh", "-c", line]
                        started.append((_start(stack, command, host["folder"], log), log))
            for process, log in started:
                wait_until(partial(_is_ready, process, log), within_s=START_S)
        yield RunningDeployment(summary, logs / "gateway-.log")


def _this_python(command: str, vllm: Callable[[str], str]) -> str:
    """The command with this interpreter's `prfaas`, whatever PATH has."""
    if not command.startswith("prfaas "):
        return vllm(command)
    return f"exec {shlex.quote(sys.executable)} -m {command}"


def _start(
    stack: ExitStack, command: Sequence[str], folder: str, log_file: Path
) -> subprocess.Popen[bytes]:
    log = stack.enter_context(log_file.open("wb"))
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **CALM},
        start_new_session=True,
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGINT)  # no gateway has to learn of it first
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)


def _is_ready(process: subprocess.Popen[bytes], log: Path) -> bool:
    text = log.read_text(errors="replace")
    assert process.poll() is None, f"{log.name}:\n{text}"
    return VLLM_READY in text or any(line.startswith('{"ready":') for line in text.splitlines())


# Requests -----------------------------------------------------------------------------------------


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str] = NO_HEADERS

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def member_context(folder: Path) -> ssl.SSLContext:
    """The identity of the host with this folder."""
    return client_context(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")


def send(
    url: str,
    path: str,
    tls: ssl.SSLContext | None,
    *,
    method: str = "GET",
    body: Any = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Answer | None:
    """None when the server did not answer with HTTP. `tls` None: unencrypted."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    if tls is None:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=ANSWER_S)
    else:
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=ANSWER_S, context=tls
        )
    data = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, data, dict(headers))
        response = connection.getresponse()
        return Answer(response.status, response.read(), dict(response.headers))
    except (OSError, http.client.HTTPException) as error:
        assert not isinstance(error, TimeoutError), f"{url}{path} is silent"
        assert not isinstance(error, ConnectionRefusedError), f"{url} does not run"
        return None
    finally:
        connection.close()


def complete(
    deployment: RunningDeployment, prompt: Sequence[int], max_tokens: int = 8
) -> tuple[list[int], RequestOutcome]:
    """The tokens of an answer of the gateway, and the gateway's log line."""
    answer = send(
        deployment.summary["gateway"],
        "/v1/completions",
        trust_context(deployment.folder / "client" / "ca.pem"),
        method="POST",
        body=completion(prompt, max_tokens),
        headers=deployment.key("client/tenant.key"),
    )
    assert answer is not None and answer.status == 200, answer
    return (
        answer.json["choices"][0]["token_ids"],
        deployment.outcome(answer.headers["X-Request-Id"]),
    )


def completion(prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def wait_until_served(deployment: RunningDeployment, nodes: int) -> None:
    """Waits until the gateway has found all nodes."""
    ca = trust_context(deployment.folder / "client" / "ca.pem")

    def found() -> bool:
        answer = send(
            deployment.summary["gateway"],
            "/prfaas/v1/state",
            ca,
            headers=deployment.key("operator/operator.key"),
        )
        assert answer is not None and answer.status == 200, answer
        members = [one for cluster in answer.json["clusters"] for one in cluster["nodes"]]
        return sum(bool(one.get("in_use")) for one in members) == nodes

    wait_until(found)


def raw_bytes(host: str, port: int, sent: bytes, tls: ssl.SSLContext | None) -> bytes:
    """What a server sends to a client that sends these bytes and closes its side."""
    with socket.create_connection((host, port), timeout=ANSWER_S) as plain:
        try:
            if tls is not None:
                with tls.wrap_socket(plain, server_hostname=host) as encrypted:
                    encrypted.sendall(sent)
                    return _read_all(encrypted)
            plain.sendall(sent)
            plain.shutdown(socket.SHUT_WR)
            return _read_all(plain)
        except TimeoutError:
            raise
        except OSError:
            return b""


def _read_all(sock: socket.socket) -> bytes:
    found = b""
    while part := sock.recv(65536):
        found += part
    return found
