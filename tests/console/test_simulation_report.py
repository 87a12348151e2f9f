"""The data of a simulation's page: frames agree with the result, and the file stays small."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas.config import load_deployment
from prfaas.config.deployment import SchedulerSection
from prfaas.console.run_events import MOST_EVENTS
from prfaas.console.simulation_report import MOST_FRAMES, ReportedRun, simulation_report
from prfaas.console.text_table import TextTable
from prfaas.planner import problem as planned
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.scheduler.homes.plans import as_network, planned_rps
from prfaas.scheduler.homes.round_trips import round_trips
from prfaas.sim.arrivals import Arrivals, poisson, poisson_at_homes, replay
from prfaas.sim.config import (
    CacheConfig,
    ClusterFault,
    Fault,
    LinkFault,
    NodeFault,
    RateChange,
    SimConfig,
    link_id,
)
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas.studies.network_plans import deployment_problem
from prfaas.studies.simulation_cases import Policy
from prfaas.types import ClusterId, NodeId
from tests.planner.builders import problem
from tests.sim.test_world import conversation

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = problem(fabric=planned.Path(1e9, 0.0))
LINK = link_id(SMALL, 0)
PAGE_BYTES = 250_000  # an allowance for the page itself
LARGEST = 5_000_000


def config(policy: Policy = "paper", **options: Any) -> SimConfig:
    options = {"moments": MOST_FRAMES} | options
    return SimConfig(scheduler=SchedulerSection(policy=policy), **options)


def run(
    given: SimConfig,
    arrivals: Arrivals | None = None,
    at: Problem | NetworkProblem = SMALL,
) -> tuple[Result, dict[str, Any]]:
    if arrivals is None:
        arrivals = poisson(SMALL.workload, 4.2, 800, seed=4)
    result = simulate(at, arrivals, given)
    data = report({"a run": (given, result)})
    return result, data["runs"][0]


def report(runs: dict[str, tuple[SimConfig, Result]]) -> dict[str, Any]:
    reported = [
        ReportedRun(name, given, result, [("stable", "yes")])
        for name, (given, result) in runs.items()
    ]
    data = simulation_report("a title", "a model", reported)
    return json.loads(json.dumps(data, allow_nan=False))  # type: ignore[no-any-return]


def at_frame(steps: list[list[Any]], frame: int) -> Any:
    return [value for first, value in steps if first <= frame][-1]


def check_shape(data: dict[str, Any]) -> None:
    """Every column has a value per frame, and every step begins at the first frame."""
    frames = len(data["times_s"])
    assert 2 <= frames <= MOST_FRAMES
    assert data["times_s"][0] == 0
    assert all(a < b for a, b in pairwise(data["times_s"]))
    nodes = [node for cluster in data["clusters"] for node in cluster["nodes"]]
    for steps, columns, things in (
        (("role", "becomes", "status"), ("active", "queued"), nodes),
        (
            ("capacity_bps", "verdict", "cause"),
            ("rate_bps", "backlog_bytes", "waited_s"),
            data["links"],
        ),
        (
            (
                *("threshold_tokens", "planned_threshold_tokens", "planned_rps"),
                *("planned_share", "plan_reason"),
            ),
            (
                *("arrived", "waiting", "local", "remote", "failed"),
                *("prompt_tokens", "cached_tokens", "stateless_tokens"),
            ),
            data["homes"],
        ),
    ):
        for thing in things:
            for name in steps:
                assert thing[name][0][0] == 0
                assert all(a[0] < b[0] and a[1] != b[1] for a, b in pairwise(thing[name]))
                assert thing[name][-1][0] < frames
            for name in columns:
                assert len(thing[name]) == frames, name
                assert min(thing[name]) >= 0
    for name in ("first_tokens", "wait_s", "prefill_s", "transfer_s", "decode_s"):
        assert len(data["ttft"][name]) == frames
    assert len(data["in_flight"]) == frames
    columns = data["requests"]["columns"]
    assert len({len(column) for column in columns.values()}) == 1
    assert columns["at_s"] == sorted(columns["at_s"])


def check_totals(result: Result, data: dict[str, Any]) -> None:
    """The last frame has the totals of the result."""
    rows, homes = result.requests, data["homes"]
    last = {name: [home[name][-1] for home in homes] for name in homes[0] if name != "cluster"}
    finished = ~np.isnan(rows.last_token_s)
    answered = ~np.isnan(rows.first_token_s)
    assert sum(last["arrived"]) == len(rows.arrival_s)
    assert sum(last["remote"]) == (finished & rows.offloaded).sum()
    assert sum(last["local"]) == (finished & ~rows.offloaded).sum()
    assert sum(last["failed"]) == (answered & ~finished).sum()
    assert data["in_flight"][-1] == (~answered).sum()
    assert sum(last["prompt_tokens"]) == rows.prompt_tokens[answered].sum()
    assert sum(last["cached_tokens"]) == rows.hit_tokens[answered].sum()
    ttft = {name: column[-1] for name, column in data["ttft"].items()}
    assert ttft["first_tokens"] == answered.sum()
    assert ttft["wait_s"] == pytest.approx(rows.wait_s[answered].sum(), abs=1e-3)
    parts = sum(ttft.values()) - ttft["first_tokens"]
    assert parts == pytest.approx(rows.ttft_s[answered].sum(), abs=1e-2)
    for number, home in enumerate(homes):
        assert home["arrived"][-1] == (rows.home == number).sum()
    for link in data["links"]:
        bits = result.series.egress_bits[link["source"], link["target"]].sum()
        seconds = np.diff(data["times_s"])
        carried = (np.array(link["rate_bps"][1:]) * seconds).sum()
        assert carried == pytest.approx(bits, rel=1e-3)


@pytest.mark.parametrize("policy", ["paper", "adaptive", "local", "remote"])
def test_frames_add_up_to_the_result(policy: Policy) -> None:
    result, data = run(config(policy, replans=True))
    check_shape(data)
    check_totals(result, data)
    assert data["policy"] == policy
    in_flight = np.array(data["in_flight"])
    active = sum(
        np.array(node["active"]) + np.array(node["queued"])
        for cluster in data["clusters"]
        for node in cluster["nodes"]
    )
    assert (active <= in_flight).all(), "a request is at one node at a time, or on a link"


def test_the_plan_is_there_at_every_frame() -> None:
    result, data = run(config(replans=True))
    (home,) = data["homes"]
    plan = result.plans[0].plan
    assert home["planned_threshold_tokens"][0] == [0, plan.threshold_tokens]
    assert at_frame(home["planned_rps"], 0) == pytest.approx(plan.capacity_rps, abs=1e-4)
    # The share that the plan offloads is about the share that the run offloads.
    offloaded = float(result.requests.offloaded.mean())
    assert at_frame(home["planned_share"], 0) == pytest.approx(offloaded, abs=0.1)
    for frame, tokens in home["threshold_tokens"]:
        assert tokens >= at_frame(home["planned_threshold_tokens"], frame)
    kinds = [event["kind"] for event in data["events"]]
    assert kinds.count("plan") == len(result.plans)


def test_a_link_that_changes() -> None:
    changes = {LINK: (RateChange(50.0, 0.5), RateChange(80.0, 0.0), RateChange(100.0, 1.0))}
    result, data = run(config("adaptive", links=changes))
    check_shape(data)
    check_totals(result, data)
    (link,) = data["links"]
    assert link["planned_bps"] == 1e8
    for frame, at_s in enumerate(data["times_s"]):
        bps = 0.5e8 if 50 < at_s < 80 else 0.0 if 80 < at_s < 100 else 1e8
        if at_s not in (50, 80, 100):
            assert at_frame(link["capacity_bps"], frame) == bps
            assert (at_frame(link["verdict"], frame) == "cut") is (bps == 0)
    told = [(e["at_s"], e["text"]) for e in data["events"] if e["kind"] == "link"]
    assert told == [
        (50, "The link far -> near carries 0.05 of 0.1 Gbit/s."),
        (80, "The link far -> near is cut."),
        (100, "The link far -> near is back and carries 0.1 of 0.1 Gbit/s."),
    ]
    assert {e["where"] for e in data["events"] if e["kind"] == "link"} == {"far -> near"}
    assert [e["id"] for e in data["events"]] == list(range(1, len(data["events"]) + 1))
    times = [e["at_s"] for e in data["events"]]
    assert times == sorted(times)


def test_small_changes_of_a_link_are_no_events_and_many_are_cut() -> None:
    noise = tuple(RateChange(float(k), 0.95 + 0.05 * (k % 2)) for k in range(1, 100))
    _, data = run(config(links={LINK: noise}))
    assert [e["kind"] for e in data["events"]] == ["plan"]
    swings = tuple(RateChange(k / 10, 0.2 + 0.5 * (k % 2)) for k in range(1, 1000))
    _, data = run(config(links={LINK: swings}))
    assert len(data["events"]) == MOST_EVENTS
    assert data["notes"] == [f"The time line has the first {MOST_EVENTS} of 1,000 events."]


def test_faults_are_events_and_states() -> None:
    faults: tuple[Fault, ...] = (
        NodeFault(NodeId("near-3"), 40.0, 90.0),
        ClusterFault(ClusterId("far"), 100.0, 120.0),
        LinkFault(LINK, 130.0, 140.0),
    )
    result, data = run(config(faults=faults))
    check_shape(data)
    check_totals(result, data)
    told = [(e["at_s"], e["kind"], e["where"]) for e in data["events"] if e["kind"] != "plan"]
    assert told == [
        *((40, "node", "near-3"), (90, "node", "near-3")),
        *((100, "cluster", "far"), (120, "cluster", "far")),
        *((130, "link", "far -> near"), (140, "link", "far -> near")),
    ]
    nodes = {n["id"]: n for cluster in data["clusters"] for n in cluster["nodes"]}
    assert [status for _, status in nodes["near-3"]["status"]] == ["in use", "lost", "in use"]
    assert [status for _, status in nodes["far-0"]["status"]] == ["in use", "lost", "in use"]
    assert max(data["requests"]["columns"]["attempts"]) > 1
    outcomes = data["requests"]["names"]["outcome"]
    found = [outcomes[k] for k in data["requests"]["columns"]["outcome"]]
    assert "failed" in found, "a stream that broke after its first token"


def test_a_node_that_changes_its_role() -> None:
    """Requests are much longer than the stated ones, so that more nodes have to prefill."""
    arrivals = poisson(SMALL.workload, 2.0, 2500, seed=4)
    longer = Arrivals(
        arrivals.at_s,
        np.minimum(arrivals.prompt_tokens * 4, 5000),
        arrivals.cached_tokens,
        np.maximum(arrivals.output_tokens // 10, 1),
    )
    result, data = run(config(replans=True), longer)
    check_totals(result, data)
    changed = [e for e in data["events"] if e["kind"] == "role"]
    assert changed, "the plan changes a role"
    nodes = {n["id"]: n for cluster in data["clusters"] for n in cluster["nodes"]}
    for event in changed:
        node = nodes[event["where"]]
        assert event["text"].startswith(f"{event['where']} now ")
        assert len(node["role"]) > 1
    assert all(at_frame(n["becomes"], 0) is None for n in nodes.values())


def test_several_pd_clusters() -> None:
    file = CONFIGS / "two_by_two.toml"
    deployment = load_deployment(file)
    network = as_network(deployment_problem(file, deployment))
    arrivals = poisson_at_homes(network, 0.9 * planned_rps(network, "paper"), 800, seed=2)
    result, data = run(config("adaptive", round_trips=round_trips(deployment)), arrivals, network)
    check_shape(data)
    check_totals(result, data)
    assert [home["cluster"] for home in data["homes"]] == ["east", "west"]
    kinds = {cluster["name"]: cluster["kind"] for cluster in data["clusters"]}
    assert kinds == {"east": "pd", "west": "pd", "north": "prfaas", "south": "prfaas"}
    assert len(data["links"]) == 4
    assert data["requests"]["names"]["home"] == ["east", "west"]
    columns = data["requests"]["columns"]
    names = data["requests"]["names"]["node"]
    for number, home in zip(columns["decode"], columns["home"], strict=True):
        assert names[number].partition("-")[0] in ("east", "west"), home


def test_a_trace_has_its_cached_tokens() -> None:
    arrivals = replay(conversation(), seed=1)
    given = config("adaptive", cache=CacheConfig(bytes_per_node=1e12))
    result, data = run(given, arrivals)
    check_shape(data)
    check_totals(result, data)
    assert data["homes"][0]["cached_tokens"][-1] > 0


def test_the_sample_of_requests_is_the_same_in_every_run_except_the_slowest() -> None:
    arrivals = poisson(SMALL.workload, 4.2, 5000, seed=4)
    runs = {}
    for policy in ("paper", "local"):
        given = config(policy)
        runs[policy] = (given, simulate(SMALL, arrivals, given))
    data = report(runs)
    samples = []
    for one, (_, result) in zip(data["runs"], runs.values(), strict=True):
        columns = one["requests"]["columns"]
        assert one["requests"]["of"] == 5000
        assert 1600 < len(columns["id"]) <= 2050
        slowest = np.argsort(-result.requests.ttft_s)[:50]
        assert set(slowest.tolist()) <= set(columns["id"])
        even = {i for i, a in zip(columns["id"], columns["alternatives"], strict=True) if a}
        samples.append(even)
        for place, index in enumerate(columns["id"]):
            ttft_s = result.requests.ttft_s[index]
            assert columns["ttft_s"][place] == pytest.approx(ttft_s, abs=1e-3)
            parts = ("wait_s", "prefill_s", "transfer_s", "decode_s")
            assert sum(columns[p][place] for p in parts) == pytest.approx(ttft_s, abs=3e-3)
    assert samples[0] == samples[1]


def test_a_run_that_never_answers_some_requests() -> None:
    faults = (ClusterFault(ClusterId("near"), 60.0),)
    result, data = run(config(faults=faults))
    check_shape(data)
    check_totals(result, data)
    columns = data["requests"]["columns"]
    unanswered = data["requests"]["names"]["outcome"].index("unanswered")
    places = [k for k, outcome in enumerate(columns["outcome"]) if outcome == unanswered]
    assert places and all(columns["ttft_s"][k] is None for k in places)
    assert data["homes"][0]["waiting"][-1] == data["in_flight"][-1] > 0


def test_words_are_passed_on() -> None:
    given = config()
    result = simulate(SMALL, poisson(SMALL.workload, 4.2, 100, seed=4), given)
    table = TextTable("links", ("from", "busy"), (("far", "10%"),))
    reported = ReportedRun("paper", given, result, [("stable", "yes")], [table], ["a note."])
    data = simulation_report("a title", "a model", [reported], [table])
    shown = {"title": "links", "columns": ["from", "busy"], "rows": [["far", "10%"]]}
    assert data["tables"] == [shown] == data["runs"][0]["tables"]
    assert data["runs"][0]["notes"] == ["a note."]
    assert data["summary_labels"] == ["stable"]
    assert data["title"] == "a title" and data["kind"] == "simulation"


def test_twelve_thousand_requests_are_a_small_file() -> None:
    file = CONFIGS / "case_study.toml"
    problem_ = deployment_problem(file, load_deployment(file))
    network = as_network(problem_)
    arrivals = poisson_at_homes(network, 0.8 * planned_rps(network, "paper"), 12_000, seed=0)
    given = config("adaptive", replans=True)
    result = simulate(problem_, arrivals, given)
    once = json.dumps(report({"adaptive": (given, result)}), separators=(",", ":"))
    assert len(once) + PAGE_BYTES < 1_500_000
    # Seven runs are as many as the command has policies and baselines.
    seven = report({f"run {k}": (given, result) for k in range(7)})
    assert len(json.dumps(seven, separators=(",", ":"))) + PAGE_BYTES < LARGEST


def test_hundreds_of_nodes_are_a_small_file() -> None:
    large = problem(prfaas=150, pd=100, bps=1e11)
    given = config()
    result = simulate(large, poisson(large.workload, 200.0, 12_000, seed=0), given)
    runs = report({f"run {k}": (given, result) for k in range(4)})
    assert len(json.dumps(runs, separators=(",", ":"))) + PAGE_BYTES < LARGEST
    check_shape(runs["runs"][0])
    check_totals(result, runs["runs"][0])
