"""The JavaScript client is installed by `make test-clients`, so these tests are collected only when
their folder is named."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None: pytest decides."""
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(FOLDER) for path in named) else True
