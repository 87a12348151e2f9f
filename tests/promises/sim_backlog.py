"""What a policy carries under a constant backlog, once the speeds of nodes and links are learned.

Every home always has the same number of requests that have no first token yet: where one has its
first token, the next one arrives.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prfaas.config.deployment import SchedulerSection
from prfaas.planner.network.problem import NetworkProblem
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.attempt import Attempt
from prfaas.sim.config import SimConfig
from prfaas.sim.faults import schedule_changes
from prfaas.sim.world import World
from tests.promises.cases import POLICIES, Case, Policy
from tests.promises.sim_cases import (
    HOPELESS_S,
    NEAR,
    OUTPUT_TOKENS,
    config_of,
    network_of,
    prompts,
)

DEFAULT: Policy = SchedulerSection().policy
OF_NODE = 8  # waiting requests for each present node, all homes together
SERVED = 40  # requests for each of them, unless the result is to be more exact
CLOSE = 0.93  # of the best: few requests do not tell whether that is more than 0.9
LEARNED = 0.5  # part of the requests after which speeds are learned


class _Backlog(World):
    """A world in which a request arrives when another one has its first token."""

    def __init__(
        self, problem: NetworkProblem, arrivals: Arrivals, config: SimConfig, homes: int
    ) -> None:
        super().__init__(problem, arrivals, config)
        self._next = list(range(homes))
        self._step = homes
        self.served: list[tuple[float, int]] = []  # time and index
        self.is_constant = True  # every home has had a next request so far

    def feed(self, number: int) -> None:
        """The next request of a home arrives."""
        index = self._next[number]
        if index < len(self._times):
            self._next[number] += self._step
            self._times[index] = self.events.now_s
            self.arrive(index)
        else:
            self.is_constant = False

    def _on_handoff(self, attempt: Attempt) -> None:
        super()._on_handoff(attempt)
        self.served.append((self.events.now_s, attempt.index))
        self.events.at(self.events.now_s, self.feed, attempt.index % self._step)


def share_of_best(case: Case) -> float:
    """What the default policy carries, of what the best one does."""
    found = {policy: carried(case, policy) for policy in POLICIES}
    best = max(found, key=lambda policy: found[policy])
    share = found[DEFAULT] / found[best]
    if share < CLOSE:
        share = carried(case, DEFAULT, 4 * SERVED) / carried(case, best, 4 * SERVED)
    return share


def carried(case: Case, policy: Policy, served: int = SERVED) -> float:
    """Work of the requests that have their first token after speeds are learned, per second. A
    request counts with the time that the profile of a PD node states for it, so that it does not
    matter which requests a policy prefers."""
    case = replace(case, policy=policy)
    homes = len(case.traffic)
    nodes = sum(len(cluster.present) for cluster in case.deployment.clusters)
    arrivals = _requests(case, served * nodes)
    world = _Backlog(network_of(case), arrivals, config_of(case, HOPELESS_S), homes)
    schedule_changes(world, 0.0)
    world.events.run_before(0.0)
    for number in range(max(OF_NODE * nodes, homes)):
        world.feed(number % homes)
    # A home that is served faster than the others may have no request left to arrive before that.
    enough = len(arrivals) // 2
    while world.is_constant and len(world.served) < enough and world.events.now_s < HOPELESS_S:
        world.events.run_before(world.events.now_s + world.config.report_interval_s)
    begin = int(LEARNED * len(world.served))
    at_s = [one for one, _ in world.served]
    indices = np.array([index for _, index in world.served[begin:]], dtype=np.int64)
    work_s = NEAR.seconds(arrivals.prompt_tokens[indices].astype(float)).sum()
    return float(work_s) / (at_s[-1] - at_s[begin])


def _requests(case: Case, count: int) -> Arrivals:
    """The homes take turns."""
    homes = len(case.traffic)
    tokens = np.zeros(count, dtype=np.int64)
    for number, home in enumerate(case.traffic):
        rng = np.random.default_rng([case.seed, number])
        own = tokens[number::homes]
        own[:] = prompts(home, len(own), rng)[0]
    return Arrivals(
        at_s=np.arange(count, dtype=float),  # for the order: they arrive when they are fed
        prompt_tokens=tokens,
        cached_tokens=np.zeros(count, dtype=np.int64),
        output_tokens=np.full(count, OUTPUT_TOKENS),
        homes=np.arange(count, dtype=np.int64) % homes,
    )
