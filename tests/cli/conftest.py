from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.runner import Result, run


@pytest.fixture
def prfaas(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    return lambda *arguments: run(capsys, monkeypatch, *arguments)
