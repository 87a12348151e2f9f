"""The Hugging Face engine under the contract that every engine keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.engine.api import Engine
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.engine.hf import HFEngine, LoadedModel, load_model
from tests.engine.contract import EngineContract, MakeEngine


@pytest.fixture(scope="module", params=["kimi-linear", "mimo"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tmp_path_factory.mktemp("model") / request.param
    return load_model(make_checkpoint(directory, request.param).directory, device="cpu")


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(**options: int) -> Engine:
        made.append(HFEngine(loaded, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class TestContract(EngineContract):
    pass
