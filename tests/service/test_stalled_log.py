"""Services whose log nobody reads, or whose disk is full, answer, and end when they are told to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from prfaas.contracts.readiness import GatewayReady, KvdReady, NodeReady, Ready, parse_readiness
from tests.gateway.backends import deployment, written
from tests.node.hosts import START_S, call, text_of

NOWHERE = [{"url": "http://127.0.0.1:1", "kvd_url": f"http://127.0.0.1:{n}"} for n in (2, 3, 4)]


def gateway(folder: Path) -> list[str]:
    made = deployment(NOWHERE[:2], NOWHERE[2:])
    raw = {**msgspec.to_builtins(made), "gateway": {"port": 0}}
    return ["gateway", str(written(raw, folder / "d.toml"))]


def kvd(folder: Path) -> list[str]:
    return ["kvd", "--socket", str(folder / "kvd.sock"), "--memory", "64MiB"]


def node(folder: Path) -> list[str]:
    """With a kvd of its own, whose log is the same pipe."""
    return [
        *("node", "--engine", "emulated", "--model", "case-study-1t", "--accelerator", "h20"),
        *("--set", "node.port=0", "--set", "kvd.memory=64MiB"),
    ]


SERVICES: dict[str, tuple[Callable[[Path], list[str]], type[Ready]]] = {
    "gateway": (gateway, GatewayReady),
    "kvd": (kvd, KvdReady),
    "node": (node, NodeReady),
}


@pytest.fixture(params=["stalled reader", "full disk"])
def errors(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
        yield descriptor
        os.close(descriptor)
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_answers_although_its_log_cannot_be_written(
    tmp_path: Path, errors: int, service: str
) -> None:
    arguments, kind = SERVICES[service]
    command = [sys.executable, "-P", "-m", "prfaas", *arguments(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = parse_readiness(process.stdout.readline(), kind)
            assert ready is not None
            for _ in range(100):
                assert call("GET", f"{ready.http}/live")[0] == 200
            assert "prfaas_log_dropped_lines_total" in text_of(f"{ready.http}/metrics")
            process.terminate()
            assert process.wait(START_S) == 0
        finally:
            process.kill()
