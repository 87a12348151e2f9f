"""Shifts the wall clocks of all processes that were started with `environment`."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

from prfaas_lab.faults import wall


class WallClock:
    def __init__(self, folder: Path) -> None:
        """Creates `folder`. The shift is zero at first."""
        folder.mkdir()
        source = Path(wall.__path__[0]) / "sitecustomize.py"
        shutil.copy(source, folder / source.name)
        self._folder = folder
        self.set_shift(0.0)

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def set_shift(self, seconds: float) -> None:
        """Sets the shift of every such process at once."""
        file = self._folder / "shift"
        # The file is written in place, because the processes have mapped it.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, struct.pack("d", seconds), 0)
        finally:
            os.close(descriptor)
