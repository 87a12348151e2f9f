"""Interfaces that several parts share: identifiers, grants, link reports, cache events.

They cross process and cluster borders, so they are msgspec structs: one definition is the type, the
schema and the codec. Behaviour lives with the owners (transport, cache, kvd, gateway), not here.
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

NodeId = NewType("NodeId", str)
ClusterId = NewType("ClusterId", str)
TransferId = NewType("TransferId", str)
BlockHash = NewType("BlockHash", bytes)  # chained SHA-256 over token ids, salted per tenant


# Registration and compatibility ------------------------------------------------------------------


class Compat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two engines must agree on before one may continue the other's state."""

    model: str
    revision: str
    kv_dtype: str
    state_dtype: str
    block_tokens: int
    layout: str  # engine family and memory layout; "canonical" is the wire form of `kvspec`
    tensor_parallel: int = 1

    def differences(self, other: Compat) -> tuple[str, ...]:
        """Which fields differ, as a refusal says it: `kv_dtype: bfloat16 here, float16 there`."""
        return tuple(
            f"{field}: {getattr(self, field)} here, {getattr(other, field)} there"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        )


# Grants ------------------------------------------------------------------------------------------


class OpenTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gateway -> the decode side's kvd, before any prefill starts."""

    hashes: tuple[bytes, ...]  # block hashes of the prompt up to `handoff_tokens`
    handoff_tokens: int
    compat: Compat
    checkpoint_tokens: int | None = None  # also send the linear states at this boundary


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="grant"):
    """The receiver has reserved everything this transfer needs and pins what it lets it skip."""

    transfer_id: TransferId
    token: str  # authorises pushes for this transfer and nothing else
    data_address: str  # host:port of the kvd, or of the relay named by the link's `via`
    skip_tokens: dict[str, int]  # per group: leading tokens the receiver already holds
    max_bytes: int
    deadline_s: float  # seconds from the answer to the first frame; frames renew the lease
    checkpoint_tokens: tuple[int, ...] = ()  # states after these lengths are to be sent as well


class NotNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="not_now"):
    """An expected refusal: nothing was reserved."""

    reason: str
    retry_after_s: float


# Links -------------------------------------------------------------------------------------------


class LinkStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One link's last report, from the sender's side. None means: this platform cannot tell."""

    peer: str
    at_s: float  # sender's monotonic clock
    connections: int
    goodput_bps: float  # payload bits that arrived, per second of the report's interval
    backlog_bytes: int  # handed to the link, not yet acknowledged
    in_flight_bytes: int
    # How long the oldest byte of the backlog has waited, beyond the path's own round trip and less
    # the time in which the sender was not able to run.
    waited_s: float = 0.0
    late_s: float = 0.0  # of the report's interval: how long the sender was not able to run
    rtt_s: float | None = None
    # What arrived while bytes stood waiting, per second; None: too few did to tell a rate.
    delivery_bps: float | None = None
    # Since the previous report, without those that the receiver had already.
    retransmitted_segments: int | None = None
    congestion_window_bytes: int | None = None


# Cache events ------------------------------------------------------------------------------------


class HashEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node stored or removed blocks of one group. Hashes only: token ids never leave the host."""

    seq: int  # per node, without gaps; a gap means: ask for a replay
    node: NodeId
    group: str
    block_tokens: int
    hashes: tuple[bytes, ...]
    action: Literal["stored", "removed"]
