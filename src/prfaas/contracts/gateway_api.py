"""What the gateways of a deployment tell each other: loads and lengths of requests in reports, and
plans and orders to drain in records that the kvds keep.

Every gateway polls every other one for its `GatewayReport`, under the member key. No prompt, no
answer and no credential is in it. A plan has the epoch of the gateway that made it and a number
that rises with every plan: each gateway follows the plan with the highest pair that a majority of
the kvds keeps.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

REPORT_PATH = "/prfaas/v1/gateway"  # GET, under the member key
DRAIN_PATH = "/prfaas/v1/drain"  # POST, under the operator key
MAX_REPORT_BYTES = 1 << 20
MAX_ROWS = 512  # requests whose lengths one report has
MAX_REASON_CHARS = 4096
MAX_COUNT, MAX_AMOUNT, MAX_AGE_S = 1 << 40, 1e12, 1e9

_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_AMOUNT)]
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Age: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_AGE_S)]


class HomePlan(msgspec.Struct, frozen=True):
    """The plan of one PD cluster."""

    threshold_tokens: _Count
    shares: dict[_Name, _Share]  # of the offloaded requests, by PrfaaS cluster
    roles: dict[_Name, Literal["prefill", "decode"]]  # by node
    # Live ones that the plan counts on, of the PD cluster and of its PrfaaS clusters. Plans of two
    # homes may count on different numbers at one PrfaaS cluster, because they were made apart.
    instances: dict[_Name, _Count]
    capacity_rps: _Amount
    age_s: _Age  # since it was made
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
    converted_age_s: dict[_Name, _Age] = {}  # since each node's latest change of role
    together: tuple[_Name, ...] = ()  # the PD clusters that were planned together


class SharedPlan(msgspec.Struct, frozen=True):
    """The plans of all PD clusters, as the gateway that plans follows them."""

    epoch: _Count
    number: _Count
    homes: dict[_Name, HomePlan]
    # Nodes that get no new requests, because they are about to change their role.
    draining: tuple[_Name, ...] = ()
    stated: Annotated[str, msgspec.Meta(max_length=64)] = ""  # digest of what it was made from


class NodeLoad(msgspec.Struct, frozen=True):
    """What one gateway has at one node."""

    prefills: _Count  # dispatched and not finished
    work_s: _Amount  # stated seconds of these prefills that are left
    decodes: _Count  # requests that decode or will decode there


class ClusterUse(msgspec.Struct, frozen=True):
    """What one gateway's homes take of one PrfaaS cluster."""

    used_s: _Amount  # stated prefill seconds that were dispatched lately, decayed
    wants: bool  # requests wait for room there


class DrainOrder(msgspec.Struct, frozen=True):
    """Whether a cluster is drained: the data of its planning record."""

    drained: bool


class SetDrain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an operator's `POST /prfaas/v1/drain`."""

    cluster: _Name
    drained: bool


# Age in seconds, new tokens, cached tokens, output tokens, wait in seconds.
TrafficRow: TypeAlias = tuple[_Age, _Count, _Count, _Count, _Amount]


class GatewayReport(msgspec.Struct, frozen=True):
    """One gateway, as of now."""

    cluster: _Name  # the PD cluster whose requests it receives
    instance: _Name  # of this process
    epoch: _Count  # the highest that a majority of the kvds has promised, as far as it knows
    plans: bool  # whether this gateway plans now
    loads: dict[_Name, NodeLoad]  # by node, where there is any
    uses: dict[_Name, ClusterUse]  # by PrfaaS cluster
    draining: tuple[_Name, ...]  # nodes that get no new requests of this gateway
    # Number of the first of `rows`, or of the next request where `rows` is empty. A gateway
    # numbers its finished requests from 1. A poll names the last number that its sender has.
    first_row: _Count
    rows: Annotated[tuple[TrafficRow, ...], msgspec.Meta(max_length=MAX_ROWS)]
    followed: tuple[_Count, _Count] | None = None  # epoch and number of the plan that it follows
    drained: tuple[_Name, ...] = ()  # clusters that it has out of use
