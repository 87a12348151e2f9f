"""The wheel: it contains no laboratory, and its commands need neither a laboratory nor torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from prfaas.config import load_deployment
from prfaas.config.write import deployment_toml
from prfaas.interpreter import module_command
from tests.node.hosts import Process, call
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCALES = ("--time-scale", "0.02", "--byte-scale", "0.002", "--output-scale", "0.02")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without a network: the builder is a package of this environment.
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir")
    command = module_command("pip", "wheel", *options, str(folder), str(ROOT))
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def user(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the wheel is what Python finds, and the case study. No module of the
    laboratory and no torch can be imported."""
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for name in ("prfaas_lab", "torch"):
        (installed / f"{name}.py").write_text(f'raise ImportError("there is no {name}")\n')
    monkeypatch.setenv("PYTHONPATH", str(installed))
    folder = tmp_path / "user"
    folder.mkdir()
    shutil.copy(ROOT / "configs" / "case_study.toml", folder)
    return folder


def test_the_wheel_has_the_product_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"prfaas", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    assert not [name for name in names if "prfaas_lab" in name]
    assert {"prfaas/catalog/data/models.toml", "prfaas/py.typed"} <= set(names)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "case_study.toml"),
        ("simulate", "case_study.toml"),
        *((name, "--help") for name in ("demo", "gateway", "kvd", "node", "up")),
    ],
    ids=" ".join,
)
def test_commands_work_without_a_checkout(user: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        module_command("prfaas", *arguments),
        cwd=user,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0 and done.stdout, done.stderr


def test_the_laboratory_is_really_out_of_reach(user: Path) -> None:
    for module, found in (("prfaas", user.with_name("installed") / "prfaas"), ("prfaas_lab", None)):
        command = [sys.executable, "-P", "-c", f"import {module}; print({module}.__path__[0])"]
        done = subprocess.run(command, cwd=user, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.stdout.strip() == (str(found) if found else "")


def test_a_deployment_of_emulated_engines_serves_without_a_checkout(user: Path) -> None:
    whole = load_deployment(user / "case_study.toml")
    far, near = whole.clusters
    clusters = [
        msgspec.structs.replace(far, gpus=8),
        msgspec.structs.replace(near, gpus=16, prefill=1, decode=1),
    ]
    file = user / "small.toml"
    file.write_text(deployment_toml(msgspec.structs.replace(whole, clusters=clusters)))
    process = Process(
        *("up", str(file), "--engine", "emulated", *SCALES, "--port", "0"),
        *("--logs", str(user / "run")),
        folder=user,
    )
    try:
        url = process.find(r"serving \S+ at (http://\S+)")
        prompt = {"prompt": list(range(100)), "max_tokens": 3, "return_token_ids": True}
        status, answer = call("POST", f"{url}/v1/completions", prompt)
        assert status == 200 and len(answer["choices"][0]["token_ids"]) == 3
    finally:
        os.kill(process.popen.pid, signal.SIGINT)
        process.popen.wait(PATIENCE_S)
        process.kill()
