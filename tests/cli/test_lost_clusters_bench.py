"""What `bench lost_clusters` concludes from what it has seen. The runs themselves are live."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.clock import MonotonicClock
from prfaas.engine.emulated.pace import Scales
from prfaas.scheduler.homes.plans import solve_network
from tests.benches import bench

# The script's neighbours, under the names by which the script itself imports them.
bench("lost_clusters")
import _agree_regions as regions  # noqa: E402
import _lost_flood as flood  # noqa: E402
import _lost_modes as modes  # noqa: E402
import _lost_requests as requests  # noqa: E402
import _lost_watch as watch  # noqa: E402

CLUSTER_OF = {
    **{"east-0": "east", "east-1": "east", "west-0": "west"},
    **{"north-0": "north", "south-0": "south"},
}
LIVE = {"east": 2, "west": 1, "north": 1, "south": 1}
HOMES = ["east", "west"]


def asked(sent_s: float = 10.0, home: str = "east", **changed: Any) -> Any:
    """A request that has completed."""
    fields = {"first_s": sent_s + 1, "ended_s": sent_s + 2, "got_tokens": 8, "error": None}
    return requests.Asked("lost-1", home, sent_s, 8, **(fields | changed))


def line(decode: str = "east-0", **changed: Any) -> Any:
    fields: dict[str, Any] = {
        **{"id": "lost-1", "outcome": "broken", "route": "local", "reason": "short"},
        **{"prefill": "east-1", "decode": decode, "prompt_tokens": 9, "cached_tokens": 0},
        **{"output_tokens": None, "bytes": 0, "attempts": 1, "ttft_s": None, "total_s": 1.0},
    }
    return requests.RequestOutcome(**(fields | changed))


def nodes_lost(cluster: str = "west", from_s: float = 11.0, until_s: float = 50.0) -> Any:
    return requests.Loss(cluster, "nodes", from_s, until_s)


# Requests -----------------------------------------------------------------------------------------


def verdict(one: Any, found: Any, *losses: Any) -> str:
    return str(requests.judge(one, found, losses, CLUSTER_OF))


def test_a_whole_answer_is_completed() -> None:
    assert verdict(asked(), None, nodes_lost("east")) == "completed"


def test_an_answer_with_too_few_tokens_has_failed() -> None:
    assert verdict(asked(got_tokens=7), line(), nodes_lost("west")) == "failed"


def test_a_stream_is_excused_only_where_its_decode_node_was_killed_meanwhile() -> None:
    broken = asked(error="stream failed upstream_failed")
    assert verdict(broken, line("west-0"), nodes_lost("west")) == "excused"
    assert verdict(broken, line("east-0"), nodes_lost("west")) == "failed"
    assert verdict(broken, line("west-0"), nodes_lost("west", 13.0)) == "failed", "killed later"
    assert verdict(broken, line("west-0"), nodes_lost("west", 1.0, 9.0)) == "failed", "returned"
    assert verdict(broken, None, nodes_lost("west")) == "failed", "nobody knows where it was"
    assert verdict(broken, line("west-0")) == "failed"


def test_a_request_that_is_sent_to_a_node_which_is_known_to_be_dead_has_failed() -> None:
    killed = nodes_lost("west", 11.0)
    late = 11.0 + requests.DETECTION_S
    for sent_s, expected in ((late - 0.1, "excused"), (late + 0.1, "failed")):
        refused = asked(sent_s, error="HTTP 503 upstream_failed", first_s=None)
        assert verdict(refused, line("west-0"), killed) == expected
    short = nodes_lost("west", 11.0, 12.0)
    after = asked(13.0, error="HTTP 503 upstream_failed", first_s=None)
    assert verdict(after, line("west-0"), short) == "failed", "the nodes have returned"


def test_a_lost_prefill_node_excuses_nothing() -> None:
    refused = asked(error="HTTP 503 upstream_failed", first_s=None)
    assert verdict(refused, line("east-0", prefill="north-0"), nodes_lost("north")) == "failed"


def test_requests_at_a_killed_gateway_are_excused() -> None:
    loss = requests.Loss("east", "gateway", 11.0, 50.0)
    refused = asked(20.0, error="cannot connect", first_s=None)
    assert verdict(refused, None, loss) == "excused"
    assert verdict(asked(error="connection lost (ClientPayloadError)"), None, loss) == "excused"
    assert verdict(replace(refused, home="west"), None, loss) == "failed"
    assert verdict(asked(60.0, error="cannot connect"), None, loss) == "failed", "it has returned"


@pytest.mark.parametrize(
    "error", ["timeout", "stream cut short", "HTTP 503", "stream failed", "no token"]
)
def test_an_unclear_error_is_counted_apart(error: str) -> None:
    assert verdict(asked(error=error), line("west-0"), nodes_lost("west")) == "unclear"


def test_a_request_without_an_outcome_has_failed() -> None:
    unended = asked(ended_s=None, got_tokens=0)
    assert verdict(unended, None) == "failed"
    assert verdict(unended, line("west-0"), nodes_lost("west")) == "unclear"


def test_a_tally_accounts_for_every_request() -> None:
    some = [
        replace(asked(), id="lost-1"),
        replace(asked(error="HTTP 503 upstream_failed", first_s=None), id="lost-2"),
        replace(asked(error="stream failed upstream_failed"), id="lost-3"),
        replace(asked(error="timeout"), id="lost-4"),
    ]
    lines = {"lost-2": line("west-0"), "lost-3": line("west-0"), "lost-4": line("east-0")}
    found = requests.tally(some, lines, [nodes_lost("west")], CLUSTER_OF)
    assert (found.requests, found.completed, found.excused) == (4, 1, 2)
    assert found.excused_before_tokens == 1
    assert found.errors == {"HTTP 503 upstream_failed": 1, "stream failed upstream_failed": 1}
    assert len(found.failed) == 1 and "lost-4 of east: timeout" in found.failed[0]
    assert found.unclear == []


def test_lines_of_gateways_are_kept_by_id() -> None:
    lines = requests.GatewayLines()
    fields = {name: getattr(line(), name) for name in line().__struct_fields__}
    text = json.dumps(fields, separators=(",", ":"))
    for read in (f"INFO {text}", "{}", '{"id":"lost-2"', '{"id":"req-7"}', text[:40]):
        lines.read_line(read)
    assert lines.found == {"lost-1": line()}


def test_the_rate_is_back_when_first_tokens_keep_up_with_requests() -> None:
    lost = [asked(float(at), first_s=None) for at in range(10, 20)]
    late = [asked(float(at), first_s=31.0) for at in range(20, 30)]
    well = [asked(float(at), first_s=at + 0.5) for at in range(30, 60)]
    found = requests.rate_back_at([*lost, *late, *well], 12.0, 60.0, 10.0, 0.9)
    assert found is not None and 30.0 < found <= 32.0
    assert requests.rate_back_at(lost, 12.0, 60.0, 10.0, 0.9) is None


def test_the_rate_is_not_back_if_it_falls_again_before_the_phase_ends() -> None:
    well = [asked(float(at), first_s=at + 0.5) for at in range(10, 50)]
    lost = [asked(float(at), first_s=None) for at in range(50, 60)]
    assert requests.rate_back_at([*well, *lost], 20.0, 49.0, 10.0, 0.9) == 20.0
    assert requests.rate_back_at([*well, *lost], 20.0, 60.0, 10.0, 0.9) is None


def test_first_tokens_of_before_the_kill_do_not_count_as_service_after_it() -> None:
    before = [asked(float(at), first_s=at + 0.5) for at in range(60)]
    unserved = [asked(float(at), first_s=None) for at in range(60, 105)]
    served = [asked(float(at), first_s=at + 0.5) for at in range(60, 105)]
    # The plan is followed at once, while the window still holds what was served before.
    assert modes.rate_back_s([*before, *unserved], 60.5, 60.0, 105.0) is None
    assert modes.rate_back_s(before, 60.5, 60.0, 105.0) is None, "no request shows anything"
    assert modes.rate_back_s([*before, *served], 60.5, 60.0, 105.0) == modes.WINDOW_S
    assert modes.rate_back_s([*before, *served], 80.0, 60.0, 105.0) == 20.0
    assert modes.rate_back_s([*before, *served], None, 60.0, 105.0) is None


# Gateways -----------------------------------------------------------------------------------------


def state(plans: bool = False, epoch: int = 3, **lost: int) -> dict[str, Any]:
    """The state of a gateway that follows the plan of the nodes that are not lost."""
    live = LIVE | lost
    remotes = {name: live[name] for name in ("north", "south")}
    used = {"alive": True, "in_use": True, "running": 2, "waiting": 1}
    return {
        "plan": {
            "made": True,
            "homes": {
                home: {
                    "made": True,
                    "threshold_tokens": 20_000,
                    "roles": {
                        f"{home}-{n}": "decode" if n == 0 else "prefill" for n in range(live[home])
                    },
                    "instances": {**remotes, home: live[home]},
                }
                if live[home]
                else {"made": False, "reason": "no node"}
                for home in HOMES
            },
        },
        "planner": {"cluster": "east", "epoch": epoch, "here": plans},
        "clusters": [
            {
                "cluster": name,
                "drained": name == "south",
                "nodes": [
                    {"node": f"{name}-{n}", **(used if n < count else {"alive": False})}
                    for n in range(LIVE[name])
                ],
            }
            for name, count in live.items()
        ],
    }


def seen(plans: bool = False, epoch: int = 3, **lost: int) -> Any:
    return watch.read_state(state(plans, epoch, **lost))


def test_a_state_is_read() -> None:
    found = seen(plans=True)
    assert (found.plans, found.epoch, found.planner) == (True, 3, "east")
    assert found.in_use == LIVE
    assert found.requests["east"] == 6
    assert found.drained == {"south"}


def wanted(live: dict[str, int] = LIVE, splits: Any = None) -> Any:
    return watch.Wanted(live, HOMES, splits)


def changed_plan(found: Any, home: str = "east", **changed: Any) -> Any:
    """The same gateway with another plan for one home."""
    return replace(found, homes={**found.homes, home: found.homes[home]._replace(**changed)})


def test_a_gateway_follows_the_plan_of_what_is_left() -> None:
    assert watch.follows(seen(), wanted())
    for cluster in ("north", "west"):
        left = wanted(LIVE | {cluster: 0})
        assert watch.follows(seen(**{cluster: 0}), left)
        assert not watch.follows(seen(), left)
        assert not watch.follows(seen(**{cluster: 0}), wanted())


def test_a_plan_that_counts_on_lost_nodes_is_not_followed() -> None:
    stale = replace(seen(north=0), homes=seen().homes)
    assert not watch.follows(stale, wanted(LIVE | {"north": 0}))


def test_the_full_plan_has_the_splits_of_before_the_loss() -> None:
    samples = [
        watch.Sample(1.0, "east", changed_plan(seen(), roles={"east-0": "decode"})),
        watch.Sample(2.0, "east", seen()),
        watch.Sample(2.5, "west", None),
        watch.Sample(4.0, "east", seen(west=0)),
    ]
    splits = watch.splits_before(samples, 3.0)
    assert splits == {"east": {"decode": 1, "prefill": 1}, "west": {"decode": 1}}
    with pytest.raises(ValueError, match="no gateway"):
        watch.splits_before(samples, 0.5)
    assert watch.follows(seen(), wanted(splits=splits))
    swapped = changed_plan(seen(), roles={"east-0": "prefill", "east-1": "decode"})
    assert watch.follows(swapped, wanted(splits=splits)), "other nodes, the same split"
    converted = changed_plan(seen(), roles={"east-0": "decode", "east-1": "decode"})
    assert watch.follows(converted, wanted())
    assert not watch.follows(converted, wanted(splits=splits))


@pytest.mark.parametrize(
    "changed",
    [
        {"threshold_tokens": 19_999},
        {"roles": {"east-0": "prefill", "east-1": "decode"}},
        {"instances": {"east": 2, "north": 1, "south": 1, "more": 1}},
    ],
)
def test_gateways_with_different_plans_do_not_follow_one_plan(changed: dict[str, Any]) -> None:
    other = changed_plan(seen(), **changed)
    assert watch.follows(other, wanted())
    assert watch.all_follow([seen(), seen()], wanted())
    assert not watch.all_follow([seen(), other], wanted())
    assert not watch.all_follow([seen(), None], wanted())


def test_the_plan_of_a_cluster_without_nodes_is_not_compared() -> None:
    kept = replace(seen(west=0), homes={**seen(west=0).homes, "west": seen().homes["west"]})
    assert watch.all_follow([seen(west=0), kept], wanted(LIVE | {"west": 0}))


def test_all_gateways_have_to_follow_and_to_stay_with_it() -> None:
    left = wanted(LIVE | {"north": 0})
    samples = [
        watch.Sample(1.0, "east", seen()),
        watch.Sample(2.0, "east", seen(north=0)),
        watch.Sample(2.1, "west", None),
        watch.Sample(3.0, "west", seen(north=0)),
        watch.Sample(9.0, "west", seen()),
    ]
    assert watch.all_follow_at(samples, HOMES, left, 1.0, 5.0) == 3.0
    assert watch.all_follow_at(samples, ["east"], left, 1.0, 5.0) == 2.0
    assert watch.all_follow_at(samples, HOMES, left, 1.0, 9.5) is None, "it went back"
    assert watch.all_follow_at(samples[:3], HOMES, left, 1.0, 5.0) is None, "one is silent"


def test_gateways_may_differ_only_while_a_plan_is_on_its_way() -> None:
    newer = changed_plan(seen(), threshold_tokens=30_000)
    apart = [
        watch.Sample(1.0, "east", seen()),
        watch.Sample(1.1, "west", seen()),
        watch.Sample(5.0, "east", newer),
    ]
    soon = [*apart, watch.Sample(5.5, "west", newer)]
    late = [
        *apart,
        watch.Sample(5.1 + watch.SPREADS_S, "west", seen()),
        watch.Sample(8.0, "west", newer),
    ]
    assert watch.all_follow_at(soon, HOMES, wanted(), 0.0, 9.0) == 1.1
    assert watch.all_follow_at(late[:-1], HOMES, wanted(), 0.0, 9.0) is None
    assert watch.all_follow_at(late, HOMES, wanted(), 0.0, 9.0) == 8.0
    never_one = [watch.Sample(1.0, "east", seen()), watch.Sample(1.1, "west", newer)]
    assert watch.all_follow_at(never_one, HOMES, wanted(), 0.0, 9.0) is None


def test_a_drained_cluster_is_empty_when_each_gateway_has_said_so_several_times() -> None:
    def look(at_s: float, gateway: str, left: int = 0, drained: str = "south") -> Any:
        found = replace(seen(), requests={"south": left}, drained=frozenset([drained]))
        return watch.Sample(at_s, gateway, found)

    def found(*samples: Any) -> float | None:
        at_s: float | None = watch.empty_at(samples, HOMES, "south", 1.0, 2)
        return at_s

    one_by_one = [look(1.0, "east"), look(1.1, "west"), look(1.5, "east"), look(1.6, "west")]
    assert found(*one_by_one) == 1.6
    assert found(*one_by_one[:3]) is None, "one look of west is one look, however often it is read"
    assert found(look(0.5, "west"), *one_by_one[:3]) is None, "before the order"
    assert found(*one_by_one[:3], watch.Sample(1.6, "west", None)) is None
    assert found(*one_by_one[:3], look(1.55, "east", 1), one_by_one[3]) is None, "a request came"
    assert found(*one_by_one[:3], look(1.6, "west", 0, "north")) is None, "it is not drained there"


class Failing:
    """Answers once, and then fails in a way that the watch does not expect."""

    def __init__(self) -> None:
        self.asked = 0

    async def request_json(self, *_: object, **__: object) -> dict[str, Any]:
        self.asked += 1
        return state() if self.asked == 1 else {}


class Ticks:
    """A clock that moves on whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        self.now_s += 1.0
        return self.now_s


async def test_an_unexpected_error_of_the_watch_ends_the_work() -> None:
    watching_all = watch.Watch({"east": "http://east"}, Failing(), Ticks())
    watching = asyncio.create_task(watching_all.run())
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(30):
            await watch.beside(watching, asyncio.Event().wait())
    assert raised.group_contains(KeyError)
    assert [sample.gateway for sample in watching_all.samples] == ["east"]


async def test_work_beside_a_watch_returns_its_result() -> None:
    watching = asyncio.create_task(asyncio.sleep(3600))
    assert await watch.beside(watching, asyncio.sleep(0, "done")) == "done"
    assert not watching.done()
    watching.cancel()


async def test_a_sample_is_stamped_after_the_answer() -> None:
    clock, answered_s = Ticks(), []

    class Slow:
        async def request_json(self, *_: object, **__: object) -> dict[str, Any]:
            if answered_s:
                raise ZeroDivisionError
            answered_s.append(clock.now())
            return state()

    watching = watch.Watch({"east": "http://east"}, Slow(), clock)
    with pytest.raises(ExceptionGroup):
        await watching.run()
    assert [sample.at_s > answered_s[0] for sample in watching.samples] == [True]


def test_planners_and_their_epochs_are_found() -> None:
    samples = [
        watch.Sample(1.0, "east", seen(plans=True, epoch=3)),
        watch.Sample(2.0, "west", seen(plans=False, epoch=3)),
        watch.Sample(6.0, "west", seen(plans=True, epoch=4)),
    ]
    assert modes.planner_of(samples[:2], HOMES) == ("east", 3)
    assert watch.planner_since(samples, ["west"], 3, 1.5).at_s == 6.0
    assert watch.planner_since(samples, ["west"], 4, 1.5) is None
    assert watch.planners_by_epoch(samples) == {3: ["east"], 4: ["west"]}
    assert watch.shared_epochs(samples) == {}
    both = [*samples, watch.Sample(7.0, "east", seen(plans=True, epoch=4))]
    assert watch.shared_epochs(both) == {4: ["east", "west"]}


def planning(gateway: str, times_s: list[float], epoch: int = 3, plans: bool = True) -> list[Any]:
    return [watch.Sample(at_s, gateway, seen(plans, epoch)) for at_s in times_s]


def test_two_gateways_do_not_plan_at_the_same_time_whatever_their_epochs() -> None:
    east = planning("east", [1.0, 1.5, 2.0, 2.5])
    assert watch.planned_together(east) == []
    # The last answer of east may be as old as the one before it.
    assert watch.planned_together([*east, *planning("west", [2.1, 2.6, 3.1], 4)]) == []
    found = watch.planned_together([*east, *planning("west", [1.4, 1.9, 2.4], 4)])
    assert found == ["east and west for 0.5 s"]
    again = [*east, watch.Sample(3.0, "east", None), *planning("east", [9.0, 9.5, 10.0], 5)]
    assert watch.planned_together([*again, *planning("west", [4.0, 6.0, 8.0], 4)]) == []
    gave_up = [*east, *planning("east", [3.0], plans=False), *planning("east", [9.0, 9.5], 5)]
    assert watch.planned_together([*gave_up, *planning("west", [4.0, 6.0, 8.0], 4)]) == []


# Goals --------------------------------------------------------------------------------------------


def step(**changed: Any) -> Any:
    tally = requests.Tally(100, 97, 3, 0, [], [], {})
    found = modes.Step("cluster west", 0.7, tally, 2.0, 12.0, 5.0, 4.0, 9.0, 3.0, {}, [])
    return replace(found, **changed)


def missed(checks: list[Any]) -> list[str]:
    return [check.claim for check in checks if not check.held]


def test_the_goals_of_a_loss() -> None:
    assert missed(modes.step_checks(step())) == []
    assert missed(modes.step_checks(step(used_again=2))) == []
    assert missed(modes.step_checks(step(used_again=0))) == ["cluster west: serves again"]
    assert missed(modes.step_checks(step(planner_s=4.0, epochs=(3, 4)))) == []
    bad = step(
        tally=requests.Tally(100, 97, 1, 0, ["one"], ["another"], {}),
        left_plan_s=31.0,
        left_rate_s=None,
        full_plan_s=61.0,
        full_rate_s=None,
        shared_epochs={4: ["east", "west"]},
        planned_together=["east and west for 1.0 s"],
        planner_s=None,
        epochs=(3, 0),
    )
    checks = modes.step_checks(bad)
    assert len(missed(checks)) == len(checks) == 10


def test_the_goals_of_a_drain() -> None:
    tally = requests.Tally(50, 50, 0, 0, [], [], {})
    good = modes.Drain("west", 0.5, tally, 20.0, 3.0, 3.0, 8, 0, 4)
    assert missed(modes.drain_checks(good)) == []
    bad = modes.Drain(
        "west", 0.5, requests.Tally(50, 49, 1, 0, [], [], {}), None, None, 61.0, 8, 1, 0
    )
    assert len(missed(modes.drain_checks(bad))) == 6


def test_a_request_is_served_elsewhere_only_in_place_of_the_drained_cluster() -> None:
    def elsewhere(drained: str, one: Any, found: Any) -> bool:
        return bool(modes.is_served_elsewhere(one, found, drained, HOMES, CLUSTER_OF))

    offloaded, local = line("east-0", prefill="south-0"), line("east-0", prefill="east-1")
    assert elsewhere("north", asked(), offloaded)
    assert not elsewhere("north", asked(), local), "it would not have used a PrfaaS cluster"
    assert not elsewhere("south", asked(), offloaded)
    assert elsewhere("west", asked(home="west"), local)
    assert not elsewhere("west", asked(home="east"), local)
    assert not elsewhere("west", asked(home="west"), line("west-0"))
    assert not elsewhere("north", asked(error="timeout"), offloaded)
    assert not elsewhere("north", asked(), None)
    assert not elsewhere("north", asked(), line("", prefill=""))


def home_phase(name: str, first_tokens: int, p90_s: float, failed: int = 0) -> Any:
    rps = first_tokens / 144
    return flood.HomePhase(name, 1.1, 1.0, first_tokens, rps, p90_s, failed, [])


CALM = [home_phase("east", 140, 2.0), home_phase("west", 140, 2.0)]


def test_the_goals_of_a_flood() -> None:
    during = [home_phase("east", 50, 60.0, 7), home_phase("west", 127, 2.9)]
    checks = flood.flood_checks(flood.Flood("east", 180.0, CALM, during))
    assert missed(checks) == []
    assert "90.7% of the calm phase, 80.2% of the planned rate" in [check.seen for check in checks]
    bad = [home_phase("east", 125, 3.1, 1), home_phase("west", 200, 9.0)]
    assert missed(flood.flood_checks(flood.Flood("west", 180.0, CALM, bad))) == [
        "east: no request fails",
        "east keeps its rate within 10% while west floods",
        "east: P90 TTFT within 1.5x of the calm phase",
    ]


@pytest.mark.parametrize(("calm", "during"), [(99, 140), (140, 99)])
def test_a_flood_with_too_few_first_tokens_is_void(calm: int, during: int) -> None:
    phases = [[home_phase("east", count, 2.0)] for count in (calm, during)]
    found = flood.Flood("west", 180.0, *phases)
    first, *others = flood.flood_checks(found)
    assert (first.claim, first.held) == ("the run is void", False)
    name = "calm" if calm < during else "flood"
    assert f"east has 99 first tokens in the {name} phase" in first.seen
    assert "give --seconds 182 or more" in first.seen
    assert [check.held for check in others] == [True, None, None]
    enough = [[home_phase("east", 100, 2.0)]] * 2
    assert flood.void_lines(flood.Flood("west", 180.0, *enough)) == []
    silent = [[home_phase("east", 0, 2.0)]] * 2
    assert "give --seconds 360" in flood.void_lines(flood.Flood("west", 180.0, *silent))[0]


def test_a_phase_counts_each_home_after_its_queues_have_settled() -> None:
    some = [asked(float(at), first_s=at + 2.0) for at in range(1, 101)]
    some += [asked(float(at), "west", first_s=None, error="HTTP 503 x") for at in range(2, 101, 2)]
    planned = {"east": 1.2, "west": 0.6}
    east, west = flood.home_phases(some, planned, 0.0, 100.0, {}, CLUSTER_OF)
    assert (east.home, east.planned_rps, east.failed, west.failed) == ("east", 1.2, 0, 50)
    assert (east.offered_rps, east.first_tokens, east.first_tokens_rps) == (1.0, 80, 1.0)
    assert east.p90_ttft_s == pytest.approx(2.0)
    assert (west.first_tokens, west.first_tokens_rps) == (0, 0.0)
    assert len(west.failures) == flood.EXAMPLES


def test_an_answer_with_too_few_tokens_fails_in_a_flood() -> None:
    some = [asked(50.0), asked(51.0, got_tokens=7), asked(52.0, ended_s=None)]
    (east,) = flood.home_phases(some, {"east": 1.0}, 0.0, 100.0, {}, CLUSTER_OF)
    assert east.failed == 2
    assert "7 tokens (of 8 tokens)" in east.failures[0]


class Recorded:
    """A gateway that answers at once, and remembers what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.salts: set[str] = set()
        self.ids: list[str] = []

    async def complete(self, body: bytes, limit: float, request_id: str, **_: Any) -> Any:
        read = json.loads(body)
        self.prompts.append((read["prompt"], read["max_tokens"]))
        self.salts.add(read["cache_salt"])
        self.ids.append(request_id)
        return SimpleNamespace(error=None, output_tokens=read["max_tokens"], ended_s=1.0)


async def test_loads_with_one_seed_send_a_home_the_same_requests(tmp_path: Path) -> None:
    case = regions.two_by_two(tmp_path, Scales(2.0, 1 / 128, 1 / 32), "paper")
    workloads = {home.cluster: home.problem.workload for home in case.problem.homes}
    found = []
    for west_rps in (1000.0, 3000.0):
        targets = {home: Recorded() for home in HOMES}
        one = requests.Load(targets, workloads, "model", MonotonicClock(), 7)
        one.start({"east": 1000.0, "west": west_rps}, 0.01)
        await one.sent()
        await one.stop()
        found.append(targets["east"])
    calm, flooded = found
    assert calm.prompts == flooded.prompts != []
    assert not calm.salts & flooded.salts, "the second phase finds nothing in a cache"
    assert not set(calm.ids) & set(flooded.ids), "a line of one load is not one of the other"


def test_the_rate_that_is_left_is_that_of_the_plan_without_the_lost_cluster(
    tmp_path: Path,
) -> None:
    case = regions.two_by_two(tmp_path, Scales(2.0, 1 / 128, 1 / 32), "paper")
    network = case.problem
    whole = modes.rate_left_rps(network, None, "paper")
    assert whole == pytest.approx(solve_network(network).rate_rps)
    for lost in ("north", "south", "east", "west"):
        assert 0 < modes.rate_left_rps(network, lost, "paper") < whole
    # The larger PD cluster serves more than the smaller one.
    left = [modes.rate_left_rps(network, lost, "paper") for lost in ("west", "east")]
    assert left[0] > left[1]
    assert sum(modes.rates_of(network, whole).values()) == pytest.approx(whole)
