"""The worker processes of kvds: found as children of a kvd in /proc, killed and stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_KVD = "kvd-"  # names of kvds begin so, and end with the name of their node


def children_of(pid: int) -> list[int]:
    """Running child processes, the oldest first. A process that has ended, and for which its parent
    has not waited yet, does not count."""
    found: list[tuple[int, int]] = []  # start time, process id
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue  # it has ended in the meantime
        # The name is in parentheses, and may have spaces and parentheses in it.
        state, parent, *rest = text.rpartition(")")[2].split()
        if int(parent) == pid and state not in "ZX":
            found.append((int(rest[17]), int(folder.name)))
    return [child for _, child in sorted(found)]


def name_workers(processes: Mapping[str, int]) -> dict[str, int]:
    """Names and process ids of the workers of those processes that are kvds."""
    return {
        f"worker-{name.removeprefix(_KVD)}-{number}": child
        for name, pid in processes.items()
        if name.startswith(_KVD)
        for number, child in enumerate(children_of(pid))
    }


def workers_of(node: str, processes: Mapping[str, int]) -> list[int]:
    """The process ids of the workers of a node's kvd; none while the kvd is not running."""
    kvd = f"{_KVD}{node}"
    return list(name_workers({kvd: processes[kvd]}).values()) if kvd in processes else []


def send_signal(pids: list[int], number: signal.Signals) -> None:
    """Processes that have ended in the meantime are left out."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
