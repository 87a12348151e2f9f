"""What has changed between two scenes. Pure.

A stream begins with a whole scene. After that it has deltas: `apply(before, delta(before, after))`
is `after`. A key that is absent has not changed; a node that is null has left.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from prfaas.console.scene import (
    ClusterScene,
    EventScene,
    HomeScene,
    LinkScene,
    NodeScene,
    RequestScene,
    Scene,
    TtftParts,
)


class Delta(msgspec.Struct, frozen=True):
    at_s: float
    # By cluster and id. A node that is new comes after those that are known.
    nodes: Mapping[str, Mapping[str, NodeScene | None]] | UnsetType = UNSET
    clusters: list[ClusterScene] | UnsetType = UNSET  # all, without nodes, when one has changed
    links: list[LinkScene] | UnsetType = UNSET
    homes: list[HomeScene] | UnsetType = UNSET
    ttft: TtftParts | UnsetType = UNSET
    in_flight: int | UnsetType = UNSET
    gateways: tuple[str, ...] | UnsetType = UNSET
    events: list[EventScene] | UnsetType = UNSET
    requests: list[RequestScene] | UnsetType = UNSET


def delta(before: Scene, after: Scene) -> Delta | None:
    """None: the difference is one that deltas do not have, such as another list of links. Then the
    whole scene is sent."""
    if _frame(before) != _frame(after):
        return None
    nodes: dict[str, dict[str, NodeScene | None]] = {}
    for old, new in zip(before.clusters, after.clusters, strict=True):
        changed = _changed_nodes(old, new)
        if changed is None:
            return None
        if changed:
            nodes[new.name] = changed
    clusters = [replace(cluster, nodes=()) for cluster in after.clusters]
    links = [b for a, b in zip(before.links, after.links, strict=True) if a != b]
    homes = [b for a, b in zip(before.homes, after.homes, strict=True) if a != b]
    return Delta(
        after.at_s,
        nodes=nodes or UNSET,
        clusters=UNSET if _drained(before) == _drained(after) else clusters,
        links=links or UNSET,
        homes=homes or UNSET,
        ttft=UNSET if before.ttft == after.ttft else after.ttft,
        in_flight=UNSET if before.in_flight == after.in_flight else after.in_flight,
        gateways=UNSET if before.gateways == after.gateways else after.gateways,
    )


def apply(before: Scene, change: Delta) -> Scene:
    """What a browser does with a delta (`assets/store.js`). For tests."""
    moved = {} if change.nodes is UNSET else change.nodes
    drained = {} if change.clusters is UNSET else {c.name: c.drained for c in change.clusters}
    links = {} if change.links is UNSET else {(k.source, k.target): k for k in change.links}
    homes = {} if change.homes is UNSET else {home.cluster: home for home in change.homes}
    clusters = []
    for cluster in before.clusters:
        nodes: dict[str, NodeScene | None] = {node.id: node for node in cluster.nodes}
        nodes |= moved.get(cluster.name, {})
        left = tuple(node for node in nodes.values() if node is not None)
        is_drained = drained.get(cluster.name, cluster.drained)
        clusters.append(replace(cluster, nodes=left, drained=is_drained))
    return replace(
        before,
        at_s=change.at_s,
        clusters=tuple(clusters),
        links=tuple(links.get((k.source, k.target), k) for k in before.links),
        homes=tuple(homes.get(home.cluster, home) for home in before.homes),
        ttft=before.ttft if change.ttft is UNSET else change.ttft,
        in_flight=before.in_flight if change.in_flight is UNSET else change.in_flight,
        gateways=before.gateways if change.gateways is UNSET else change.gateways,
    )


def _frame(scene: Scene) -> tuple[object, ...]:
    """What stays the same while a gateway runs."""
    return (
        scene.model,
        scene.policy,
        [(cluster.name, cluster.kind) for cluster in scene.clusters],
        [(link.source, link.target) for link in scene.links],
        [home.cluster for home in scene.homes],
    )


def _drained(scene: Scene) -> list[bool]:
    return [cluster.drained for cluster in scene.clusters]


def _changed_nodes(old: ClusterScene, new: ClusterScene) -> dict[str, NodeScene | None] | None:
    """None: the nodes that stay have another order."""
    known = {node.id: node for node in old.nodes}
    now = {node.id: node for node in new.nodes}
    order = [name for name in known if name in now]
    if [*order, *(name for name in now if name not in known)] != list(now):
        return None
    changed: dict[str, NodeScene | None] = {
        name: node for name, node in now.items() if known.get(name) != node
    }
    changed |= {name: None for name in known if name not in now}
    return changed
