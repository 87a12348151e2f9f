"""A recording observes a run: what nodes did at a moment agrees with the requests' own times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.config.deployment import SchedulerSection
from prfaas.planner.problem import Path
from prfaas.sim.arrivals import poisson
from prfaas.sim.config import LinkFault, NodeFault, RateChange, SimConfig, link_id
from prfaas.sim.results.recording import ROUTE_KINDS, Recording, thinned
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas.studies.simulation_cases import Policy
from prfaas.types import NodeId
from tests.planner.builders import problem

SMALL = problem(fabric=Path(1e9, 0.0))
LINK = link_id(SMALL, 0)
ARRIVALS = poisson(SMALL.workload, 4.2, 800, seed=4)


def recorded(**options: object) -> tuple[Result, Recording]:
    config = SimConfig(**({"moments": 100} | options))  # type: ignore[arg-type]
    result = simulate(SMALL, ARRIVALS, config)
    assert result.recording is not None
    return result, result.recording


@pytest.mark.parametrize("policy", ["paper", "adaptive", "local", "remote"])
def test_nodes_do_what_the_requests_say(policy: Policy) -> None:
    result, recording = recorded(scheduler=SchedulerSection(policy=policy))
    rows = result.requests
    begun_s = rows.arrival_s + rows.wait_s
    prefilled_s = begun_s + rows.prefill_s
    decoded_s = prefilled_s + rows.transfer_s + rows.slot_wait_s
    alone = np.array([ROUTE_KINDS[kind] == "alone" for kind in recording.routes.kind])
    assert len(recording.moments) > 50
    for moment in recording.moments:
        at_s = moment.at_s
        found = {"prefill": 0, "decode": 0}
        for node in moment.nodes:
            found[node.role] += node.active
        prefills = (begun_s <= at_s) & (at_s < prefilled_s)
        decodes = (decoded_s <= at_s) & (at_s < rows.last_token_s)
        decodes |= prefills & alone
        assert found == {"prefill": (prefills & ~alone).sum(), "decode": decodes.sum()}


def test_links_carry_what_the_series_says() -> None:
    result, recording = recorded(scheduler=SchedulerSection(policy="paper"))
    (link,) = recording.links
    assert (link.link, link.bps, link.rtt_s) == (LINK, 1e8, 0.01)
    carried = [moment.links[0].carried_bits for moment in recording.moments]
    assert carried == sorted(carried)
    assert carried[-1] == pytest.approx(result.series.egress_bits[LINK].sum())


def test_a_recording_changes_nothing() -> None:
    options = {"scheduler": SchedulerSection(policy="adaptive"), "replans": True}
    result, _ = recorded(**options)
    without = simulate(SMALL, ARRIVALS, SimConfig(**options))  # type: ignore[arg-type]
    assert without.recording is None
    assert (without.requests.last_token_s == result.requests.last_token_s).all()
    assert (without.requests.offloaded == result.requests.offloaded).all()


@pytest.mark.parametrize("most", [6, 10, 1000])
def test_moments_are_bounded_and_cover_the_run(most: int) -> None:
    result, recording = recorded(moments=most)
    times = [moment.at_s for moment in recording.moments]
    assert len(times) <= most
    assert times[0] == 0 and times == sorted(set(times))
    assert times[-1] >= np.nanmax(result.requests.last_token_s)


def test_an_idle_stretch_is_recorded_as_idle() -> None:
    """The reports pause in it, so that no moment lies within it."""
    later = replace(ARRIVALS, at_s=ARRIVALS.at_s + np.where(np.arange(800) < 400, 0.0, 5000.0))
    result = simulate(SMALL, later, SimConfig(moments=100))
    assert result.recording is not None
    before = [moment for moment in result.recording.moments if moment.at_s < later.at_s[400]]
    assert not any(node.active or node.queued for node in before[-1].nodes)
    few = thinned(result.recording.moments, 6)
    assert before[-1] in few and len(few) <= 6, "an idle stretch does not look busy"
    assert few[0] is before[0] and few[-1] is result.recording.moments[-1]


def test_routes_have_their_nodes_and_reasons() -> None:
    result, recording = recorded(scheduler=SchedulerSection(policy="paper"))
    routes, rows = recording.routes, result.requests
    kinds = [ROUTE_KINDS[kind] for kind in routes.kind]
    assert kinds == ["remote" if far else "local" for far in rows.offloaded]
    for index, kind in enumerate(kinds):
        prefill = recording.nodes[routes.prefill[index]]
        assert prefill.cluster == ("far" if kind == "remote" else "near")
        assert recording.nodes[routes.decode[index]].cluster == "near"
        word = "long" if kind == "remote" else "short"
        assert routes.reasons[routes.reason[index]].startswith((word, "the raised threshold"))
        assert routes.nbytes[index] > 0


def test_explanations_have_the_route_that_was_taken() -> None:
    result, recording = recorded(scheduler=SchedulerSection(policy="adaptive"))
    routes = recording.routes
    assert sorted(routes.explanations) == list(range(len(result.requests.arrival_s)))
    for index, found in routes.explanations.items():
        assert {option.cluster for option in found.alternatives} == {"near", "far"}
        taken = recording.nodes[routes.prefill[index]].name
        (option,) = [option for option in found.alternatives if option.node == taken]
        # The prediction of the prefill is exact here: no cache, and nodes as their profiles say.
        # One that a decode node serves alone has steps of the others between its chunks.
        predicted_s = option.forecast.prefill_s
        if option.alone:
            predicted_s += option.forecast.decode_s - SMALL.local.decode.t_decode_s
        assert predicted_s == pytest.approx(result.requests.prefill_s[index])


def test_lost_nodes_and_cut_links_are_seen() -> None:
    faults = (NodeFault(NodeId("far-0"), 40.5, 80.5), LinkFault(LINK, 100.5, 120.5))
    changes = {LINK: (RateChange(150.5, 0.5),)}
    result, recording = recorded(faults=faults, links=changes, moments=300)
    names = [node.name for node in recording.nodes]
    for moment in recording.moments:
        lost = 40.5 < moment.at_s < 80.5
        assert moment.nodes[names.index(NodeId("far-0"))].alive is not lost
        bps = 0.0 if 100.5 < moment.at_s < 120.5 else 0.5e8 if moment.at_s > 150.5 else 1e8
        assert moment.links[0].bps == bps
    assert (result.requests.retries > 0).any()
