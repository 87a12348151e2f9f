"""The base image from Debian packages, the wheels of the dependencies, and prfaas' image of both.

No registry is needed. The packages and the wheels are kept for the next run; the build without a
network then gives the same image whenever the sources are the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from prfaas import __version__
from tests.kubernetes.podman import BUILD_S, Podman, find

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy" / "image" / "Containerfile"
SUITE, PYTHON = "bookworm", "3.11"
# Of a slim image of Docker Hub: a shell, Python, and the library of C++, which wheels expect.
PACKAGES = ("dash", "coreutils", "libstdc++6", "python3-venv")
NOT_NEEDED = ("man", "doc", "locale", "info")
BASE = f"localhost/prfaas-test-base:{SUITE}"
IMAGE = f"localhost/prfaas:{__version__}"
_EPOCH = "1735689600"  # 2025-01-01; of the base image's files


def build(podman: Podman, cache: Path, *options: str, target: str = "prfaas") -> str:
    """Builds a target without a network, and returns the id of the image."""
    if not podman.has_image(BASE):
        podman.run("import", str(base_files(cache)), BASE, within_s=BUILD_S)
    words = ["--file", str(CONTAINERFILE), "--target", target, "--quiet", *options]
    words += ["--network", "none", "--timestamp", "0", "--volume", f"{wheels(cache)}:/wheels:ro"]
    for name, value in (("BASE", BASE), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", "/wheels")):
        words += ["--build-arg", f"{name}={value}"]
    return podman.run("build", *words, str(ROOT), within_s=BUILD_S).split()[-1]


def base_files(cache: Path) -> Path:
    """A root file system, as a tar file."""
    file = cache / f"base-{SUITE}-{_digest(*PACKAGES)}.tar"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        program = find("mmdebstrap")
        assert program is not None
        made = file.with_suffix(".part.tar")
        # The packages are unpacked and not configured: nothing of theirs runs, which is quick.
        words = [program, "--variant=extract", f"--include={','.join(PACKAGES)}", "--quiet"]
        words += [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in NOT_NEEDED]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": _EPOCH}
        subprocess.run([*words, SUITE, str(made)], env=environment, timeout=BUILD_S, check=True)
        made.rename(file)
    return file


def wheels(cache: Path) -> Path:
    """A folder with the wheels of prfaas' dependencies and of its build, for the base image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    constraints = ROOT / "constraints.txt"
    folder = cache / f"wheels-{PYTHON}-{_digest(*needed, constraints.read_text())}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = folder.with_name(f"{folder.name}.part")
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(made)]
        words += ["--constraint", str(constraints), "--python-version", PYTHON]
        words += ["--only-binary", ":all:", *needed]
        subprocess.run(words, timeout=BUILD_S, check=True, stderr=subprocess.DEVNULL)
        made.rename(folder)
    return folder


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def targets() -> list[str]:
    """The stages of the Containerfile by name."""
    return re.findall(r"^FROM \S+ AS (\S+)$", CONTAINERFILE.read_text(), re.MULTILINE)
