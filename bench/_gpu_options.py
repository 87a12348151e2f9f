"""The options that every part of `bench/gpu.py` has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _keep_nothing(name: str, result: Any) -> None:
    pass


@dataclass(frozen=True)
class GpuOptions:
    device: str  # a torch device: "cuda", "cuda:1" or "cpu"
    dtype: str  # of weights and caches: "bfloat16" or "float32"
    small: bool  # tiny shapes, for a CPU and for tests
    folder: Path  # an existing work folder for checkpoints, sockets and logs
    end_s: float = math.inf  # when the part's time is used up, as `time.monotonic` counts
    # Called with the name and the value of each result as soon as it exists, so that a part that
    # is ended later has not measured in vain.
    keep: Callable[[str, Any], None] = _keep_nothing

    @property
    def left_s(self) -> float:
        """Seconds until the part's time is used up; negative after that."""
        return self.end_s - time.monotonic()
