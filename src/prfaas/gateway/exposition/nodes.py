"""Metrics of the nodes: each one's state, and how many have another role than their plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from prometheus_client.core import Metric

from prfaas.gateway.exposition.families import counter, gauge
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member

NodeState: TypeAlias = Literal["in_use", "unused", "leaving", "incompatible", "lost"]
STATES: Final[tuple[NodeState, ...]] = get_args(NodeState)


class ObservedNode(NamedTuple):
    cluster: str
    name: str
    state: NodeState


def observe_nodes(fleet: Fleet, now_s: float) -> list[ObservedNode]:
    return [
        ObservedNode(member.cluster, member.node or member.kvd_url, state_of(fleet, member, now_s))
        for member in fleet.members
    ]


def state_of(fleet: Fleet, member: Member, now_s: float) -> NodeState:
    """`unused`: the node would serve, but its cluster is drained, it changes its role, or it has
    none yet. `lost`: its kvd or its engine does not answer, or has never answered."""
    if member.node is not None and member.node in fleet.board:
        if fleet.board.node(member.node).usable:
            return "in_use"
    if member.is_expected_back(now_s):
        return "leaving"
    if member.has_duplicate_name or fleet.members.formats.problem(member) is not None:
        return "incompatible"
    return "unused" if member.is_alive(now_s) else "lost"


def node_metrics(nodes: Iterable[ObservedNode], silences: int) -> Iterator[Metric]:
    """The number of members has a bound (`membership.MOST_REGISTERED`, and the deployment file)."""
    states = gauge(
        "node_state",
        "The state of a node: 1 for the state that it has, 0 for the others. `in_use`: it gets "
        "requests. `unused`: it could, but its cluster is drained or its role changes. `leaving`: "
        "its engine drains for a restart. `incompatible`: its KV format or its name does not fit. "
        "`lost`: its kvd or its engine does not answer.",
        *("cluster", "node", "state"),
    )
    for node in nodes:
        for state in STATES:
            states.add_metric([node.cluster, node.name, state], state == node.state)
    yield states
    yield counter("node_silences", "How often a node was found silent.", value=silences)
