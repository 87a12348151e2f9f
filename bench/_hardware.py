"""The hardware and software of a measurement, as a catalog describes them."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str  # as a catalog spells it: h200, cpu-neoverse-n1-x2
    title: str
    software: str


def hardware(device: torch.device) -> Hardware:
    software = f"transformers {transformers.__version__}, torch {torch.__version__}"
    if device.type == "cuda":
        title = torch.cuda.get_device_name(device)
        return Hardware(_slug(title.removeprefix("NVIDIA ")), title, software)
    cores = os.cpu_count() or 1
    title = f"{_cpu_model()}, {cores} cores"
    return Hardware(f"cpu-{_slug(_cpu_model())}-x{cores}", title, software)


def _cpu_model() -> str:
    """The CPU model, where Linux on x86 names it; elsewhere the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
