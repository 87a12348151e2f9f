"""These tests build an image and run pods, which needs podman and root, so they are collected only
when their folder is named: `make test-kubernetes`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.loop_thread import LoopThread
from tests.kubernetes.images import IMAGE, build
from tests.kubernetes.podman import Podman, missing
from tests.measured import pytest_terminal_summary  # noqa: F401  # a hook of pytest

FOLDER = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None: pytest decides."""
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(FOLDER) for path in named) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--containers",
        type=Path,
        default=Path("/var/tmp/prfaas-containers"),
        help="Folder for images, packages and wheels, which the next run uses again. Pods, networks"
        " and volumes are removed in the end.",
    )


@pytest.fixture(scope="session")
def containers(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.config.getoption("--containers")
    return folder


@pytest.fixture(scope="session")
def podman(containers: Path) -> Iterator[Podman]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    made = Podman(containers)
    made.remove_pods()  # of a run that was killed
    yield made
    made.remove_pods()


@pytest.fixture(scope="session")
def image(podman: Podman, containers: Path) -> str:
    """The id of the image that the manifests name."""
    return build(podman, containers / "cache", "--tag", IMAGE)


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    with LoopThread() as started:
        yield started
