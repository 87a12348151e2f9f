"""What processes hold, to see that it does not grow: sockets and memory by /proc, pages and leases
by the kvds' own reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.faults.deployment import FaultDeployment


class Held(NamedTuple):
    """By one process."""

    pid: int
    sockets: int
    own_bytes: int  # resident memory that is not shared: without the arena, which has its size


def held_by(pid: int) -> Held:
    """Raises `OSError` when it is gone."""
    folder = Path(f"/proc/{pid}")
    sockets = 0
    for entry in (folder / "fd").iterdir():
        try:
            sockets += str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue  # closed while we looked
    status = (folder / "status").read_text().splitlines()
    own_kb = next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    return Held(pid, sockets, own_kb * 1024)


def held(processes: Mapping[str, int]) -> dict[str, Held]:
    """Of those that are still there."""
    found = {}
    for name, pid in processes.items():
        try:
            found[name] = held_by(pid)
        except (OSError, StopIteration):  # it has ended, or is just ending and has no memory left
            continue
    return found


def idle(report: Any) -> bool:
    """Nobody holds a page, nothing is under way; every page in use is evictable prefix."""
    if report["pool"] is None:
        return False
    occupancy = report["pool"]["occupancy"]
    return bool(
        occupancy["leases"] == 0
        and occupancy["used_pages"] == occupancy["idle_pages"]
        and report["held_leases"] == 0
        and report["incoming"]["granted"] == report["incoming"]["committed"] == 0
        and report["outgoing"] == {"writing": 0, "sending": 0}
    )


async def settled(stage: FaultDeployment) -> None:
    """Until every kvd and gateway is idle; then every pool has checked itself. Raises
    `TimeoutError`."""

    async def quiet() -> bool:
        for number in range(len(stage.targets)):
            if (await stage.state(number))["requests"]["in_flight"]:
                return False
        return all([idle(await stage.stats(name)) for name in stage.names])

    await stage.until(quiet)
    for name in stage.names:
        await stage.stats(name, check=True)
