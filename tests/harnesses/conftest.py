"""The harnesses need environments of their own, so these tests are collected only when their folder
is named: `make test-harnesses`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harnesses.system import System, running_system

FOLDER = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None: pytest decides."""
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(FOLDER) for path in named) else True


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("system")) as started:
        yield started
