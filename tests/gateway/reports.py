"""Reports of kvds and engines, for parts that only receive them."""

from __future__ import annotations

from prfaas.contracts.kvd_api import (
    ArrivalCounters,
    KvdReport,
    Occupancy,
    PoolCounters,
    PoolReport,
    Role,
    shapes_of,
)
from prfaas.contracts.openai_fields import Endpoint, known_fields
from prfaas.gateway.client.node_client import Card, Load
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.types import Compat, LinkStats, NodeId

SPEC = KVSpec((FullAttention("full", (0, 1), 64), LinearState("state", (2, 3), 256)))
NATIVE_SPEC = KVSpec((FullAttention("blocks", (0, 1), 80), LinearState("slots", (2, 3), 320)))
NATIVE_BLOCK = 16
IDLE = Load(0, 0)
ENDPOINTS: tuple[Endpoint, Endpoint] = ("completions", "chat")
# Of a `prfaas node`.
NODE_CARD = Card("m", None, {endpoint: known_fields(endpoint) for endpoint in ENDPOINTS})


def compat(revision: str = "1") -> Compat:
    return Compat("m", revision, "float32", "float32", 64, "canonical")


def native_compat(layout: str = "vllm-a", revision: str = "1") -> Compat:
    return Compat("m", revision, "float32", "float32", NATIVE_BLOCK, layout, 2)


def report(
    name: str,
    *,
    instance: str = "first",
    role: Role | None = None,
    revision: str = "1",
    links: tuple[LinkStats, ...] = (),
    registered: bool = True,
    late_s: float = 0.0,
    native: str | None = None,
) -> KvdReport:
    """`native`: the layout of a second pool, whose engine hands over in both forms."""
    pool = PoolReport(
        compat=compat(revision),
        groups=shapes_of(SPEC),
        block_tokens=64,
        page_bytes=4096,
        occupancy=Occupancy(100, 0, 0, 0, 0),
        bytes_by_group={},
        counters=PoolCounters(),
    )
    second = PoolReport(
        compat=native_compat(native or "", revision),
        groups=shapes_of(NATIVE_SPEC),
        block_tokens=NATIVE_BLOCK,
        page_bytes=8192,
        occupancy=Occupancy(100, 3, 1, 0, 0),
        bytes_by_group={},
        counters=PoolCounters(),
        name=f"{name}/native",
    )
    return KvdReport(
        node=NodeId(name),
        instance=instance,
        data_address=f"{name}:7400",
        role=role or Role(),
        engines=(),
        pool=pool if registered else None,
        incoming={},
        outgoing={},
        held_leases=0,
        arrivals=ArrivalCounters(0, 0, 0, 0, 0, 0),
        links=links,
        next_seq={},
        late_s=late_s,
        more_pools=(second,) if native is not None and registered else (),
    )


def add_native(fleet: Fleet, *nodes: NodeId, layout: str = "vllm-a") -> None:
    """The engines of these nodes register their native form as well."""
    for node in nodes:
        member = fleet.members.named(node)
        assert member is not None
        fleet.record_report(member, report(str(node), native=layout))


def appear(fleet: Fleet, member: Member, name: str, now_s: float) -> None:
    """The member's kvd and engine answer."""
    fleet.record_card(member, NODE_CARD)
    fleet.record_report(member, report(name))
    load(fleet, member, IDLE, now_s)


def load(fleet: Fleet, member: Member, load: Load, asked_s: float, own: int = 0) -> None:
    """The member's engine reports its load."""
    fleet.record_load(member, load, leaving=False, asked_s=asked_s, own=own)
