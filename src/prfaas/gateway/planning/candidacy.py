"""One gateway's part in the election of the gateway that plans. Pure: the caller sends the messages
and passes the time.

In every round the gateway sends one claim to all kvds: a renewal while it plans, a claim of a new
epoch when enough kvds have promised planning to no other gateway, and otherwise the question who
plans, which is a claim of epoch 0.

No two gateways plan at the same time. A gateway plans while it has the lease of more than half of
the kvds, so two planners would have a kvd in common. That kvd grants the lease to the second one
only after the lease of the first one has expired, and the first one counts its lease from when it
asked, which was before the kvd granted it.

For the same reason epochs rise from planner to planner, unless the kvd in common was restarted.
Then they rise because every gateway claims a higher epoch than any that it has heard of, from kvds
or from the reports of other gateways.

One kvd, or one gateway, may name any epoch, and a majority names only what has happened. So the
others' epochs count up to `MOST_AHEAD` above the highest that a majority has promised, and a
gateway that plans claims a higher epoch for the sake of a minority only from time to time. A
minority that is really further ahead is reached in several such claims.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prfaas.contracts.kvd_api import LONGEST_LEASE_S, MOST_EPOCH, ClaimPlanning, PlanningLease

RENEW_S = 0.5  # between two rounds
# By which a lease ends earlier here than at the kvd: clocks differ in their rate.
MARGIN_S = 0.25
_MOST_DOUBLINGS = 3  # of the wait before a claim
# A claim raises the epoch by one, a gateway makes at most one in a round, and each that fails
# lengthens the wait before the next one. So many do not fail in a row.
MOST_AHEAD = 1024
# Between two claims with which a gateway that plans wins kvds back that have promised a higher
# epoch. A kvd that always names a higher one then takes a century to use the epochs up, and makes
# work every few seconds instead of in every round.
WIN_BACK_S = 5.0


def has_majority(granted: Collection[str], all_urls: Collection[str], stated: int = 0) -> bool:
    """Whether these kvds are more than half of all; of exactly half, whether the kvd with the
    smallest URL is among them. Two sets with a majority have a kvd in common.

    `stated`: the deployment file does not list the kvds, but says that they are so many. Gateways
    may know different ones of them then, so more than half of that number is needed, whichever this
    gateway knows, and exactly half is not enough."""
    everywhere = set(all_urls)
    having = everywhere.intersection(granted)
    if stated:
        return 2 * len(having) > max(stated, len(everywhere))
    if not having or 2 * len(having) != len(everywhere):
        return 2 * len(having) > len(everywhere)
    return min(everywhere) in having


def majority_epoch(epochs: Mapping[str, int], all_urls: Collection[str], stated: int = 0) -> int:
    """The highest epoch that a majority of the kvds has promised or gone beyond. `epochs`: of the
    latest promise of each kvd that has answered."""
    ranked = sorted(epochs, key=lambda url: epochs[url], reverse=True)
    # More kvds never lose the majority that fewer have.
    needed = bisect_left(
        range(len(ranked)),
        True,
        key=lambda last: has_majority(ranked[: last + 1], all_urls, stated),
    )
    return epochs[ranked[needed]] if needed < len(ranked) else 0


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a kvd has promised, as of its latest answer."""

    gateway: str
    epoch: int
    until_s: float


class Candidacy:
    def __init__(self, instance: str, stated: int = 0) -> None:
        """`stated`: see `has_majority`."""
        self.instance = instance
        self._stated = stated
        self.epoch = 0  # with which this gateway plans, or has planned last
        self.first_epoch = 0  # with which that planning began: it has not lapsed since
        self.highest_epoch = 0  # heard of anywhere, as far as it counts
        self.majority_epoch = 0  # the highest that a majority of the kvds has promised
        self._urls: tuple[str, ...] = ()  # of all kvds
        self._claimed = 0  # the epoch that is claimed or renewed; 0: none
        self._given_up = 0  # an epoch that the kvds have not been told about
        self._won = False  # planning has not lapsed since a majority granted an epoch
        self._granted: set[str] = set()  # kvds that have granted the claimed epoch
        self._until_s: dict[str, float] = {}  # of the lease at each kvd, counted from when asked
        self._heard: dict[str, _Heard] = {}
        self._answered: set[str] = set()  # in this round
        self._claim_at_s: float | None = None
        self._won_back_s = -math.inf  # when this gateway, while it planned, claimed a new epoch
        self._failed_claims = 0  # in a row
        self._ended = False
        # Instances draw different waits, so two candidates that claim at the same moment, and keep
        # each other from a majority, do not do so again and again.
        self._random = random.Random(instance)

    def plans(self, now_s: float) -> bool:
        return self._won and has_majority(self._held(now_s), self._urls, self._stated)

    def begin_round(self, now_s: float, urls: Collection[str], seen_epoch: int) -> ClaimPlanning:
        """The claim that all kvds are sent. `seen_epoch` is the highest that this gateway has heard
        of from others than kvds."""
        self._urls = tuple(urls)
        self._until_s = {url: at_s for url, at_s in self._until_s.items() if url in self._urls}
        self._heard = {url: heard for url, heard in self._heard.items() if url in self._urls}
        self._answered.clear()
        self._hear(seen_epoch)
        self._check_lapse(now_s)
        if not self._won and self._claimed:  # the previous round was cut short
            self._abandon()
        if self._is_due(now_s):
            self._claim_at_s = None
            if self._won:
                self._won_back_s = now_s
            self.highest_epoch += 1
            self._claimed = self.highest_epoch
            self._granted.clear()
        return ClaimPlanning(self.instance, self._claimed, LONGEST_LEASE_S if self._claimed else 0)

    def receive(
        self, url: str, claim: ClaimPlanning, sent_s: float, lease: PlanningLease, now_s: float
    ) -> None:
        """The answer of the kvd at `url` to a claim that was sent at `sent_s`."""
        if url not in self._urls:
            return
        held_s = min(lease.left_s, LONGEST_LEASE_S)  # no kvd grants a longer lease
        self._heard[url] = _Heard(lease.gateway, lease.epoch, now_s + held_s)
        self._answered.add(url)
        self._check_lapse(now_s)  # before a late answer prolongs a lease that has expired
        if not lease.granted or not claim.lease_s or claim.epoch != self._claimed:
            return
        if (lease.gateway, lease.epoch) != (claim.gateway, claim.epoch):
            return  # what it has promised is not what was claimed
        until_s = sent_s + min(claim.lease_s, lease.left_s)
        self._until_s[url] = max(until_s, self._until_s.get(url, until_s))
        self._granted.add(url)
        if has_majority(self._granted & self._held(now_s), self._urls, self._stated):
            self.epoch = self._claimed
            if not self._won:
                self.first_epoch = self.epoch
            self.majority_epoch = max(self.majority_epoch, self.epoch)
            self._won, self._failed_claims = True, 0

    def end_round(self, now_s: float) -> ClaimPlanning | None:
        """The claim that tells all kvds that an epoch is given up, if one is."""
        self._hear()
        self._check_lapse(now_s)
        if self._claimed and not self._won:
            self._failed_claims += 1
            self._abandon()
        self._choose_wait(now_s)
        return self._take_given_up()

    def end(self) -> ClaimPlanning | None:
        """This gateway plans no more. The claim that tells all kvds, if one has to."""
        self._ended = True
        if self._claimed:
            self._abandon()
        self._claim_at_s = None
        return self._take_given_up()

    def _is_due(self, now_s: float) -> bool:
        """Whether this round claims a new epoch."""
        if self._ended or self.highest_epoch >= MOST_EPOCH:
            return False
        if self._won:
            # A kvd that has promised this or a later epoch to a candidate that failed refuses this
            # gateway's renewals and roles. A later epoch replaces this gateway's own leases.
            if now_s < self._won_back_s + WIN_BACK_S:
                return False
            return self.highest_epoch > self._claimed or any(
                heard.epoch == self._claimed and heard.gateway != self.instance
                for heard in self._heard.values()
            )
        return self._claim_at_s is not None and now_s >= self._claim_at_s

    def _hear(self, seen_epoch: int = 0) -> None:
        """Counts the epochs of the latest answers, and that of others than kvds."""
        heard = {url: heard.epoch for url, heard in self._heard.items()}
        promised = majority_epoch(heard, self._urls, self._stated)
        self.majority_epoch = max(self.majority_epoch, promised)
        highest = max(seen_epoch, *heard.values(), 0)
        highest = min(highest, self.majority_epoch + MOST_AHEAD)
        self.highest_epoch = max(self.highest_epoch, self.majority_epoch, highest)

    def _choose_wait(self, now_s: float) -> None:
        """Of the next claim, when enough kvds could grant it."""
        held_by: dict[str, set[str]] = {}  # the kvds of each other gateway that has a lease
        for url in self._answered:
            heard = self._heard[url]
            if heard.until_s > now_s and heard.gateway != self.instance:
                held_by.setdefault(heard.gateway, set()).add(url)
        free = self._answered.difference(*held_by.values())
        if any(has_majority(urls, self._urls, self._stated) for urls in held_by.values()):
            self._failed_claims = 0  # the candidates are no longer in each other's way
        if self._won or self._ended or not has_majority(free, self._urls, self._stated):
            self._claim_at_s = None
        elif self._claim_at_s is None:
            most_s = RENEW_S * 2 ** min(self._failed_claims, _MOST_DOUBLINGS)
            self._claim_at_s = now_s + self._random.uniform(0.0, most_s)

    def _held(self, now_s: float) -> set[str]:
        """The kvds whose lease this gateway has, of any of its epochs."""
        return {url for url, until_s in self._until_s.items() if until_s - MARGIN_S > now_s}

    def _check_lapse(self, now_s: float) -> None:
        if self._won and not self.plans(now_s):
            self._abandon()

    def _abandon(self) -> None:
        self._given_up, self._claimed, self._won = self._claimed, 0, False
        self._granted.clear()
        self._until_s.clear()

    def _take_given_up(self) -> ClaimPlanning | None:
        epoch, self._given_up = self._given_up, 0
        return ClaimPlanning(self.instance, epoch, 0.0) if epoch else None
