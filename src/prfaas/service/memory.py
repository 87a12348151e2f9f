"""How much memory this process may have: that of the host, or of its container."""

from __future__ import annotations

import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_HOST = Path("/proc/meminfo")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_STRICT = "2"


def memory_limit(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS, host: Path = _HOST) -> int | None:
    """The memory and swap of the host, or the smallest limit of this process's cgroup and of those
    above it. None where nothing can be read."""
    text = _text(host)
    sizes = re.findall(r"^(?:MemTotal|SwapTotal): +(\d+) kB$", text, re.MULTILINE)
    limits = [1024 * sum(map(int, sizes))] if sizes else []
    for line in _text(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        inside = Path(path.lstrip("/"))
        # In a container the path may be the host's. The root then has the container's limit.
        found = (_text(folder / part / name).strip() for part in (inside, *inside.parents))
        limits += [int(one) for one in found if one.isdecimal()]  # version 2 has "max" without one
    return min(limits, default=None)


def commits_strictly(overcommit: Path = _OVERCOMMIT) -> bool:
    """Whether the kernel refuses memory that it cannot back, also a page of a mapped file: the
    process that touches it gets SIGBUS."""
    return _text(overcommit).strip() == _STRICT


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
