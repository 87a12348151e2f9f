"""`bench lost_clusters --flood`: one home sends too much, and what the other homes notice of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from _lost_processes import World
from _lost_requests import Asked, tally, ttft_quantile
from prfaas.demo.shared import Check
from prfaas.launch.request_outcomes import RequestOutcome
from prfaas.scheduler.homes.plans import solve_network

# Of its planned rate, which a calm home sends. At the planned rate itself its queue would grow
# without a bound, and the wait for a first token would depend on the length of the phase alone.
PLANNED = 0.9
FLOOD = 3.0  # times its planned rate, which the flooding home sends
KEPT_RATE = 0.9  # of the first tokens per second of the calm phase
KEPT_TTFT = 1.5
SETTLES = 0.2  # of a phase: its requests do not count, the queues settle
LEAST = 100  # first tokens of a home that are counted in a phase; with fewer, chance decides
EXAMPLES = 5  # of failed requests that are shown


@dataclass(frozen=True, slots=True)
class HomePhase:
    """One home in one phase, without the seconds in which queues settle."""

    home: str
    planned_rps: float
    offered_rps: float
    first_tokens: int
    first_tokens_rps: float
    p90_ttft_s: float
    failed: int  # of all its requests in the phase; one without an outcome has failed
    failures: list[str]  # some of them


@dataclass(frozen=True, slots=True)
class Flood:
    home: str  # that floods
    phase_s: float
    calm: list[HomePhase]
    flood: list[HomePhase]

    def others(self, phase: list[HomePhase]) -> list[HomePhase]:
        return [one for one in phase if one.home != self.home]


def flood_checks(found: Flood) -> list[Check]:
    void = void_lines(found)
    checks = [Check("the run is void", False, line) for line in void]
    for calm, flood in zip(found.others(found.calm), found.others(found.flood), strict=True):
        failed = calm.failed + flood.failed
        kept = _ratio(flood.first_tokens_rps, calm.first_tokens_rps)
        of_planned = _ratio(flood.first_tokens_rps, flood.planned_rps)
        slower = _ratio(flood.p90_ttft_s, calm.p90_ttft_s)
        checks += [
            Check(f"{calm.home}: no request fails", not failed, str(failed)),
            Check(
                f"{calm.home} keeps its rate within {1 - KEPT_RATE:.0%} while {found.home} floods",
                None if void else kept >= KEPT_RATE,
                f"{kept:.1%} of the calm phase, {of_planned:.1%} of the planned rate",
            ),
            Check(
                f"{calm.home}: P90 TTFT within {KEPT_TTFT:g}x of the calm phase",
                None if void else slower <= KEPT_TTFT,
                f"{slower:.2f}x ({calm.p90_ttft_s:.1f} s, then {flood.p90_ttft_s:.1f} s)",
            ),
        ]
    return checks


def void_lines(found: Flood) -> list[str]:
    """Why the run shows nothing: a phase had too few first tokens of a home that does not flood."""
    return [
        f"{one.home} has {one.first_tokens} first tokens in the {name} phase, and {LEAST} are "
        f"needed: give --seconds {_needed_s(found.phase_s, one.first_tokens)} or more"
        for name, phase in (("calm", found.calm), ("flood", found.flood))
        for one in found.others(phase)
        if one.first_tokens < LEAST
    ]


def _needed_s(phase_s: float, first_tokens: int) -> int:
    """The length of a phase with enough first tokens, at the same rate; with none, twice as long
    a phase."""
    return math.ceil(phase_s * LEAST / first_tokens if first_tokens else 2 * phase_s)


def _ratio(value: float, of: float) -> float:
    return value / of if of else math.nan


async def flood_from(world: World, home: str, phase_s: float, seed: int) -> Flood:
    planned = {h.cluster: h.rate_rps for h in solve_network(world.case.problem).homes}
    calm = {name: PLANNED * rps for name, rps in planned.items()}
    flood = calm | {home: FLOOD * planned[home]}
    before = await _phase(world, calm, planned, phase_s, seed)
    # The flooding home has a backlog that no client waits for.
    during = await _phase(world, flood, planned, phase_s, seed, give_up=[home])
    return Flood(home, phase_s, before, during)


async def _phase(
    world: World,
    rates_rps: Mapping[str, float],
    planned: Mapping[str, float],
    phase_s: float,
    seed: int,
    give_up: Collection[str] = (),
) -> list[HomePhase]:
    """Every phase begins with empty queues and the same seed, so that the requests of a home which
    sends at the same rate are the same in each."""
    load = world.load(seed)
    began_s = world.clock.now()
    load.start(rates_rps, phase_s)
    await load.sent()  # a request that is late by a moment belongs to the phase as well
    await asyncio.sleep(max(0.0, began_s + phase_s - world.clock.now()))
    await load.stop(give_up=give_up)
    await world.lines.wait_for([one.id for one in load.asked if one.home not in give_up])
    return home_phases(load.asked, planned, began_s, phase_s, world.lines.found, world.cluster_of)


def home_phases(
    asked: Sequence[Asked],
    planned: Mapping[str, float],
    began_s: float,
    phase_s: float,
    lines: Mapping[str, RequestOutcome],
    cluster_of: Mapping[str, str],
) -> list[HomePhase]:
    """`asked`: the requests of this phase. `lines`: what the gateways have logged about them."""
    from_s, until_s = began_s + SETTLES * phase_s, began_s + phase_s
    rows = []
    for home, planned_rps in planned.items():
        here = [one for one in asked if one.home == home]
        sent = [one for one in here if from_s < one.sent_s <= until_s]
        first = sum(one.first_s is not None and from_s < one.first_s <= until_s for one in here)
        failures = tally(here, lines, [], cluster_of).failed
        rows.append(
            HomePhase(
                home,
                planned_rps,
                offered_rps=len(sent) / (until_s - from_s),
                first_tokens=first,
                first_tokens_rps=first / (until_s - from_s),
                p90_ttft_s=ttft_quantile(sent, 0.9),
                failed=len(failures),
                failures=failures[:EXAMPLES],
            )
        )
    return rows
