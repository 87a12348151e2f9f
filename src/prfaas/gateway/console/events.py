"""Events of the console's time line, found by comparing scenes, and the latest of them.

`events_between` is pure. An event that began and ended between two scenes is not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prfaas.console.scene import (
    ClusterScene,
    EventKind,
    EventScene,
    HomeScene,
    LinkScene,
    NodeScene,
    Scene,
)

KEPT = 300
MOVES_S = 10.0  # copies of prefixes are told together, once in this time
_VERBS = {"prefill": "prefills", "decode": "decodes"}
_REASONS = {
    "route": "for requests",
    "replicate": "away from busy nodes",
    "evacuate": "from nodes that change their role or leave",
}


class Happening(NamedTuple):
    kind: EventKind
    text: str  # one sentence
    where: str


class Moves(NamedTuple):
    """Copies of prefixes with one reason, since the start."""

    made: int
    failed: int
    tokens: int
    nbytes: int

    def since(self, before: Moves) -> Moves:
        return Moves(*[now - then for now, then in zip(self, before, strict=True)])


NO_MOVES = Moves(0, 0, 0, 0)


class EventLog:
    """The latest events. Ids rise."""

    def __init__(self) -> None:
        self._kept: deque[EventScene] = deque(maxlen=KEPT)
        self._next_id = 1
        self._scene: Scene | None = None
        self._moves: Mapping[str, Moves] = {}
        self._moves_at_s = 0.0

    def kept(self) -> list[EventScene]:
        """The oldest first."""
        return list(self._kept)

    def observe(self, scene: Scene, moves: Mapping[str, Moves]) -> list[EventScene]:
        """The events since the last call. `moves`: by their reason."""
        found: list[Happening] = []
        if self._scene is None:
            self._moves, self._moves_at_s = moves, scene.at_s
        else:
            found += events_between(self._scene, scene)
        self._scene = scene
        if abs(scene.at_s - self._moves_at_s) >= MOVES_S:  # the clock may have been set back
            found += moves_between(self._moves, moves)
            self._moves, self._moves_at_s = moves, scene.at_s
        return [self._add(scene.at_s, happening) for happening in found[-KEPT:]]

    def _add(self, at_s: float, found: Happening) -> EventScene:
        event = EventScene(self._next_id, at_s, found.kind, found.text, found.where)
        self._next_id += 1
        self._kept.append(event)
        return event


def events_between(before: Scene, after: Scene) -> list[Happening]:
    """What has happened, in the order: plans, clusters, links, nodes, gateways."""
    found: list[Happening] = []
    homes = {home.cluster: home for home in before.homes}
    for home in after.homes:
        found += _home_events(homes.get(home.cluster), home)
    clusters = {cluster.name: cluster for cluster in before.clusters}
    for cluster in after.clusters:
        old = clusters.get(cluster.name)
        if old is not None and old.drained != cluster.drained:
            text = "is drained: it gets no new requests" if cluster.drained else "is in use again"
            found.append(Happening("cluster", f"The cluster {cluster.name} {text}.", cluster.name))
    links = {(link.source, link.target): link for link in before.links}
    for link in after.links:
        found += _link_events(links.get((link.source, link.target)), link)
    for cluster in after.clusters:
        found += _cluster_nodes_events(clusters.get(cluster.name), cluster)
    for line in after.gateways:
        if line not in before.gateways:
            found.append(Happening("gateway", f"{line[:1].upper()}{line[1:]}.", ""))
    return found


def moves_between(before: Mapping[str, Moves], after: Mapping[str, Moves]) -> Iterator[Happening]:
    for why, now in after.items():
        new = now.since(before.get(why, NO_MOVES))
        reason = _REASONS.get(why, why)
        if new.made:
            amount = f"{new.tokens:,} tokens, {new.nbytes / 1e6:,.1f} MB"
            copied = "1 prefix was" if new.made == 1 else f"{new.made} prefixes were"
            yield Happening("move", f"{copied} copied {reason}: {amount}.", "")
        if new.failed:
            copies = "1 copy" if new.failed == 1 else f"{new.failed} copies"
            yield Happening("move", f"{copies} of prefixes {reason} failed.", "")


def _home_events(before: HomeScene | None, home: HomeScene) -> Iterator[Happening]:
    yield from _service_events(before, home)
    yield from _plan_events(before, home)


def _service_events(before: HomeScene | None, home: HomeScene) -> Iterator[Happening]:
    if before is None or before.service == home.service:
        return
    if home.service == "served":
        text = "is served as planned again"
    else:
        level = "is not served" if home.service == "unserved" else "is served, but not as planned"
        text = f"{level}: {home.service_reason}"
    yield Happening("cluster", f"{home.cluster} {text}.", home.cluster)


def _plan_events(before: HomeScene | None, home: HomeScene) -> Iterator[Happening]:
    def plan(home: HomeScene) -> tuple[object, ...]:
        return (home.planned_threshold_tokens, home.planned_rps, home.plan_reason)

    if not home.has_plan or (before is not None and plan(before) == plan(home)):
        return
    yield Happening(
        "plan",
        f"New plan of {home.cluster}: requests with more than "
        f"{home.planned_threshold_tokens:,.0f} uncached tokens are offloaded, "
        f"{home.planned_rps:.3g} requests/s ({home.plan_reason}).",
        home.cluster,
    )


def _link_events(before: LinkScene | None, link: LinkScene) -> Iterator[Happening]:
    if before is None or before.verdict == link.verdict:
        return
    where = f"{link.source} -> {link.target}"
    if link.verdict == "cut":
        text = "is cut"
    elif link.verdict == "congested":
        text = f"is congested ({link.cause})" if link.cause else "is congested"
    else:
        text = "is restored" if before.verdict == "cut" else "is clear again"
    yield Happening("link", f"The link {where} {text}.", where)


def _cluster_nodes_events(before: ClusterScene | None, cluster: ClusterScene) -> list[Happening]:
    if before is None:
        return []
    known = {node.id: node for node in before.nodes}
    found: list[Happening] = []
    for node in cluster.nodes:
        found += _node_events(known.pop(node.id, None), node, cluster.name)
    for gone in known.values():
        text = f"{gone.name} of {cluster.name} has left the fleet."
        found.append(Happening("node", text, gone.name))
    return found


def _node_events(before: NodeScene | None, node: NodeScene, cluster: str) -> Iterator[Happening]:
    who = f"{node.name} of {cluster}"
    if before is None:
        yield Happening("node", f"{who} has joined the fleet.", node.name)
        return
    if node.status != before.status:
        why = f": {node.why}" if node.why else ""
        if node.status == "in use":
            yield Happening("node", f"{who} is in use.", node.name)
        elif node.status == "drains":
            yield Happening("node", f"{who} finishes its requests and gets no new ones.", node.name)
        else:
            yield Happening("node", f"{who} is {node.status}{why}.", node.name)
    if node.role != before.role and node.role is not None:
        verb = _VERBS.get(node.role, node.role)
        yield Happening("role", f"{who} {verb} now.", node.name)
    elif node.becomes != before.becomes and node.becomes is not None:
        text = f"{who} is to change its role to {node.becomes}."
        yield Happening("role", text, node.name)
