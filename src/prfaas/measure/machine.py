"""How busy this machine was between two moments, whoever kept it so: from Linux' own counters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from prfaas.errors import InputError

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle, and waiting for a disk


class CpuTimes(NamedTuple):
    """Since the machine's start, of all cores together, in its own ticks."""

    busy: int
    all: int

    def share_since(self, before: CpuTimes) -> float:
        """Of the cores' time that was not idle; stolen time counts as busy."""
        return (self.busy - before.busy) / max(1, self.all - before.all)


def cpu_times(file: Path = _STAT) -> CpuTimes:
    try:
        name, *fields = file.read_text(encoding="ascii").splitlines()[0].split()
    except OSError as error:
        raise InputError(
            f"cannot tell how busy this machine is: {error.strerror}", file=file
        ) from None
    assert name == "cpu"
    ticks = [int(field) for field in fields[:8]]  # what follows is counted in them already
    return CpuTimes(sum(ticks) - sum(ticks[i] for i in _IDLE), sum(ticks))
