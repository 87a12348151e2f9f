"""What the demo computes and claims from what it saw; the demo itself is `make demo`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from prfaas.config import load_deployment
from prfaas.config.write import deployment_toml
from prfaas.demo.case_study import SCALES, with_doubled_threshold
from prfaas.demo.serving import ServedPrompt, with_fixed_threshold
from prfaas.demo.serving import _checks as serving_checks
from prfaas.demo.shared import RelayReader, run_watched
from prfaas.demo.small_case import small_case
from prfaas.launch.children import ChildDied, Children, Command
from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas.measure.client import TimedResponse
from prfaas.scheduler.plan import find_optimum
from prfaas.studies.problem_files import Study
from prfaas.wan.stats import RelayStats
from tests.cli.runner import Result
from tests.launch.test_request_outcomes import line

Run = Callable[..., Result]
CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"


def test_a_doubled_threshold_is_what_the_gateway_plans(tmp_path: Path) -> None:
    case = small_case(load_deployment(CASE_STUDY), CASE_STUDY, tmp_path, SCALES)
    plan = find_optimum(case.problem)
    doubled = with_doubled_threshold(case.deployment, case.problem)
    file = tmp_path / "doubled.toml"
    file.write_text(deployment_toml(doubled))
    made = find_optimum(Study(file, "exact").problem(load_deployment(file)))
    assert made.threshold_tokens == 2 * plan.threshold_tokens
    assert made.n_prefill == plan.n_prefill


def test_the_first_scene_keeps_the_plans_threshold() -> None:
    rules = with_fixed_threshold(load_deployment(CASE_STUDY)).scheduler
    assert (rules.policy, rules.paper.limit) == ("paper", 1.0)


def test_the_option_that_makes_the_comparison_fail_is_not_advertised(prfaas: Run) -> None:
    assert "threshold" not in prfaas("demo", "--help").out.partition("Options:")[2]


def served(what: str, route: str, *, tokens: list[int], cached: int = 0) -> ServedPrompt:
    outcomes = RequestOutcomes()
    outcomes.read_line(line(route=route, cached_tokens=cached))
    answer = TimedResponse(0.0, token_ids=tokens, event_times_s=[1.0])
    return ServedPrompt(what, [1, 2], answer, outcomes.latest[0], 0, expected=[7])


def test_claims_about_served_prompts() -> None:
    good = [
        served("short", "local", tokens=[7]),
        served("short, second turn", "local", tokens=[7], cached=64),
        served("long", "remote", tokens=[7]),
    ]
    assert all(check.held for check in serving_checks(good, good))
    wrong = [
        served("short", "remote", tokens=[7]),
        served("short, second turn", "local", tokens=[8]),
        served("long", "remote", tokens=[7]),
    ]
    assert not any(check.held for check in serving_checks(wrong, wrong))


async def test_a_relays_counters_go_to_who_asked(tmp_path: Path) -> None:
    relay_reader = RelayReader()

    async with Children(tmp_path, ["/bin/sh"]) as children:
        stats = msgspec.json.encode(RelayStats(1, 1, 0, 70, 0, 0, 0, 0)).decode()
        script = (
            'echo up at x; echo \'{"event":"other"}\'; '
            f"while read w; do n=$((n+1)); echo '{stats}' | sed s/70/${{n}}000/; done"
        )
        relay = await children.start(
            Command("relay", ["-c", script], lambda line: None, on_line=relay_reader.read_line)
        )
        assert await relay_reader.carried_bytes(relay) == 1000
        assert await relay_reader.carried_bytes(relay) == 2000


async def test_work_ends_when_a_process_does(tmp_path: Path) -> None:
    with pytest.raises(ChildDied, match="one ended with code 4"):
        async with Children(tmp_path, ["/bin/sh"]) as children:
            await children.start(Command("one", ["-c", "exit 4"], lambda line: None))
            await run_watched(children, asyncio.sleep(1000))
