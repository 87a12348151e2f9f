"""How many cores this process may use (its CPU affinity and the CPU limit of its cgroups), and the
CPU time and the priority of others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MOST_NICE = 19


def usable_cores() -> float:
    """A container's limit may be a fraction, such as 1.5 cores."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux
        allowed = os.cpu_count() or 1
    limit = cgroup_limit(_CGROUPS, _OWN_CGROUPS)
    return float(allowed) if limit is None else min(float(allowed), limit)


def cpu_clock(pid: int) -> int:
    """For `time.clock_gettime`, the CPU time of another process: clock_getcpuclockid(3)."""
    return ~pid << 3 | 2


def leave_to_others(pid: int, niceness: int) -> None:
    """Gives a process, which is alone in its session (0: this one), this niceness. Between
    sessions, some kernels go by the session's niceness only (autogroups, sched(7)), and services
    have one each. ProcessLookupError when the process has ended."""
    lower = min(niceness, _MOST_NICE)
    os.setpriority(os.PRIO_PROCESS, pid, lower)
    with suppress(OSError), open(f"/proc/{pid or 'self'}/autogroup", "w") as group:
        group.write(str(lower))  # without privileges the kernel takes ten changes in a second


def cgroup_limit(root: Path, own: Path) -> float | None:
    """The smallest CPU limit of this process's cgroup and of those above it, in cores. None when
    there is none, or none can be read. Version 2 is mounted at `root`, version 1 at `root`/cpu."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            read, mounted = _limit_v2, root
        elif "cpu" in controllers.split(","):
            read, mounted = _limit_v1, root / "cpu"
        else:
            continue
        inside = Path(path.lstrip("/"))
        # In a container the path may be the host's, which does not exist here. The root then has
        # the container's limit, so each folder that does exist counts.
        for part in (inside, *inside.parents):
            limit = read(mounted / part)
            if limit is not None:
                limits.append(limit)
    return min(limits, default=None)


def _limit_v2(folder: Path) -> float | None:
    return _quotient(_words(folder / "cpu.max"))


def _limit_v1(folder: Path) -> float | None:
    files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return _quotient([word for name in files for word in _words(folder / name)])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []


def _quotient(quota_and_period: list[str]) -> float | None:
    """None without a limit: version 2 then has the quota "max", version 1 has -1."""
    try:
        quota, period = map(int, quota_and_period)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None
