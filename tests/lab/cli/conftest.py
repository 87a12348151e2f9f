from __future__ import annotations

from collections.abc import Callable

import pytest

from prfaas_lab.cli.main import lab as group
from tests.cli.runner import Result, run


@pytest.fixture
def lab(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    return lambda *arguments: run(capsys, monkeypatch, *arguments, program=group)
