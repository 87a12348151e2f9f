"""The services without any configuration: on loopback, and without keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from prfaas.contracts.readiness import GatewayReady, KvdReady, NodeReady, Ready, parse_readiness
from tests.gateway.backends import deployment, written

NOWHERE = [{"url": "http://127.0.0.1:1", "kvd_url": f"http://127.0.0.1:{n}"} for n in (2, 3, 4)]


def gateway(folder: Path) -> list[str]:
    made = deployment(NOWHERE[:2], NOWHERE[2:])
    raw = {**msgspec.to_builtins(made), "gateway": {"port": 0}}
    return ["gateway", str(written(raw, folder / "d.toml"))]


def kvd(folder: Path) -> list[str]:
    return ["kvd", "--socket", str(folder / "kvd.sock"), "--memory", "64MiB"]


def node(folder: Path) -> list[str]:
    """With a kvd of its own, whose log goes where the node's log goes."""
    return [
        *("node", "--engine", "emulated", "--model", "case-study-1t", "--accelerator", "h20"),
        *("--set", "node.port=0", "--set", "kvd.memory=64MiB"),
    ]


SERVICES: dict[str, tuple[Callable[[Path], list[str]], type[Ready]]] = {
    "gateway": (gateway, GatewayReady),
    "kvd": (kvd, KvdReady),
    "node": (node, NodeReady),
}


@contextmanager
def running(
    service: str, folder: Path, errors: int, settings: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its URL. `errors`: the descriptor of its log. `settings`: for `--set`."""
    arguments, kind = SERVICES[service]
    command = [sys.executable, "-P", "-m", "prfaas", *arguments(folder)]
    command += [word for setting in settings for word in ("--set", setting)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = parse_readiness(process.stdout.readline(), kind)
            assert ready is not None
            yield process, ready.http
        finally:
            process.kill()
