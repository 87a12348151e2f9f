from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.guided.test_compiler import COMPILER


@pytest.fixture(scope="session", autouse=True)
def _closed_compiler() -> Iterator[None]:
    yield
    COMPILER.close()
