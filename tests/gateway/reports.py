"""What kvds and engines would say, for parts that only listen."""

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
from prfaas.gateway.fleet.membership import Member
from prfaas.gateway.router import Router
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.types import Compat, LinkStats, NodeId

SPEC = KVSpec((FullAttention("full", 2, 64), LinearState("state", 2, 256)))
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


def appear(router: Router, member: Member, name: str, now_s: float) -> None:
    """Kvd and engine answer."""
    member.card = Card("m", None, ours=True)
    router.heard(member, report(name))
    router.loaded(member, IDLE, now_s, 0)
