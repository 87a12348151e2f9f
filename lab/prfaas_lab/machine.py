"""How busy this machine was between two times, from Linux's counters of all processes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from prfaas.errors import InputError

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle, and waiting for a disk


class CpuTimes(NamedTuple):
    """Ticks of all cores together since the machine's start."""

    busy: int
    all: int

    def share_since(self, before: CpuTimes) -> float:
        """The share of the cores' time that was not idle; stolen time counts as busy."""
        return (self.busy - before.busy) / max(1, self.all - before.all)


def cpu_times(file: Path = _STAT) -> CpuTimes:
    try:
        name, *fields = file.read_text(encoding="ascii").splitlines()[0].split()
    except OSError as error:
        raise InputError(
            f"cannot read how busy this machine is: {error.strerror}", file=file
        ) from None
    assert name == "cpu"
    ticks = [int(field) for field in fields[:8]]  # these include the remaining fields
    return CpuTimes(sum(ticks) - sum(ticks[i] for i in _IDLE), sum(ticks))
