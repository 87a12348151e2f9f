"""Resources that processes hold: sockets and memory from /proc, pages and leases from the kvds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prfaas_lab.faults.deployment import FaultDeployment


class ResourceUsage(NamedTuple):
    """Sockets and memory of one process."""

    pid: int
    sockets: int
    own_bytes: int  # resident memory that is not shared: without the arena, whose size is fixed


def measure_process(pid: int) -> ResourceUsage:
    """Raises `OSError` when the process has ended."""
    folder = Path(f"/proc/{pid}")
    sockets = 0
    for entry in (folder / "fd").iterdir():
        try:
            sockets += str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue  # closed in the meantime
    status = (folder / "status").read_text().splitlines()
    own_kb = next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    return ResourceUsage(pid, sockets, own_kb * 1024)


def measure_usage(processes: Mapping[str, int]) -> dict[str, ResourceUsage]:
    """Usage of the processes that still run."""
    found = {}
    for name, pid in processes.items():
        try:
            found[name] = measure_process(pid)
        except (OSError, StopIteration):  # the process has ended, or is ending without memory
            continue
    return found


def idle(report: Any) -> bool:
    """Whether a kvd has no leases and no transfers, and every used page is an evictable prefix."""
    if report["pool"] is None:
        return False
    pools = [pool["occupancy"] for pool in (report["pool"], *report["more_pools"])]
    return bool(
        all(pool["leases"] == 0 and pool["used_pages"] == pool["idle_pages"] for pool in pools)
        and report["held_leases"] == 0
        and report["incoming"]["granted"] == report["incoming"]["committed"] == 0
        and report["outgoing"] == {"writing": 0, "sending": 0}
    )


def has_work(state: Any) -> bool:
    """Whether a gateway has requests, or believes that a node has any, for itself or for another
    gateway."""
    nodes = [node for cluster in state["clusters"] for node in cluster["nodes"]]
    return bool(
        state["requests"]["in_flight"]
        or any(node.get("queued", 0) or node.get("active", 0) for node in nodes)
    )


async def wait_until_idle(deployment: FaultDeployment) -> None:
    """Waits until every kvd and gateway is idle, then lets every kvd check its pool. Raises
    `TimeoutError`."""

    async def quiet() -> bool:
        for number in range(len(deployment.targets)):
            if has_work(await deployment.state(number)):
                return False
        return all([idle(await deployment.stats(name)) for name in deployment.names])

    await deployment.until(quiet)
    for name in deployment.names:
        await deployment.stats(name, check=True)
