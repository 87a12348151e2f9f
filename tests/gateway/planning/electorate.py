"""Gateways and kvds that elect a planner, in virtual time: messages are delayed and lost, kvds
restart, gateways pause, die and start anew. All clocks have the same rate.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from prfaas.contracts.kvd_api import LONGEST_LEASE_S, ClaimPlanning, PlanningLease
from prfaas.gateway.planning.candidacy import RENEW_S, Candidacy
from prfaas.gateway.planning.election import CLAIM_S
from prfaas.kvd.planning_lease import Promise, decide, first_promise

REPORTS_S = 0.25  # between two reports that gateways send each other
LONGEST_PAUSE_S = 2.5 * LONGEST_LEASE_S


# What a kvd answers instead of the truth. It keeps its promises, so it never grants two leases.
Lie: TypeAlias = Callable[[ClaimPlanning, PlanningLease], PlanningLease]


@dataclass
class Network:
    longest_delay_s: float
    lost: float  # the share of messages
    tail: float = 0.0  # the share of messages whose delay is ten times as long


CALM = Network(0.05, 0.0)


@dataclass
class SimulatedKvd:
    promise: Promise
    down: bool = False


@dataclass
class SimulatedGateway:
    candidacy: Candidacy
    paused_until_s: float = 0.0
    dead: bool = False
    round: int = 0
    waiting: set[str] = field(default_factory=set)  # kvds that have not answered in this round


class Electorate:
    """`with_reports`: gateways hear of each other's epochs, as from their reports."""

    def __init__(self, seed: str, gateways: int, kvds: int, *, with_reports: bool) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.network = CALM
        self.pauses = 0.0  # the share of claims after which the gateway pauses, before the answers
        self.cuts: set[tuple[str, str]] = set()  # pairs of instance and URL without a connection
        self.planners: list[tuple[float, str, int]] = []  # since when, instance, epoch
        self.lies: dict[str, Lie] = {}  # by the URL of a kvd
        self.epochs_rise = True
        self._with_reports = with_reports
        self._reported_epoch = 0
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.kvds = {f"http://kvd-{n}": SimulatedKvd(first_promise(0.0)) for n in range(kvds)}
        self.gateways: list[SimulatedGateway] = []
        for _ in range(gateways):
            self.start_gateway()
        self._report()

    @property
    def urls(self) -> Sequence[str]:
        return list(self.kvds)

    @property
    def planning(self) -> list[SimulatedGateway]:
        """Also those that pause: they would act when they go on."""
        return [one for one in self.gateways if one.candidacy.plans(self.now_s) and not one.dead]

    def run(self, until_s: float) -> None:
        """Raises AssertionError when two gateways plan, or an epoch is not higher than the last."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self._check()
        self.now_s = until_s

    def start_gateway(self) -> SimulatedGateway:
        gateway = SimulatedGateway(Candidacy(f"{self.random.getrandbits(64):x}"))
        self.gateways.append(gateway)
        self._at(self.random.uniform(0.0, RENEW_S), lambda: self._begin_round(gateway))
        return gateway

    def kill(self, gateway: SimulatedGateway) -> None:
        """Others have heard of its epoch: if they had not, and all kvds restart, none knows it."""
        self._reported_epoch = max(self._reported_epoch, gateway.candidacy.majority_epoch)
        gateway.dead = True
        self.gateways.remove(gateway)

    def pause(self, gateway: SimulatedGateway, for_s: float) -> None:
        gateway.paused_until_s = max(gateway.paused_until_s, self.now_s + for_s)

    def restart(self, url: str, after_s: float) -> None:
        """The kvd forgets what it has promised."""
        kvd = self.kvds[url]
        kvd.down = True

        def start() -> None:
            kvd.promise, kvd.down = first_promise(self.now_s), False

        self._at(after_s, start)

    def stop_cleanly(self, gateway: SimulatedGateway) -> None:
        claim = gateway.candidacy.end()
        if claim is not None:
            self._send_all(gateway, claim)
        self.kill(gateway)

    def _at(self, after_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._numbers), event))

    def _at_gateway(self, gateway: SimulatedGateway, event: Callable[[], None]) -> None:
        """Now, or when the gateway goes on."""
        if gateway.dead:
            return
        if gateway.paused_until_s > self.now_s:
            wait_s = gateway.paused_until_s - self.now_s
            self._at(wait_s, lambda: self._at_gateway(gateway, event))
            return
        event()

    def _begin_round(self, gateway: SimulatedGateway) -> None:
        def begin() -> None:
            gateway.round += 1
            gateway.waiting = set(self.urls)
            number, candidacy = gateway.round, gateway.candidacy
            seen_epoch = self._reported_epoch if self._with_reports else 0
            claim = candidacy.begin_round(self.now_s, self.urls, seen_epoch)
            self._send_all(gateway, claim)
            within_s = RENEW_S if candidacy.plans(self.now_s) else CLAIM_S
            self._at(within_s, lambda: self._end_round(gateway, number))
            if claim.epoch and self.random.random() < self.pauses:
                self.pause(gateway, self.random.uniform(0.0, LONGEST_PAUSE_S))

        self._at_gateway(gateway, begin)

    def _end_round(self, gateway: SimulatedGateway, number: int) -> None:
        def end() -> None:
            if gateway.round != number:
                return
            gateway.round += 1  # it has ended
            gateway.waiting.clear()
            given_up = gateway.candidacy.end_round(self.now_s)
            if given_up is not None:
                self._send_all(gateway, given_up)
            self._at(RENEW_S, lambda: self._begin_round(gateway))

        self._at_gateway(gateway, end)

    def _send_all(self, gateway: SimulatedGateway, claim: ClaimPlanning) -> None:
        number = gateway.round
        for url in self.urls:
            self._send(gateway, claim, url, number)

    def _send(self, gateway: SimulatedGateway, claim: ClaimPlanning, url: str, number: int) -> None:
        sent_s, candidacy = self.now_s, gateway.candidacy

        def arrive() -> None:
            kvd = self.kvds[url]
            if kvd.down:
                return
            kvd.promise, lease = decide(kvd.promise, claim, self.now_s)
            if url in self.lies:
                lease = self.lies[url](claim, lease)
            if not self._is_lost(gateway, url):
                self._at(self._delay_s(), lambda: answer(lease))

        def answer(lease: PlanningLease) -> None:
            # A gateway that goes on after a pause may read the answer before it notices that the
            # time for it was up.
            paused = gateway.paused_until_s > self.now_s
            if paused or self.now_s - sent_s <= CLAIM_S:
                self._at_gateway(gateway, lambda: receive(lease))

        def receive(lease: PlanningLease) -> None:
            candidacy.receive(url, claim, sent_s, lease, self.now_s)
            if gateway.round == number and url in gateway.waiting:
                gateway.waiting.remove(url)
                if not gateway.waiting:
                    self._end_round(gateway, number)

        if not self._is_lost(gateway, url):
            self._at(self._delay_s(), arrive)

    def _is_lost(self, gateway: SimulatedGateway, url: str) -> bool:
        cut = (gateway.candidacy.instance, url) in self.cuts
        return cut or self.random.random() < self.network.lost

    def _delay_s(self) -> float:
        delay_s = self.random.uniform(0.0, self.network.longest_delay_s)
        return delay_s * (10 if self.random.random() < self.network.tail else 1)

    def _report(self) -> None:
        for gateway in self.gateways:
            self._reported_epoch = max(self._reported_epoch, gateway.candidacy.majority_epoch)
        self._at(REPORTS_S, self._report)

    def _check(self) -> None:
        planning = self.planning
        assert len(planning) <= 1, f"two gateways plan at {self.now_s} s: {planning}"
        for gateway in planning:
            planner = gateway.candidacy.instance, gateway.candidacy.epoch
            last = self.planners[-1] if self.planners else (0.0, "", 0)
            if planner != last[1:]:
                rises = planner[1] > last[2]
                assert rises or not self.epochs_rise, f"{planner} follows {last}"
                self.planners.append((self.now_s, *planner))


def disturb(electorate: Electorate, until_s: float, *, restarts: bool) -> None:
    """Random faults until then. Afterwards the network is calm, and every kvd runs."""
    draw = electorate.random
    electorate.pauses = 0.05
    while electorate.now_s < until_s:
        electorate.network = Network(
            draw.choice((0.01, 0.2, 1.0)), draw.choice((0.0, 0.1, 0.5)), draw.choice((0.0, 0.05))
        )
        gateway = draw.choice(electorate.gateways)
        url = draw.choice(electorate.urls)
        match draw.randrange(7):
            case 0:
                electorate.pause(gateway, draw.uniform(0.0, LONGEST_PAUSE_S))
            case 1:
                electorate.kill(gateway)
                electorate.start_gateway()
            case 2 if restarts:
                electorate.restart(url, draw.uniform(0.0, 2 * LONGEST_LEASE_S))
            case 3:
                electorate.cuts.add((gateway.candidacy.instance, url))
            case 4:
                electorate.cuts.clear()
            case 5:
                electorate.stop_cleanly(gateway)
                electorate.start_gateway()
        electorate.run(electorate.now_s + draw.expovariate(0.5))
    electorate.network, electorate.pauses = CALM, 0.0
    electorate.cuts.clear()
