"""The planning lease: which gateway may plan, as far as this kvd is concerned.

A gateway plans while it has the lease of more than half of the kvds. Each kvd promises an epoch to
one gateway, and while that lease lasts, to no other gateway a higher one. A gateway counts its
lease from the moment in which it asked, so a lease ends at the gateway before it ends here, and
two gateways never plan at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.contracts.kvd_api import LONGEST_LEASE_S, ClaimPlanning, PlanningLease


@dataclass(frozen=True, slots=True)
class Promise:
    gateway: str
    epoch: int
    until_s: float
    given_up: bool = False  # the gateway uses this epoch no more


def first_promise(started_s: float) -> Promise:
    """Of a kvd that has just started. It may have forgotten a lease, so it waits until that one has
    expired."""
    return Promise("", 0, started_s + LONGEST_LEASE_S)


def decide(promise: Promise, claim: ClaimPlanning, now_s: float) -> tuple[Promise, PlanningLease]:
    granted = _is_granted(promise, claim, now_s)
    if granted:
        promise = _granted(promise, claim, now_s)
    left_s = min(LONGEST_LEASE_S, max(0.0, promise.until_s - now_s))
    return promise, PlanningLease(promise.gateway, promise.epoch, granted, left_s)


def _is_granted(promise: Promise, claim: ClaimPlanning, now_s: float) -> bool:
    if claim.gateway != promise.gateway:
        return claim.epoch > promise.epoch and now_s >= promise.until_s
    if claim.epoch != promise.epoch:
        return claim.epoch > promise.epoch  # the gateway replaces its own lease
    # A claim that arrives after its epoch was given up was sent before.
    return not promise.given_up or not claim.lease_s


def _granted(promise: Promise, claim: ClaimPlanning, now_s: float) -> Promise:
    if not claim.lease_s:
        return Promise(claim.gateway, claim.epoch, now_s, given_up=True)
    until_s = now_s + min(claim.lease_s, LONGEST_LEASE_S)
    if claim.gateway == promise.gateway:  # it counts on what it was granted before
        until_s = max(until_s, promise.until_s)
    return Promise(claim.gateway, claim.epoch, until_s)
