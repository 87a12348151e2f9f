"""Reports of real links, recorded on idle and on busy machines by `bench/link_sensor.py`, judged
anew: calm links stay clear, stopped processes are not the path's fault, throttled links are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.short_term import adjust
from prfaas.scheduler.state import LinkState
from prfaas.types import LinkStats
from tests.scheduler.views import OUT, state, view

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.jsonl"))


class Head(msgspec.Struct, frozen=True):
    capacity_bps: float
    throttled_bps: float


@dataclass(frozen=True)
class Judged:
    report: LinkStats
    link: LinkState


def replayed(file: Path) -> tuple[Head, list[Judged]]:
    first, *lines = file.read_bytes().splitlines()
    head = msgspec.json.decode(first, type=Head)
    known = state("paper")
    found = []
    for line in lines:
        report = msgspec.json.decode(line, type=LinkStats)
        seen = view(now_s=report.at_s)
        link = seen.links[OUT]._replace(stats=report, capacity_bps=head.capacity_bps)
        known = adjust(known, seen._replace(links={**seen.links, OUT: link}), report.at_s)
        found.append(Judged(report, known.links[OUT]))
    return head, found


def named(part: str) -> list[Path]:
    return [file for file in RECORDED if file.name.startswith(part)]


@pytest.mark.parametrize("file", named("calm") + named("stalls"), ids=lambda file: file.stem)
def test_a_link_that_carries_everything_stays_clear(file: Path) -> None:
    _, found = replayed(file)
    assert sum(judged.report.goodput_bps > 0 for judged in found) > 20, "it was in use"
    assert {judged.link.health.verdict for judged in found} == {LinkVerdict.CLEAR}


@pytest.mark.parametrize("file", named("throttled"), ids=lambda file: file.stem)
def test_a_throttled_link_is_detected_two_seconds_after_its_bytes_begin_to_wait(file: Path) -> None:
    head, found = replayed(file)
    episodes = [
        list(run) for waits, run in groupby(found, lambda h: h.report.waited_s > 0) if waits
    ]
    # Bytes also wait for a moment on a free link; these waits grow.
    episodes = [run for run in episodes if run[-1].report.at_s - run[0].report.at_s > 2]
    assert len(episodes) >= 2, "the link was throttled at least twice"
    for run in episodes:
        begun_s = run[0].report.at_s - run[0].report.waited_s
        then = [judged.link for judged in run if judged.report.at_s <= begun_s + 2.1]
        assert max(link.health.verdict for link in then) > LinkVerdict.CLEAR
        rates = [link.bps for link in then if link.bps is not None]
        assert rates, "no rate was believed"
        assert head.throttled_bps / 2 <= rates[-1] <= head.throttled_bps * 2
