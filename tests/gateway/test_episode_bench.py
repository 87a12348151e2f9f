"""What `bench episode` concludes. The episode itself takes minutes and is run by hand."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.config.deployment import SchedulerSection
from tests.benches import bench

episode = bench("episode")
SLOW = episode.Episode(30.0, 60.0, 0.05)


def run(name: str, *, during: bool, ttft_s: float, after: bool = True, **changed: Any) -> Any:
    """A request a second; every other one is offloaded, in the episode only if `during`."""
    requests = []
    for at_s in range(90):
        even = at_s % 2 == 0
        slow, late = 30 <= at_s < 60, at_s >= 60
        goes = even and (during if slow else after if late else True)
        requests.append(episode.Request(float(at_s), ttft_s if slow else 1.0, goes))
    looks = [
        episode.Look(float(at_s), 2 if 31 <= at_s < 64 else 0, None, 1.0) for at_s in range(90)
    ]
    return episode.Run(name, requests, looks, changed.get("failures", {}))


def test_figures_are_of_before_during_and_after() -> None:
    found = episode.figures(run("adaptive", during=False, ttft_s=5.0), SLOW)
    shares = (found.offloaded_before, found.offloaded_during, found.offloaded_after)
    assert shares == (0.5, 0.0, 0.5)
    assert (found.ttft_before_s.p90, found.ttft_during_s.p90) == (1.0, 5.0)
    assert (found.noticed_s, found.cleared_s, found.resumed_s) == (1.0, 4.0, 0.0)


def test_verdicts_are_against_the_static_run() -> None:
    static = episode.figures(run("static", during=True, ttft_s=20.0), SLOW)
    good = episode.figures(run("adaptive", during=False, ttft_s=12.0), SLOW)
    assert all(episode.verdicts(good, static).values())
    bad = run("adaptive", during=True, ttft_s=12.5, after=False, failures={"HTTP 500": 1})
    assert not any(episode.verdicts(episode.figures(bad, SLOW), static).values())


@pytest.mark.parametrize("name", ["adaptive", "paper"])
def test_the_static_run_has_no_loop(name: str) -> None:
    stated = SchedulerSection()
    assert episode.rules_of("static", stated).paper.limit == 1
    assert episode.rules_of(name, stated).policy == name
    assert episode.rules_of(name, stated).paper == stated.paper
