"""Types that several parts share: identifiers, grants, link reports, cache events.

They cross process and cluster boundaries, so they are msgspec structs: one definition is the type,
the schema and the codec. The parts that own them (transport, cache, kvd, gateway) contain the
behaviour. The bodies of the kvd's HTTP API are in `contracts/kvd_api.py`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NewType, TypeAlias

import msgspec

NodeId = NewType("NodeId", str)
ClusterId = NewType("ClusterId", str)
TransferId = NewType("TransferId", str)
BlockHash = NewType("BlockHash", bytes)  # chained SHA-256 over token ids, salted per tenant
# Names a tenant to nodes and kvds, which divide what they share between tenants and need not know
# who they are. Empty: no tenant is known.
MAX_TAG_CHARACTERS: Final = 64
TenantTag: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TAG_CHARACTERS)]


# Registration and compatibility ------------------------------------------------------------------


# native: the bytes of one engine's memory, which only an equal engine understands.
# canonical: tokens and states by their meaning, which every engine with the model understands.
Form: TypeAlias = Literal["native", "canonical"]
CANONICAL: Form = "canonical"


class Compat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that must be equal in two engines, so that one can continue the other's state. A
    field that is not known could be one that differs: it is refused."""

    model: str
    revision: str
    kv_dtype: str
    state_dtype: str
    block_tokens: int
    layout: str  # engine family and memory layout; CANONICAL is the wire form of `kvspec`
    tensor_parallel: int = 1

    def differences(self, other: Compat) -> tuple[str, ...]:
        """Each field that differs, for error messages: `kv_dtype: bfloat16 here, float16 there`."""
        return tuple(
            f"{field}: {getattr(self, field)} here, {getattr(other, field)} there"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        )

    @property
    def form(self) -> Form:
        return CANONICAL if self.layout == CANONICAL else "native"


# Grants ------------------------------------------------------------------------------------------


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """The receiver has reserved all memory for one transfer, and pins what the sender may skip."""

    transfer_id: TransferId
    token: str  # authorises frames of this transfer and nothing else
    data_address: str  # host:port of the receiver's kvd, or of the relay that its `via` names
    skip_tokens: dict[str, int]  # per group: leading tokens that the receiver already has
    max_bytes: int
    deadline_s: float  # seconds from the grant to the first frame; frames renew it
    checkpoint_tokens: tuple[int, ...] = ()  # the sender also sends the states after these lengths
    form: Form = CANONICAL  # in which the receiver takes the state
    # Of the call that asked for the grant: spans of the transfer have it as their parent. None: the
    # call had none.
    traceparent: str | None = None
    # Of the request: the sender's pool keeps what is computed as this tenant's, too.
    tenant: TenantTag = ""


class NotNow(msgspec.Struct, frozen=True, tag="not_now"):
    """An expected refusal: nothing was reserved, and the caller may retry."""

    reason: str
    retry_after_s: float


# Links -------------------------------------------------------------------------------------------


class LinkStats(msgspec.Struct, frozen=True):
    """The latest report of one link, from the sender's side. None: this platform has no value."""

    peer: str
    at_s: float  # sender's monotonic clock
    connections: int
    goodput_bps: float  # payload bits that arrived, per second of the report's interval
    backlog_bytes: int  # handed to the link, not yet acknowledged
    in_flight_bytes: int
    # How long the oldest byte of the backlog has waited, without the path's round-trip time and
    # without the time in which the sender could not run.
    waited_s: float = 0.0
    late_s: float = 0.0  # seconds of the report's interval in which the sender could not run
    rtt_s: float | None = None
    # Bits that arrived per second while bytes were waiting. None: too few for a rate.
    delivery_bps: float | None = None
    # Since the previous report, without those that the receiver already had.
    retransmitted_segments: int | None = None
    congestion_window_bytes: int | None = None


# Cache events ------------------------------------------------------------------------------------


class HashEvent(msgspec.Struct, frozen=True):
    """A node stored or removed blocks of one group. Hashes only: token ids stay on the host."""

    seq: int  # per node, without gaps; after a gap the reader requests a replay
    node: NodeId
    group: str
    block_tokens: int
    hashes: tuple[bytes, ...]
    action: Literal["stored", "removed"]
