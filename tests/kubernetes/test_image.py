"""The image that is built from a base without a registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas import __version__
from prfaas.launch.kubernetes.pods import USER
from tests.kubernetes.images import IMAGE, build, targets
from tests.kubernetes.podman import Podman

pytestmark = pytest.mark.timeout(1500)  # of a build, on a busy machine
# With the base: about 400 MB on aarch64, most of them numpy and scipy.
MOST_BYTES = 500_000_000


def test_it_has_both_targets() -> None:
    assert {"prfaas", "engine"} <= set(targets())


def test_it_runs_as_a_user_without_root_and_is_small(
    podman: Podman, image: str, record_property: Callable[[str, object], None]
) -> None:
    found = podman.inspect("image", image)
    assert found["Config"]["User"] == f"{USER}:{USER}"
    assert found["Config"]["Entrypoint"] == ["prfaas"]
    assert found["Size"] < MOST_BYTES
    record_property("megabytes", found["Size"] // 1_000_000)


def test_it_needs_no_file_system_that_can_be_written(podman: Podman, image: str) -> None:
    options = ["--rm", "--read-only", "--read-only-tmpfs=false", "--network", "none"]
    options += ["--cap-drop", "all", "--security-opt", "no-new-privileges"]
    shown = podman.run("run", *options, IMAGE, "--version")
    assert shown.split() == ["prfaas,", "version", __version__]
    words = [
        "--entrypoint",
        "python3",
        IMAGE,
        "-c",
        "import prfaas.gateway.process, os; print(os.getuid())",
    ]
    assert podman.run("run", *options, *words).split() == [str(USER)]


def test_it_has_no_tools_of_a_build_and_no_torch(podman: Podman, image: str) -> None:
    options = ["--rm", "--network", "none", "--entrypoint", "python3", IMAGE]
    modules = "['pip', 'hatchling', 'torch', 'pytest']"
    code = f"from importlib.util import find_spec; print([m for m in {modules} if find_spec(m)])"
    assert podman.run("run", *options, "-c", code).strip() == "[]"


def test_all_modules_have_bytecode_that_does_not_depend_on_times(
    podman: Podman, image: str
) -> None:
    """Processes cannot write any, and start slowly without."""
    code = (
        "import sys, prfaas.gateway.process, prfaas.kvd.process, prfaas.node.process, pathlib\n"
        "missing = []\n"
        "for module in list(sys.modules.values()):\n"
        "    cached = getattr(getattr(module, '__spec__', None), 'cached', None)\n"
        "    if not cached or not module.__file__.endswith('.py'): continue\n"
        "    path = pathlib.Path(cached)\n"
        "    if not path.exists() or path.read_bytes()[4:8] != b'\\1\\0\\0\\0':\n"
        "        missing.append(module.__name__)\n"
        "print(missing)"
    )
    options = ["--rm", "--network", "none", "--entrypoint", "python3", IMAGE]
    assert podman.run("run", *options, "-c", code).strip() == "[]"


def test_two_builds_of_the_same_sources_are_the_same_image(
    podman: Podman, image: str, containers: Path
) -> None:
    """Layer by layer, and so the same id."""
    again = build(podman, containers / "cache", "--no-cache")
    layers = [podman.inspect("image", one)["RootFS"]["Layers"] for one in (image, again)]
    assert layers[0] == layers[1]
    assert again == image


def test_an_engine_image_adds_prfaas_to_the_interpreter_of_its_base(
    podman: Podman, image: str, containers: Path
) -> None:
    """As in a vLLM image: the engine of the base is kept."""
    made = build(podman, containers / "cache", "--build-arg", "ENGINE_EXTRA=", target="engine")
    assert podman.inspect("image", made)["Config"]["User"] == f"{USER}:{USER}"
    options = ["--rm", "--read-only", "--read-only-tmpfs=false", "--network", "none"]
    assert __version__ in podman.run("run", *options, made, "--version")
    options += ["--entrypoint", "/usr/bin/python3", made]
    code = "import prfaas.integrations, prfaas.node.process, os; print(os.getuid())"
    assert podman.run("run", *options, "-c", code).split() == [str(USER)]
