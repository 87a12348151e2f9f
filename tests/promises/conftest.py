"""Drawn cases: their seed, how many of them, and how to draw them again."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.promises.draws import LIVE_OF_CHUNK, RARELY, RARELY_OF_CHUNK, SIMULATED_OF_CHUNK, chunks

# Of `make test`, whose cases are always the same. `make promises` states others.
SEED, CASES, LIVE = 1, 200, 5
DRAWS = ("simulated", "simulated_rarely", "live")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("promises", "drawn cases of tests/promises")
    group.addoption("--seed", type=int, default=SEED, help="What they are drawn with.")
    group.addoption("--cases", type=int, default=CASES, help="Cases in the simulator.")
    group.addoption("--live", type=int, default=LIVE, help="Cases with a real gateway.")
    group.addoption("--as-drawn", action="store_true", help="Do not make failures smaller.")


def _drawn(config: pytest.Config) -> tuple[int, int, int]:
    """Seed, simulated and live cases. Where pytest collects all tests, it reads this file after its
    options."""
    options = (("seed", SEED), ("cases", CASES), ("live", LIVE))
    seed, cases, live = (config.getoption(name, default) for name, default in options)
    return seed, cases, live


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed, cases, live = _drawn(metafunc.config)
    shrinks = not metafunc.config.getoption("as_drawn", default=False)
    found = {
        "simulated": chunks(seed, cases, SIMULATED_OF_CHUNK),
        "simulated_rarely": chunks(seed, max(1, cases // RARELY), RARELY_OF_CHUNK),
        "live": chunks(seed, live, LIVE_OF_CHUNK),
    }
    for name in DRAWS:
        if name in metafunc.fixturenames:
            draws = [draw._replace(shrinks=shrinks) for draw in found[name]]
            metafunc.parametrize(name, draws, ids=str)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed and set(DRAWS) & set(getattr(item, "fixturenames", ())):
        seed, cases, live = _drawn(item.config)
        every = f"make promises SEED={seed} CASES={cases} LIVE={live}"
        one = f"python -m pytest '{item.nodeid}' --seed {seed} --cases {cases} --live {live}"
        report.sections.append(("draw it again", f"{every}\nor only this chunk:\n{one}"))
