"""The Hugging Face engine under the contract that every engine keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.engine.api import Engine
from prfaas.engine.hf import HFEngine, LoadedModel
from tests.engine.contract import EngineContract, MakeEngine
from tests.engine.hf import models


@pytest.fixture(scope="module", params=models.archs(("kimi-linear", "mimo"), "kimi-linear"))
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return models.loaded(request.param)


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(HFEngine(loaded, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class TestContract(EngineContract):
    pass
