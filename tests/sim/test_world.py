"""Whole runs of small deployments: every request's account adds up, whatever happens meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.config.deployment import (
    AdaptiveSection,
    AloneSection,
    ReplanSection,
    SchedulerSection,
)
from prfaas.config.trace import TraceRow
from prfaas.planner.problem import Path, Problem
from prfaas.planner.profile import DecodeRate, DecodeStep
from prfaas.planner.workload import lognormal
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, block_hashes, poisson, replay
from prfaas.sim.config import (
    CacheConfig,
    ClusterFault,
    DrainFault,
    LinkFault,
    NodeFault,
    RateChange,
    SimConfig,
    SlowFault,
    link_id,
)
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas.types import ClusterId, NodeId
from tests.planner.builders import FAST, SLOW, problem

# Two PrfaaS nodes and four local ones, of which one prefills; 4.7 requests/s at most.
SMALL = problem(fabric=Path(1e9, 0.0))
PREFILL = NodeId("near-0")
DECODE = [NodeId(f"near-{k}") for k in (1, 2, 3)]
LINK = link_id(SMALL, 0)
SLOTS = 16  # of decode nodes
POLICIES = ["paper", "adaptive", "local", "remote"]


def config(policy: str = "paper", **options: object) -> SimConfig:
    return SimConfig(scheduler=SchedulerSection(policy=policy), **options)  # type: ignore[arg-type]


def traffic(rps: float = 4.2, requests: int = 2000, seed: int = 4) -> Arrivals:
    return poisson(SMALL.workload, rps, requests, seed)


def check_accounts(result: Result, given: Problem = SMALL) -> None:
    """Every request has ended, and the parts of its time add up to its TTFT."""
    rows = result.requests
    assert not np.isnan(rows.last_token_s).any(), "every request ends"
    step_s = given.local.decode.t_decode_s
    parts = rows.wait_s + rows.prefill_s + rows.transfer_s + rows.slot_wait_s + step_s
    assert rows.ttft_s == pytest.approx(parts)
    assert (rows.wait_s >= -1e-9).all() and (rows.transfer_s >= 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_accounted_for(policy: str) -> None:
    result = simulate(SMALL, traffic(), config(policy))
    check_accounts(result)
    rows = result.requests
    far = rows.offloaded
    if policy in ("local", "remote"):
        assert far.all() if policy == "remote" else not far.any()
    new = rows.prompt_tokens
    assert rows.prefill_s[far] == pytest.approx(FAST.seconds(new[far].astype(float)))
    # Between the chunks of a prompt that a decode node serves alone, others have decode steps.
    steps = (rows.prefill_s[~far] - SLOW.seconds(new[~far].astype(float))) / 0.02
    assert steps == pytest.approx(np.round(steps), abs=1e-6) and (steps > -1e-6).all()
    assert (steps > 0.5).sum() <= result.alone
    carried = sum(bits.sum() for bits in result.series.egress_bits.values())
    assert carried == pytest.approx(((new[far] * 1000 + 50_000) * 8).sum(), rel=1e-3)


def test_new_requests_do_not_overtake_a_queue_that_has_waited_too_long() -> None:
    """More requests come than can be served, so the queue lasts. Its requests are still served."""
    arrivals = traffic(rps=6.0)
    longest_s = {}
    for share in (0.5, 1e9):
        rules = SchedulerSection(policy="adaptive", adaptive=AdaptiveSection(overdue_share=share))
        result = simulate(SMALL, arrivals, SimConfig(scheduler=rules))
        check_accounts(result)
        longest_s[share] = float(np.quantile(result.requests.wait_s, 0.99))
    assert longest_s[0.5] < longest_s[1e9]


def test_paper_divides_at_the_threshold() -> None:
    result = simulate(SMALL, traffic(rps=0.3), config())
    threshold = result.plans[0].plan.threshold_tokens
    rows = result.requests
    assert (rows.offloaded == (rows.prompt_tokens > threshold)).all()


def test_policy_local_serves_like_a_pd_cluster_without_prfaas() -> None:
    """Its split is not the one that leaves long prefills to PrfaaS: then most nodes would decode,
    and the queues of the few that prefill would grow for ever."""
    without_prfaas = replace(SMALL, remotes=())
    carried_rps = 0.8 * find_optimum(without_prfaas).capacity_rps
    given = config("local", replans=True)
    local = simulate(SMALL, traffic(carried_rps), given)
    expected = simulate(without_prfaas, traffic(carried_rps), given)
    assert [change.plan.roles for change in local.plans] == [
        change.plan.roles for change in expected.plans
    ]
    assert local.requests.ttft_s == pytest.approx(expected.requests.ttft_s)
    assert find_optimum(SMALL).n_prefill < find_optimum(without_prfaas).n_prefill
    half = len(local.requests.ttft_s) // 2
    first_s, second_s = local.requests.ttft_s[:half], local.requests.ttft_s[half:]
    assert second_s.mean() < 2 * first_s.mean(), "the queue does not grow"


def test_a_run_is_a_function_of_its_input() -> None:
    one, same = (simulate(SMALL, traffic(), config("adaptive")) for _ in range(2))
    assert one.requests.last_token_s.tolist() == same.requests.last_token_s.tolist()
    assert one.series.decode_queue.tolist() == same.series.decode_queue.tolist()


def test_progress_ends_at_one() -> None:
    shares: list[float] = []
    simulate(SMALL, traffic(requests=50), config(), progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_cached_prefixes_that_every_node_holds() -> None:
    work = lognormal(6.0, 0.5, 20, 2000, output_tokens=100, cached_tokens=1000)
    given = replace(SMALL, workload=work)
    result = simulate(given, poisson(work, 1.0, 300, 1), config())
    rows = result.requests
    assert set(rows.hit_tokens) == {1000}
    new = (rows.prompt_tokens - 1000).astype(float)
    near = ~rows.offloaded
    assert rows.prefill_s[near] == pytest.approx(SLOW.seconds(new[near], 1000.0))
    carried = sum(bits.sum() for bits in result.series.egress_bits.values())
    assert carried == pytest.approx(((new[~near] * 1000 + 50_000) * 8).sum(), rel=1e-3)


# Decode -------------------------------------------------------------------------------------------


def test_slots_are_waited_for() -> None:
    scarce = replace(SMALL, local=replace(SMALL.local, decode=DecodeRate(1, 0.02)))
    result = simulate(scarce, poisson(scarce.workload, 0.4, 600, 2), config())
    check_accounts(result, scarce)
    assert result.requests.slot_wait_s.max() > 1
    assert result.series.decode_queue.max() >= 1


def test_a_batch_that_slows_down_with_its_size() -> None:
    steps = (DecodeStep(1, 0.02), DecodeStep(4, 0.05))
    slowing = replace(SMALL, local=replace(SMALL.local, decode=DecodeRate(4, 0.05, steps)))
    rows = simulate(slowing, poisson(slowing.workload, 1.5, 400, 2), config()).requests
    assert rows.tpot_s.min() == pytest.approx(0.02, rel=0.02)
    assert 0.021 < rows.tpot_s.mean() < 0.05


def test_memory_is_reserved_from_the_grant_on() -> None:
    biggest = float(traffic().prompt_tokens.max()) * 1000 + 50_000
    tight = simulate(SMALL, traffic(), config(decode_kv_bytes=biggest))
    check_accounts(tight)
    free = simulate(SMALL, traffic(), config())
    assert tight.requests.wait_s.mean() > free.requests.wait_s.mean() + 0.5


# Links --------------------------------------------------------------------------------------------


def test_requests_avoid_a_link_after_its_outage_is_reported() -> None:
    cut = {LINK: (RateChange(100.0, 0.0), RateChange(300.0, 1.0))}
    result = simulate(SMALL, traffic(rps=1.5, requests=600), config("remote", links=cut))
    check_accounts(result)
    rows = result.requests
    during = (rows.arrival_s > 102) & (rows.arrival_s < 299)
    assert not rows.offloaded[during].any(), "two seconds are enough to detect it"
    assert rows.offloaded[rows.arrival_s < 100].all()
    assert rows.offloaded[rows.arrival_s > 303].all()


def test_no_request_takes_a_link_that_was_cut_since_its_last_report() -> None:
    """The report of 100 s, of a busy link, is on its way to the router when the link is cut."""
    cut = LinkFault(LINK, 100.02)
    busy = {LINK: (RateChange(0.0, 0.1),)}
    arrivals = traffic(rps=3.0, requests=600)
    result = simulate(SMALL, arrivals, config("remote", faults=(cut,), links=busy))
    check_accounts(result)
    rows = result.requests
    assert rows.offloaded[rows.last_token_s < 100.0].any()
    assert not rows.offloaded[rows.arrival_s > 100.02].any()


def test_a_slow_link_raises_the_threshold_of_paper_and_adaptive_avoids_it() -> None:
    slow = {LINK: (RateChange(0.0, 0.02),)}
    for policy in ("paper", "adaptive"):
        usual = simulate(SMALL, traffic(), config(policy))
        sagging = simulate(SMALL, traffic(), config(policy, links=slow))
        check_accounts(sagging)
        assert sagging.requests.offloaded.mean() < 0.8 * usual.requests.offloaded.mean(), policy


# Faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["paper", "adaptive"])
@pytest.mark.parametrize("lost", ["far-0", "near-0"])
def test_a_lost_prefill_node_costs_time_but_no_request(policy: str, lost: str) -> None:
    fault = NodeFault(NodeId(lost), 100.0, 400.0)
    result = simulate(SMALL, traffic(), config(policy, faults=(fault,), timeline=True))
    check_accounts(result)
    assert result.requests.retries.sum() > 0
    busy = [s for s in result.spans if s.track == lost and s.name == "prefill"]
    assert not [s for s in busy if s.end_s > 100.0 and s.start_s < 400.0]
    assert [s for s in busy if s.start_s > 400.0], "it works again after its return"


def test_a_lost_decode_node_breaks_streams_and_restarts_the_rest() -> None:
    faults = tuple(NodeFault(node, 200.0, 260.0) for node in (PREFILL, *DECODE))
    rows = simulate(SMALL, traffic(), config(faults=faults)).requests
    assert not np.isnan(rows.first_token_s).any(), "they come back"
    broken = np.isnan(rows.last_token_s)
    assert broken.any() and (rows.first_token_s[broken] <= 200.0).all()
    again = rows.retries > 0
    assert again.any() and (rows.first_token_s[again] > 260.0).all()


def test_a_run_does_not_wait_for_requests_that_can_never_end() -> None:
    faults = tuple(NodeFault(node, 10.0) for node in (PREFILL, *DECODE))
    result = simulate(SMALL, traffic(requests=100), config(faults=faults))
    assert np.isnan(result.requests.first_token_s).any() and not result.stable


@pytest.mark.parametrize("policy", ["paper", "adaptive", "remote"])
def test_a_drained_cluster_finishes_its_work_and_gets_nothing_new_until_its_return(
    policy: str,
) -> None:
    """Its nodes are lost meanwhile, and return to a cluster that is still drained."""
    drain = DrainFault(ClusterId("far"), 100.0, 300.0)
    lost = ClusterFault(ClusterId("far"), 150.0, 160.0)
    arrivals = traffic(rps=1.0, requests=400)
    for faults in ((drain,), (drain, lost)):
        result = simulate(SMALL, arrivals, config(policy, faults=faults, timeline=True))
        check_accounts(result)
        assert not result.requests.retries.any()
        begun = [
            s.start_s for s in result.spans if s.track.startswith("far") and s.name == "prefill"
        ]
        assert not [at_s for at_s in begun if 130.0 < at_s < 300.0]
        assert min(begun) < 100.0 and max(begun) > 300.0


def test_faults_that_slow_a_node_multiply() -> None:
    node = NodeId("near-0")
    slow = (SlowFault(node, 3.0, 0.0), SlowFault(node, 2.0, 100.0, 200.0))
    rules = config("local", faults=slow)
    few = poisson(SMALL.workload, 0.05, 30, seed=3)
    rows = simulate(replace(SMALL, remotes=()), few, rules).requests
    factors = rows.prefill_s / SLOW.seconds(rows.prompt_tokens.astype(float))
    assert {3.0, 6.0} <= set(np.round(factors)) <= {1.0, 3.0, 6.0}


# Long-term ----------------------------------------------------------------------------------------


def test_a_node_drains_before_it_changes_its_role() -> None:
    rules = ReplanSection(every_s=60, window_s=600, warmup_s=0, block_requests=100, dwell_s=0)
    long = lognormal(8.0, 0.3, 20, 5000, output_tokens=10)
    chatty = lognormal(4.0, 0.3, 20, 5000, output_tokens=2000)
    arrivals = poisson(chatty, 0.6, 900, 3)
    given = replace(SMALL, workload=long)
    scheduler = SchedulerSection(policy="paper", replan=rules)
    result = simulate(given, arrivals, SimConfig(scheduler=scheduler, replans=True, timeline=True))
    check_accounts(result)
    first, *_, last = [change.plan for change in result.plans]
    assert last.n_decode > first.n_decode
    for node in first.roles:
        prefills = [s for s in result.spans if s.track == node and s.name == "prefill"]
        decodes = [s for s in result.spans if s.track == node and s.name == "decode"]
        if prefills and decodes:
            assert max(s.end_s for s in prefills) + 10 <= min(s.start_s for s in decodes)


# Caches -------------------------------------------------------------------------------------------


def conversation(turns: int = 6, talks: int = 40) -> list[TraceRow]:
    """Each turn repeats all before it and adds two blocks."""
    rows = []
    for turn in range(1, turns + 1):
        for talk in range(talks):
            ids = [talk * 1000 + k for k in range(2 * turn)]
            rows.append(TraceRow(turn * 60_000.0 + talk * 700, len(ids) * 512 - 400, 50, ids))
    return rows


@pytest.mark.parametrize("policy", ["paper", "adaptive"])
def test_conversations_are_resumed(policy: str) -> None:
    rows = conversation()
    arrivals = replay(rows, seed=1)
    caching = config(policy, cache=CacheConfig(1e12))
    result = simulate(SMALL, arrivals, caching)
    check_accounts(result)
    hits = result.requests.hit_tokens
    assert hits[:40].sum() == 0
    # All whole blocks of the turn before: one less than it had ids, its last being partial.
    ideal = np.array([(len(block_hashes(row)) - 2) * 512 for row in rows])
    assert hits.sum() > 0.9 * ideal.sum()
    again = simulate(SMALL, arrivals, caching)
    assert again.requests.last_token_s.tolist() == result.requests.last_token_s.tolist()


def long_answers(turns: int = 5, talks: int = 20) -> list[TraceRow]:
    """Each turn adds one block to the one before and its answer, which completes two blocks. The
    last block of a prompt is not whole."""
    rows = []
    for turn in range(1, turns + 1):
        for talk in range(talks):
            ids = [talk * 1000 + k for k in range(3 * turn + 1)]
            whole = 3 * turn - 1
            prompt = [*ids[:whole], talk * 1000 + 500 + turn]
            at_ms = turn * 60_000.0 + talk * 700
            rows.append(TraceRow(at_ms, whole * 512 + 112, 912, prompt, ids[whole:]))
    return rows


def slow_fabric(margin_s: float, *, loses: bool = False) -> Result:
    """Answers that take longer to copy to a prefill node than their next turn takes where they
    are. `loses`: a decode node is lost meanwhile."""
    rules = SchedulerSection(alone=AloneSection(margin_s=margin_s, slowdown=1.0))
    given = problem(fabric=Path(1e6, 0.0), prfaas=0, fixed_prefill=1, bs_max=SLOTS)
    faults = (NodeFault(NodeId("near-3"), 200.0, 260.0),) if loses else ()
    options = SimConfig(scheduler=rules, cache=CacheConfig(1e12), faults=faults)
    return simulate(given, replay(long_answers(), seed=1), options)


def test_decode_nodes_serve_short_remainders_alone_and_decode_more_slowly() -> None:
    without, found = slow_fabric(1e6), slow_fabric(0.0)
    check_accounts(found)
    assert (without.alone, without.alone_s) == (0, 0.0)
    assert found.alone > 10 and found.alone_s > 0
    assert found.requests.ttft_s.mean() < without.requests.ttft_s.mean()

    def decoding_s(result: Result) -> float:
        return float((result.requests.last_token_s - result.requests.first_token_s).sum())

    # Each prefill delays the requests that decode beside it, and no others.
    delayed_s = decoding_s(found) - decoding_s(without)
    assert 0 < delayed_s <= found.alone_s * SLOTS


def test_a_lost_decode_node_loses_what_it_serves_alone_and_no_request() -> None:
    found = slow_fabric(0.0, loses=True)
    assert found.alone > 0
    again = found.requests.retries > 0
    ended = ~np.isnan(found.requests.last_token_s)
    assert (ended | again | ~np.isnan(found.requests.first_token_s)).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_while_one_node_lives(policy: str) -> None:
    """Also without a new plan, and at a decode node that never was to prefill."""
    lost = ClusterFault(ClusterId("far"), 20.0)
    local = tuple(NodeFault(NodeId(f"near-{k}"), 20.0) for k in (0, 1, 2))
    arrivals = poisson(SMALL.workload, 0.5, 30, seed=3)
    for faults in ((lost, local[0]), (lost, *local)):
        alone = faults != (lost, local[0]) or policy != "local"  # which plans more prefill nodes
        result = simulate(SMALL, arrivals, config(policy, faults=faults))
        check_accounts(result)
        begun = result.requests.arrival_s > 25.0
        assert begun.any() and np.isfinite(result.requests.last_token_s[begun]).all()
        assert (result.alone > 0) == alone


@pytest.mark.parametrize("policy", ["adaptive", "paper", "remote"])
def test_a_slow_node_gets_little_and_has_its_share_again(policy: str) -> None:
    """Of the two PrfaaS nodes one is slow for two minutes. It is known within ten prefills."""
    slow = SlowFault(NodeId("far-1"), 20.0, 60.0, 180.0)
    arrivals = poisson(SMALL.workload, 0.6, 240, seed=5)
    result = simulate(SMALL, arrivals, config(policy, faults=(slow,), timeline=True))
    check_accounts(result)
    begun = [
        span.start_s
        for span in result.spans
        if span.name == "prefill" and span.track == slow.node and span.start_s > slow.at_s
    ]
    during = [at_s for at_s in begun if at_s < slow.until_s]
    assert 1 <= len(during) <= 10
    back = [
        span.track
        for span in result.spans
        if span.name == "prefill" and span.track.startswith("far") and span.start_s > 240.0
    ]
    assert back.count(slow.node) > 0.3 * len(back)


def test_a_small_cache_hits_less_and_a_lost_node_forgets() -> None:
    arrivals = replay(conversation(), seed=1)
    large = simulate(SMALL, arrivals, config(cache=CacheConfig(1e12)))
    small = simulate(SMALL, arrivals, config(cache=CacheConfig(3e7)))
    lossy = simulate(
        SMALL,
        arrivals,
        config(
            cache=CacheConfig(1e12),
            faults=tuple(NodeFault(NodeId(n), 180.0, 181.0) for n in ("near-0", "far-0", "far-1")),
        ),
    )
    for other in (small, lossy):
        assert other.requests.hit_tokens.sum() < large.requests.hit_tokens.sum()


def test_a_hot_prefix_spreads_over_the_cluster() -> None:
    rows = [TraceRow(0.0, 3 * 512 + 10, 50, [1, 2, 3, 99])]
    rows += [TraceRow(30e3 + k * 300, 4 * 512, 50, [1, 2, 3, 100 + k]) for k in range(200)]
    result = simulate(
        replace(SMALL, remotes=()), replay(rows, seed=1), config("local", cache=CacheConfig(1e12))
    )
    assert result.copies > 0 and result.copied_bytes > 0
    assert np.median(result.requests.hit_tokens) == 3 * 512


@pytest.mark.parametrize("policy", POLICIES)
def test_queues_over_time_count_every_waiting_request(policy: str) -> None:
    """Little's law: sampled queues add up to the seconds that requests have waited, wherever they
    were kept."""
    result = simulate(SMALL, traffic(rps=5.0, requests=3000), config(policy))
    series = result.series
    sampled = sum(queue.sum() for queue in series.prefill_queue.values()) * series.bin_s
    assert sampled == pytest.approx(result.requests.wait_s.sum(), rel=0.05)
