from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import FaultSetup, make_setup

TWO_BY_TWO = Path(__file__).parents[3] / "configs" / "two_by_two.toml"


@pytest.fixture(scope="session")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultSetup]:
    yield from make_setup("emulated", tmp_path_factory.mktemp("two-by-two"), TWO_BY_TWO)
