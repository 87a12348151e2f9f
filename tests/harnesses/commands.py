"""Runs the commands of harnesses, each in an environment of its own (`make test-harnesses`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_S = 900.0  # for one command; with six runnable processes per core one took 260 s

# Models and datasets are local files, and no harness reports its use.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def program(environment: str, name: str) -> str:
    """The path of a harness's command."""
    path = ROOT / environment / "bin" / name
    assert path.is_file(), f"{path} does not exist; `make test-harnesses` installs it"
    return str(path)


def run_command(folder: Path, *command: str, **variables: str) -> str:
    """Runs it in this folder, which must succeed. The output, errors included."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **OFFLINE, "HF_HOME": str(folder / "huggingface"), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout
