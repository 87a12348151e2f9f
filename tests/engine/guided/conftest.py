from __future__ import annotations

from collections.abc import Iterator

import pytest

from prfaas.engine.guided import compiler
from tests.engine.guided.test_compiler import COMPILER
from tests.waiting import HANG_S


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine gives a grammar its two seconds of a processor late."""
    monkeypatch.setattr(compiler, "COMPILE_S", HANG_S)


@pytest.fixture(scope="session", autouse=True)
def _closed_compiler() -> Iterator[None]:
    yield
    COMPILER.close()
