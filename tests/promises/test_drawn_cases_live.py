"""Drawn cases through real gateway processes over stand-in hosts: what must hold in each of them is
in `live_rules`.

`make test` plays the same few every time, `make promises` many new ones. Failures name the case,
and `conftest.py` the command that plays it again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from tests.promises.cases import Case, cases, describe
from tests.promises.draws import Draw
from tests.promises.live import Played, play
from tests.promises.live_rules import broken_rules

# A case takes seconds, and on the busiest machine a minute or two; only a hang takes so long.
pytestmark = pytest.mark.timeout(1800)

DRAWN_BEFORE = 16  # the first draws of a seed are the plainest, and much alike
EVENTS = 2  # of a case, where one of these draws has so many
SHOWN = 12  # broken rules of a case
LOG_CHARS = 6000


def live_cases(draw: Draw) -> list[Case]:
    """Each with a seed of its own, so that no two are variations of each other."""
    seeds = random.Random(f"live {draw.seed} {draw.chunk}")
    return [_last_of(seeds.getrandbits(32)) for _ in range(draw.cases)]


def _last_of(seed: int) -> Case:
    found: list[Case] = []

    @hypothesis_seed(seed)
    @settings(
        max_examples=DRAWN_BEFORE,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(live=True))
    def draw_one(case: Case) -> None:
        found.append(case)

    draw_one()
    eventful = [case for case in found if len(case.events) >= EVENTS]
    return (eventful or found)[-1]


def test_every_promise_holds(live: Draw, tmp_path: Path) -> None:
    failed = []
    for number, case in enumerate(live_cases(live)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            played = asyncio.run(play(case, folder))
        except Exception as error:
            failed.append(f"case {number}\n{describe(case)}\n{error!r}")
            continue
        shutil.rmtree(folder)
        if broken := broken_rules(played):
            failed.append(f"case {number}\n{_shown(played, broken)}")
    assert not failed, "\n\n".join(failed)


def _shown(played: Played, broken: list[str]) -> str:
    ends = dict(Counter(one.end for one in played.asked))
    lines = [describe(played.case), f"  requests: {ends}", *broken[:SHOWN], played.log(LOG_CHARS)]
    return "\n".join(lines)
