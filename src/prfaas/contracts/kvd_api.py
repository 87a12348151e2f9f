"""The kvd's HTTP API: the JSON body of every request and response. Bytes travel as base64.

    POST /v1/open                OpenTransfer -> Grant | NotNow
    GET  /v1/transfers/ID        -> TransferStatus
    POST /v1/transfers/ID/abort  AbortTransfer -> TransferStatus
    POST /v1/match               MatchPrefix -> PrefixMatch
    POST /v1/pull                PullPrefix -> PrefixPulled | NotNow
    POST /v1/push                PushPrefix -> PushStarted | NotNow
    GET  /v1/stats               -> KvdReport
    GET  /v1/events              -> EventPage
    GET  /v1/role                -> Role
    POST /v1/role                SetRole -> Role
    POST /v1/planning            ClaimPlanning -> PlanningLease
    POST /v1/records             PutRecord -> RecordPut
    GET  /v1/records             -> PlanningRecord
    POST /v1/prove               ProveMembership -> ProofOfMembership
    any error                    -> KvdErrorBody

    POST /prfaas/v1/register     Heartbeat, from a kvd to a gateway

`kvd/http_api.py` serves it; `gateway/client/kvd_client.py` calls it.

Services of two versions work together during an upgrade: a later version may add fields that have
defaults, and an earlier one ignores fields that it does not know. A field that must not be ignored
belongs into `Compat`, which refuses unknown fields, or needs another path.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, Group, KVSpec, LinearState, SlidingWindow
from prfaas.types import Compat, Grant, HashEvent, LinkStats, NodeId, TenantTag, TransferId

LONGEST_WAIT_S = 60.0  # the upper bound of ?wait_s=
PULL_S = 300.0  # the longest time that a pull may take
# The reason of a released transfer whose engine found that it is not of its prompt, and read none
# of it. Only this proves to a gateway that engine and gateway tokenise a request differently.
OTHER_PROMPT: Final = "other_prompt"
SNAPSHOT = -1  # ?since= that requests a snapshot
MAX_GROUPS = 256  # of a model
MAX_LAYERS = 4_096  # of a group
MAX_HEADS = 65_536  # of a group
MAX_POOLS = 2  # of a kvd: one for each form
_Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
# Segment names contain the names of groups, see `kvspec/segments.py`.
GroupName: TypeAlias = Annotated[
    str, msgspec.Meta(min_length=1, max_length=64, pattern="^[a-z0-9_]+$")
]
# A block hash has 32 bytes; the limit leaves room for another hash function.
BlockName: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
# The window of `KvdReport.late_s`: a gateway that polls twice a second misses nothing within it.
LATE_WINDOW_S = 2.0
LONGEST_LEASE_S = 3.0  # of the planning lease: a kvd grants no longer one
MOST_EPOCH = 1 << 40  # of plannings
_Instance: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
_PlanningEpoch: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST_EPOCH)]
_LeaseSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=60)]
MAX_RECORDS = 256  # that a kvd keeps for the gateways
MAX_RECORD_BYTES = 1 << 20  # of one of them
MAX_RECORDS_BYTES = 4 << 20  # of all
_RecordName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
_RecordNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST_EPOCH)]
_RecordData: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
_RecordAge: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class KvdErrorBody(msgspec.Struct, frozen=True):
    # incompatible, bad_request, unknown, ended, failed, unauthorized, forbidden
    code: str
    message: str
    differences: tuple[str, ...] = ()  # of an `incompatible` engine: each field that differs


# Transfers ---------------------------------------------------------------------------------------


class OpenTransfer(msgspec.Struct, frozen=True):
    """A gateway requests a grant from the decode node's kvd, before the prefill starts."""

    hashes: tuple[BlockName, ...]  # block hashes of the prompt up to `handoff_tokens`
    handoff_tokens: int
    compat: Compat
    checkpoint_tokens: int | None = None  # also send the linear states at this boundary
    # The gateway's choice, a UUID: it can abort the transfer without having received the grant.
    # The same id with an equal body gets the same grant again. None: the kvd chooses the id.
    transfer_id: TransferId | None = None
    # The gateway's tag of the tenant (`GatewayCredentials.tenant_tag`): tenants share the pool.
    tenant: TenantTag = ""


class TransferStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    transfer_id: TransferId
    # Incoming: granted, committed, attached, released, failed. Outgoing: sending, sent, failed.
    state: str
    reason: str  # of a failure; of a released transfer OTHER_PROMPT, or empty
    nbytes: int  # the most that it may have, or what its sender has announced
    arrived_bytes: int = 0  # so far, of an incoming transfer


class AbortTransfer(msgspec.Struct, frozen=True):
    reason: str = "aborted by the gateway"


# Prefixes ----------------------------------------------------------------------------------------


class MatchPrefix(msgspec.Struct, frozen=True):
    """Hashes of whole blocks, from the beginning of a prompt."""

    hashes: tuple[BlockName, ...]
    compat: Compat | None = None  # of the pool that is meant; None: the first one


class PrefixMatch(msgspec.Struct, frozen=True):
    tokens: int  # every group can resume here
    attention_tokens: int  # the longest run of full-attention blocks
    tenant: TenantTag = ""  # to whom the prefix belongs: a kvd that pulls it keeps it as theirs


class PullPrefix(msgspec.Struct, frozen=True):
    """A gateway makes a kvd copy a prefix from the kvd at `source`."""

    source: Annotated[str, msgspec.Meta(max_length=2_048)]  # URL
    hashes: tuple[BlockName, ...]
    # The address of the relay through which the source reaches this kvd.
    via: Annotated[str, msgspec.Meta(max_length=300)] | None = None
    within_s: Annotated[float, msgspec.Meta(gt=0, le=PULL_S)] = PULL_S  # the timeout
    compat: Compat | None = None  # of the pools that are meant; None: the first one of the target


class PrefixPulled(msgspec.Struct, frozen=True, tag="pulled"):
    tokens: int  # the length of the prefix that the kvd now has
    granted_bytes: int


class PushPrefix(msgspec.Struct, frozen=True):
    """The kvd that pulls makes the kvd that has the prefix send it."""

    hashes: tuple[BlockName, ...]
    compat: Compat
    grant: Grant


class PushStarted(msgspec.Struct, frozen=True, tag="pushing"):
    """The response to a push: the prefix is being sent."""


# Reports -----------------------------------------------------------------------------------------

RoleName: TypeAlias = Literal["prefill", "decode", "both"]


class Role(msgspec.Struct, frozen=True):
    """The work that the planner has assigned to a host. `epoch` counts the changes."""

    role: RoleName = "both"
    epoch: int = 0


class SetRole(msgspec.Struct, frozen=True, omit_defaults=True):
    """Assigns a role. `epoch` is the one that the decision was based on."""

    role: RoleName
    epoch: int
    # Of the gateway's planning lease. 0: the deployment has one gateway, which needs no lease.
    planning_epoch: _PlanningEpoch = 0


class ClaimPlanning(msgspec.Struct, frozen=True):
    """A gateway requests the planning lease, renews it, or gives it up (`lease_s` of 0). Epoch 0 is
    never granted: a gateway that only asks who plans claims it."""

    gateway: Annotated[_Instance, msgspec.Meta(min_length=1)]  # the instance of its process
    epoch: _PlanningEpoch
    lease_s: _LeaseSeconds


class PlanningLease(msgspec.Struct, frozen=True):
    """What the kvd has promised, after the claim."""

    gateway: _Instance  # empty: the kvd has promised nothing since its start
    epoch: _PlanningEpoch
    granted: bool  # whether the claim was
    left_s: _LeaseSeconds  # before the kvd grants a higher epoch to another gateway


class RecordVersion(msgspec.Struct, frozen=True):
    """Which record a kvd keeps under a name. The higher pair of epoch and number replaces the lower
    one."""

    name: _RecordName
    epoch: _PlanningEpoch
    number: _RecordNumber
    digest: _Digest  # SHA-256 of the data


class PutRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway has a record kept. The data mean nothing to the kvd."""

    name: _RecordName
    epoch: _PlanningEpoch
    number: _RecordNumber
    data: _RecordData
    age_s: _RecordAge = 0.0  # since the data were made
    # Of the gateway's planning lease; refused when a later one was promised. 0: no lease is needed.
    planning_epoch: _PlanningEpoch = 0


class RecordPut(msgspec.Struct, frozen=True):
    accepted: bool  # the kvd keeps that record now
    kept: RecordVersion | None  # what it keeps under the name


class PlanningRecord(msgspec.Struct, frozen=True):
    name: _RecordName
    epoch: _PlanningEpoch
    number: _RecordNumber
    data: _RecordData
    age_s: _RecordAge


class GroupShape(msgspec.Struct, frozen=True, array_like=True):
    """A group of a `KVSpec`. `nbytes` is per token and layer, or per state and layer. `heads` is
    the number of shares in which a layer can be written; 1: each layer is written as a whole."""

    kind: Literal["full", "window", "linear"]
    name: GroupName
    layers: Annotated[tuple[_Layer, ...], msgspec.Meta(min_length=1, max_length=MAX_LAYERS)]
    nbytes: _Size
    window: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    heads: Annotated[int, msgspec.Meta(ge=1, le=MAX_HEADS)] = 1


class EngineReport(msgspec.Struct, frozen=True):
    engine_id: str
    url: str | None
    processes: int


class Occupancy(msgspec.Struct, frozen=True):
    """How full the pool is now."""

    capacity_pages: int | None
    used_pages: int
    idle_pages: int  # used, but by prefixes without a lease: they are evicted when pages run short
    leases: int
    spilled_units: int  # on SSD


class PoolCounters(msgspec.Struct, frozen=True):
    """Counts since the pool was made."""

    queries: int = 0
    refused: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0  # reuse that was found, but lacked a state or a window
    evicted_blocks: int = 0  # from every tier
    spilled_blocks: int = 0
    promoted_blocks: int = 0
    unreadable_blocks: int = 0  # on SSD, and different from what was written
    dropped_blocks: int = 0  # evicted from memory without a copy on the SSD tier
    kept_answers: int = 0  # generated state that became a prefix


class PoolReport(msgspec.Struct, frozen=True):
    compat: Compat
    groups: tuple[GroupShape, ...]
    block_tokens: int
    page_bytes: int
    occupancy: Occupancy
    bytes_by_group: dict[str, int]
    counters: PoolCounters
    name: str = ""  # under which its cache events are published; empty: the node's name


class ArrivalCounters(msgspec.Struct, frozen=True):
    """Incoming transfers, as the listener counts them."""

    granted: int  # transfers that have not ended
    remembered: int
    received_bytes: int
    duplicate_bytes: int  # received again after they had been verified
    committed: int
    aborted: int


class KvdReport(msgspec.Struct, frozen=True):
    node: NodeId
    instance: str  # of the process: after a restart it is another one, and the pool is empty
    data_address: str
    role: Role
    engines: tuple[EngineReport, ...]
    pool: PoolReport | None  # None: no engine has registered yet
    incoming: dict[str, int]  # transfers by state
    outgoing: dict[str, int]
    held_leases: int  # by engine processes
    arrivals: ArrivalCounters
    links: tuple[LinkStats, ...]
    next_seq: dict[NodeId, int]  # the next number of each node's cache events
    late_s: float = 0.0  # seconds of the last LATE_WINDOW_S in which the process could not run
    # Of engines that hand over in a second form. `pool` has the form that counts for routing.
    more_pools: Annotated[tuple[PoolReport, ...], msgspec.Meta(max_length=MAX_POOLS - 1)] = ()
    # Planning records that it keeps.
    records: Annotated[tuple[RecordVersion, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()

    @property
    def pools(self) -> tuple[PoolReport, ...]:
        return () if self.pool is None else (self.pool, *self.more_pools)


class Heartbeat(msgspec.Struct, frozen=True):
    """The body of a gateway's `POST /prfaas/v1/register`."""

    kvd_url: str
    cluster: str
    report: KvdReport


# Membership --------------------------------------------------------------------------------------


class ProveMembership(msgspec.Struct, frozen=True):
    """A gateway makes a kvd prove that it has the member key, before the gateway sends the key."""

    challenge: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class ProofOfMembership(msgspec.Struct, frozen=True):
    """HMACs of the challenge and the kvd's URL, one for each key that the kvd accepts."""

    proofs: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)]


# Cache events ------------------------------------------------------------------------------------


class EventPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Events from the requested number on. When the kvd no longer has them: `snapshot`, every
    block hash that the node holds."""

    node: NodeId
    instance: str  # of the kvd's process: numbers restart with it
    next_seq: int
    events: tuple[HashEvent, ...] = ()
    snapshot: dict[str, tuple[bytes, ...]] | None = None


# Conversions -------------------------------------------------------------------------------------


def shapes_of(spec: KVSpec) -> tuple[GroupShape, ...]:
    return tuple(_shape(group) for group in spec.groups)


def spec_of(shapes: tuple[GroupShape, ...]) -> KVSpec:
    """InputError when no model has these groups."""
    return KVSpec(tuple(_group(shape) for shape in shapes))


def _shape(group: Group) -> GroupShape:
    match group:
        case FullAttention():
            return GroupShape(
                "full", group.name, group.layers, group.bytes_per_token, heads=group.heads
            )
        case SlidingWindow():
            return GroupShape(
                "window",
                group.name,
                group.layers,
                group.bytes_per_token,
                group.window,
                group.heads,
            )
        case LinearState():
            return GroupShape(
                "linear", group.name, group.layers, group.state_bytes, heads=group.heads
            )


def _group(shape: GroupShape) -> Group:
    match shape.kind:
        case "full":
            return FullAttention(shape.name, shape.layers, shape.nbytes, shape.heads)
        case "window":
            if shape.window < 1:
                raise InputError(
                    f"a window of {shape.window} tokens",
                    where=f"groups: {shape.name}",
                    fix="give the model's window, at least 1 token",
                )
            return SlidingWindow(shape.name, shape.layers, shape.nbytes, shape.window, shape.heads)
        case "linear":
            return LinearState(shape.name, shape.layers, shape.nbytes, shape.heads)
