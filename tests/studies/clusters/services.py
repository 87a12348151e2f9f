"""Ray clusters of two nodes, as processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[3]
STOP_S = 60.0
STORE_BYTES = 100_000_000  # the least that Ray accepts is 75 MiB


class RayCluster(NamedTuple):
    address: str  # for a driver on one of its machines
    client: str  # for drivers on other machines


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file. SIGTERM ends it and what it has started."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's client server forks while gRPC's threads run; gRPC's handlers of a fork may abort.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, cwd=log.parent, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)


def _found(pattern: str, log: Path, process: subprocess.Popen[bytes]) -> str:
    """What a process prints about itself, when it has printed it."""
    found: list[str] = []

    def printed() -> bool:
        text = log.read_text(encoding="utf-8", errors="replace")
        assert process.poll() is None, text
        found.extend(re.findall(pattern, text))
        return bool(found)

    wait_until(printed, within_s=HANG_S)
    return found[0]


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Two raylets with one CPU each."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1"]
    ray += [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
    client_port = free_port()
    # The paths of Ray's sockets would be too long in a folder of pytest.
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp"))
        head_options = ["--head", "--port=0", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"]
        head_options += ["--include-dashboard=false", f"--ray-client-server-port={client_port}"]
        logs = [Path(folder) / name for name in ("head.log", "second.log")]
        head = stack.enter_context(_running([*ray, *head_options], logs[0]))
        address = _found(r"--address='([\d.:]+)'", logs[0], head)
        joining = [f"--address={address}", "--node-ip-address=127.0.0.1"]
        second = stack.enter_context(_running([*ray, *joining], logs[1]))
        _found(r"(Ray runtime started)", logs[1], second)
        _wait_for_nodes(address, 2)
        yield RayCluster(f"ray:{address}", f"ray://127.0.0.1:{client_port}")


def _wait_for_nodes(address: str, count: int) -> None:
    import ray

    ray.init(address=address, log_to_driver=False)
    try:
        wait_until(lambda: ray.cluster_resources().get("CPU") == count, within_s=HANG_S)
    finally:
        ray.shutdown()
