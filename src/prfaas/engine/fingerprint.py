"""Identifies a checkpoint without reading all of it. Independent of the model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SAMPLED_BYTES = 1 << 20  # of each end and the middle of a weights file


def fingerprint(directory: Path) -> str:
    """A hash of the config, and of each weights file's name, size, both ends and middle."""
    config = json.loads((directory / "config.json").read_text())
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for at in (0, max(0, size // 2), max(0, size - SAMPLED_BYTES)):
                file.seek(at)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()[:16]
