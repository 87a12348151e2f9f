"""What the demo computes and claims from what it saw; the demo itself is `make demo`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prfaas.cli.demo_case import Row, _checks
from prfaas.cli.demo_scene import RelayEar, watched
from prfaas.cli.demo_serving import Served
from prfaas.cli.demo_serving import _checks as serving_checks
from prfaas.cli.small_case import Seen
from prfaas.launch.children import ChildDied, Children, Command
from prfaas.launch.stories import Stories
from prfaas.measure.client import Answer
from tests.launch.test_stories import line


def row(system: str, live: float, **changed: object) -> Row:
    fields: dict[str, object] = {"egress_gbps": None, "failures": {}, **changed}
    return Row(system, Seen(40, live, 1, 2), Seen(40, 2.0, 1, 2), 3.0, **fields)  # type: ignore[arg-type]


def test_claims_about_the_case_study() -> None:
    held = _checks([row("prfaas_pd", 3.0), row("homogeneous", 2.0), row("naive", 2.5)])
    assert all(check.held for check in held) and "1.50x homogeneous PD" in held[1].seen
    failed = _checks([row("prfaas_pd", 2.0, failures={"HTTP 500": 3}), row("homogeneous", 2.5)])
    assert not any(check.held for check in failed) and "HTTP 500" in failed[0].seen


def served(what: str, route: str, *, tokens: list[int], cached: int = 0) -> Served:
    stories = Stories()
    stories.heard(line(route=route, cached_tokens=cached))
    answer = Answer(0.0, token_ids=tokens, moments_s=[1.0])
    return Served(what, [1, 2], answer, stories.latest[0], 0, expected=[7])


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


def test_a_relays_counters_go_to_who_asked(tmp_path: Path) -> None:
    ear = RelayEar()

    async def run() -> list[int]:
        async with Children(tmp_path, ["/bin/sh"]) as children:
            script = (
                'echo up at x; while read w; do n=$((n+7)); echo "$n,000 bytes to the target"; done'
            )
            relay = await children.start(
                Command("relay", ["-c", script], r"at (\S+)", heard=ear.heard)
            )
            return [await ear.carried_bytes(relay), await ear.carried_bytes(relay)]

    assert asyncio.run(run()) == [7000, 14000]


def test_work_ends_when_a_process_does(tmp_path: Path) -> None:
    async def run() -> None:
        async with Children(tmp_path, ["/bin/sh"]) as children:
            await children.start(Command("one", ["-c", "exit 4"], r"at (\S+)"))
            await watched(children, asyncio.sleep(1000))

    with pytest.raises(ChildDied, match="one ended with code 4"):
        asyncio.run(run())
