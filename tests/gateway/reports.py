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
from prfaas.gateway.client.node_client import Card, Load
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.types import Compat, LinkStats, NodeId

SPEC = KVSpec((FullAttention("full", (0, 1), 64), LinearState("state", (2, 3), 256)))
IDLE = Load(0, 0)


def compat(revision: str = "1") -> Compat:
    return Compat("m", revision, "float32", "float32", 64, "canonical")


def report(
    name: str,
    *,
    instance: str = "first",
    role: Role | None = None,
    revision: str = "1",
    links: tuple[LinkStats, ...] = (),
    registered: bool = True,
    late_s: float = 0.0,
) -> KvdReport:
    pool = PoolReport(
        compat=compat(revision),
        groups=shapes_of(SPEC),
        block_tokens=64,
        page_bytes=4096,
        occupancy=Occupancy(100, 0, 0, 0, 0),
        bytes_by_group={},
        counters=PoolCounters(),
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
    )


def appear(fleet: Fleet, member: Member, name: str, now_s: float) -> None:
    """The member's kvd and engine answer."""
    fleet.record_card(member, Card("m", None, ours=True))
    fleet.record_report(member, report(name))
    load(fleet, member, IDLE, now_s)


def load(fleet: Fleet, member: Member, load: Load, asked_s: float, own: int = 0) -> None:
    """The member's engine reports its load."""
    fleet.record_load(member, load, leaving=False, asked_s=asked_s, own=own)
