"""What `bench lost_clusters` concludes from what it has seen. The runs themselves are live."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.emulated.pace import Scales
from prfaas.scheduler.homes.plans import solve_network
from tests.benches import bench

# The script's neighbours, under the names by which the script itself imports them.
bench("lost_clusters")
import _agree_regions as regions  # noqa: E402
import _lost_modes as modes  # noqa: E402
import _lost_requests as requests  # noqa: E402
import _lost_watch as watch  # noqa: E402

CLUSTER_OF = {"east-0": "east", "east-1": "east", "west-0": "west", "north-0": "north"}
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
                home: {"made": True, "instances": {**remotes, home: live[home]}}
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


def test_a_gateway_follows_the_plan_of_what_is_left() -> None:
    assert watch.follows(seen(), LIVE, HOMES)
    for cluster in ("north", "west"):
        left = LIVE | {cluster: 0}
        assert watch.follows(seen(**{cluster: 0}), left, HOMES)
        assert not watch.follows(seen(), left, HOMES)
        assert not watch.follows(seen(**{cluster: 0}), LIVE, HOMES)


def test_a_plan_that_counts_on_lost_nodes_is_not_followed() -> None:
    stale = replace(seen(north=0), instances=seen().instances)
    assert not watch.follows(stale, LIVE | {"north": 0}, HOMES)


def test_all_gateways_have_to_follow_and_to_stay_with_it() -> None:
    left = LIVE | {"north": 0}
    samples = [
        watch.Sample(1.0, "east", seen()),
        watch.Sample(2.0, "east", seen(north=0)),
        watch.Sample(2.1, "west", None),
        watch.Sample(3.0, "west", seen(north=0)),
        watch.Sample(9.0, "west", seen()),
    ]
    assert watch.all_follow_at(samples, HOMES, left, HOMES, 1.0, 5.0) == 3.0
    assert watch.all_follow_at(samples, ["east"], left, HOMES, 1.0, 5.0) == 2.0
    assert watch.all_follow_at(samples, HOMES, left, HOMES, 1.0, 9.5) is None, "it went back"
    assert watch.all_follow_at(samples[:3], HOMES, left, HOMES, 1.0, 5.0) is None, "one is silent"


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


# Goals --------------------------------------------------------------------------------------------


def step(**changed: Any) -> Any:
    tally = requests.Tally(100, 97, 3, 0, [], [], {})
    found = modes.Step("cluster west", 0.7, tally, 2.0, 12.0, 5.0, 4.0, 9.0, 3.0, {})
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
        planner_s=None,
        epochs=(3, 0),
    )
    checks = modes.step_checks(bad)
    assert len(missed(checks)) == len(checks) == 9


def test_the_goals_of_a_drain() -> None:
    tally = requests.Tally(50, 50, 0, 0, [], [], {})
    good = modes.Drain("west", 0.5, tally, 20.0, 3.0, 3.0, 8, 0, 4)
    assert missed(modes.drain_checks(good)) == []
    bad = modes.Drain(
        "west", 0.5, requests.Tally(50, 49, 1, 0, [], [], {}), None, None, 61.0, 8, 1, 0
    )
    assert len(missed(modes.drain_checks(bad))) == 6


def test_the_goals_of_a_flood() -> None:
    def home(name: str, first_rps: float, p90_s: float) -> Any:
        return modes.HomePhase(name, 1.1, 1.0, first_rps, p90_s, 0)

    calm = [home("east", 1.0, 2.0), home("west", 1.0, 2.0)]
    good = modes.Flood("east", calm, [home("east", 0.5, 60.0), home("west", 0.91, 2.9)])
    assert missed(modes.flood_checks(good)) == []
    bad = modes.Flood("west", calm, [home("east", 0.8, 3.1), home("west", 1.0, 9.0)])
    assert missed(modes.flood_checks(bad)) == [
        "east keeps its rate within 10% while west floods",
        "east: P90 TTFT within 1.5x of the calm phase",
    ]


def test_a_phase_counts_each_home_after_its_queues_have_settled() -> None:
    some = [asked(float(at), first_s=at + 2.0) for at in range(100)]
    some += [asked(float(at), "west", first_s=None, error="HTTP 503 x") for at in range(0, 100, 2)]
    east, west = modes.home_phases(some, {"east": 1.2, "west": 0.6}, 0.0, 100.0)
    assert (east.home, east.planned_rps, east.failed, west.failed) == ("east", 1.2, 0, 49)
    assert east.offered_rps == pytest.approx(1.0, abs=0.02)
    assert east.first_tokens_rps == pytest.approx(1.0, abs=0.02)
    assert east.p90_ttft_s == pytest.approx(2.0)
    assert west.first_tokens_rps == 0


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
