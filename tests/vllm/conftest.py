from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import pytest

from prfaas.engine.checkpoint.make import make_checkpoint
from tests.conftest import PAIR_MODELS, PAIRS, group_of
from tests.vllm.cases import CASES, MAX_TOKENS, PROMPTS, UNCACHED, Case, Model, case_id
from tests.vllm.faults import check_unharmed
from tests.vllm.pairs import pair
from tests.vllm.reference import reference

SHORT_S = 1.0  # what a hasty kvd waits for

# vLLM and torch warn about themselves while they are imported; everything after that is ours.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from prfaas.integrations.vllm import PrfaasConnector  # noqa: F401


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """By architecture: made, and answered by a plain vLLM, when a pair is to be started with it."""
    flat = [prompt for prompts in PROMPTS.values() for prompt in prompts]

    @functools.cache
    def made(arch: str) -> Model:
        directory = tmp_path_factory.mktemp("models") / arch
        make_checkpoint(directory, arch)
        answers = iter(reference(directory, flat, MAX_TOKENS))
        expected = {name: [next(answers) for _ in prompts] for name, prompts in PROMPTS.items()}
        return Model(arch, directory, expected)

    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Otherwise the servers of one model would start in two test processes."""
    used = {item.nodeid for item in items if "case" in getattr(item, "fixturenames", ())}
    groups = {group_of(test) for test in used}
    known = {f"{PAIRS}:{model}" for model in PAIR_MODELS}
    assert groups <= known, f"add to TOGETHER in tests/conftest.py: {sorted(groups - known)}"


# Of the session: pytest runs every file's tests with one pair before it starts the next.
@pytest.fixture(scope="session", params=CASES, ids=case_id)
def case(
    request: pytest.FixtureRequest,
    models: Callable[[str], Model],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    arch, flags = request.param
    model = models(arch)
    with pair(tmp_path_factory.mktemp("run"), model.directory, flags) as both:
        yield Case(model, both, flags is not UNCACHED)


@pytest.fixture
def unharmed(case: Case) -> Iterator[None]:
    """What every fault must leave."""
    yield
    check_unharmed(case)


@pytest.fixture
def hasty(case: Case) -> Iterator[Case]:
    """A pair whose decode kvd does not wait for requests."""
    case.pair.restart_target(grant_s=SHORT_S, dispatch_s=SHORT_S)
    yield case
    case.pair.restart_target()
