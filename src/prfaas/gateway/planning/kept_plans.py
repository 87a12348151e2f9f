"""The plan of a deployment as a planning record: the gateway that plans has it kept, and the others
follow it, as does a gateway that has been restarted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from prfaas.clock import Clock
from prfaas.config import Deployment
from prfaas.contracts.gateway_api import SharedPlan
from prfaas.contracts.kvd_api import MAX_RECORD_BYTES
from prfaas.errors import InputError
from prfaas.gateway.planning.plan_codec import decode_plans, encode_plans
from prfaas.gateway.planning.record_keeping import Record, RecordKeeping
from prfaas.planner.network.problem import NetworkProblem
from prfaas.scheduler.homes.plans import home_name
from prfaas.scheduler.plan import Plan, hardware_for
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)

PLAN = "plan"  # the name of the record


class _Followed(NamedTuple):
    number: tuple[int, int]  # epoch and number
    plans: Mapping[ClusterId, Plan]
    draining: tuple[NodeId, ...]


def stated_inputs(deployment: Deployment) -> str:
    """A digest of what plans are made from, less the nodes."""
    sections = (deployment.model, deployment.workload, deployment.slo, deployment.links)
    clusters = [msgspec.structs.replace(one, nodes=[]) for one in deployment.clusters]
    parts = (*sections, clusters, deployment.scheduler, deployment.cache, deployment.catalog)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class KeptPlans:
    def __init__(
        self,
        records: RecordKeeping,
        deployment: Deployment,
        network: NetworkProblem,
        clock: Clock,
    ) -> None:
        scheduler = deployment.scheduler
        self._records = records
        self._problems = {
            home_name(home): hardware_for(scheduler.policy, home.problem) for home in network.homes
        }
        self._rules = scheduler.replan
        self._stated = stated_inputs(deployment)
        self._clock = clock
        self._followed: _Followed | None = None
        self._refused: tuple[int, int] | None = None  # a plan with an impossible value

    @property
    def is_informed(self) -> bool:
        return self._records.is_informed

    @property
    def epoch(self) -> int:
        """Of the plan that a majority of the kvds keeps; 0: they keep none."""
        found = self._records.found(PLAN)
        return 0 if found is None else found.epoch

    @property
    def followed(self) -> tuple[int, int] | None:
        """Epoch and number of the plan that this gateway follows."""
        return None if self._followed is None else self._followed.number

    @property
    def draining(self) -> Collection[NodeId]:
        """Nodes that get no new requests, because they are about to change their role."""
        return () if self._followed is None else self._followed.draining

    def newer(self, *, same_inputs: bool = False) -> Mapping[ClusterId, Plan] | None:
        """Plans that are kept since the previous call. `same_inputs`: only plans for what this
        gateway's deployment file states."""
        record = self._records.found(PLAN)
        if record is None:
            return None
        number, known = (record.epoch, record.number), self._followed
        if number == self._refused or (known is not None and number <= known.number):
            return None
        try:
            shared = _decoded(record)
            if same_inputs and shared.stated != self._stated:
                log.info("the plan %d.%d that kvds keep is for another deployment file", *number)
                self._refused = number
                return None
            # Ages in the record are those of when it was made.
            plans = decode_plans(shared, self._problems, self._rules, record.made_s)
        except InputError as error:
            log.warning("the plan %d.%d that kvds keep is ignored: %s", *number, error)
            self._refused = number
            return None
        draining = tuple(NodeId(node) for node in shared.draining)
        self._followed = _Followed(number, plans, draining)
        return plans

    def share(
        self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId], epoch: int | None
    ) -> None:
        """Has the plans kept. `epoch`: of the planning lease; None: this gateway needs none."""
        known = self._followed
        if epoch is None:  # it continues with the epoch of the gateway that planned last
            epoch = max(known.number[0] if known is not None else 0, self.epoch)
        number = self._records.next_number(PLAN, epoch)
        if known is not None and known.number[0] == epoch:
            same = _contents(plans) == _contents(known.plans)
            if same and set(draining) == set(known.draining):
                return
            number = max(number, known.number[1] + 1)
        now_s = self._clock.now()
        shared = encode_plans(plans, epoch, number, sorted(draining), now_s, stated=self._stated)
        self._followed = _Followed((epoch, number), dict(plans), tuple(draining))
        data = msgspec.json.encode(shared)
        if len(data) > MAX_RECORD_BYTES:
            log.warning(
                "the plan of %d bytes is too large for a record: no kvd keeps it", len(data)
            )
            return
        self._records.want(Record(PLAN, epoch, number, data, now_s))


def _decoded(record: Record) -> SharedPlan:
    try:
        shared = msgspec.json.decode(record.data, type=SharedPlan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"it is not a plan: {error}") from None
    if (shared.epoch, shared.number) != (record.epoch, record.number):
        raise InputError(f"it is of version {shared.epoch}.{shared.number}")
    return shared


def _contents(plans: Mapping[ClusterId, Plan]) -> dict[ClusterId, tuple[object, ...]]:
    return {home: plan.content for home, plan in plans.items()}
