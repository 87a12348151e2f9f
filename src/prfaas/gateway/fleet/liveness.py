"""Silent nodes: whether a node has hung, and cancelling the calls that wait for it.

A process that is stopped keeps its connections open, so that a call to it would wait until its
timeout. Its missing answers to polls show much earlier that it has hung.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prfaas.clock import Clock
from prfaas.gateway.fleet.membership import Membership
from prfaas.types import NodeId

log = logging.getLogger(__name__)


class Liveness:
    def __init__(self, members: Membership, clock: Clock) -> None:
        self._members = members
        self._clock = clock
        # By node, and by whether the answer streams already: what cancels each waiting call.
        self._waiting: dict[tuple[NodeId, bool], set[Callable[[], None]]] = {}

    def has_hung(self, node: NodeId, *, engine_only: bool = False) -> bool:
        """True also for a node that is not a member any more."""
        member = self._members.named(node)
        return member is None or member.has_hung(self._clock.now(), engine_only=engine_only)

    @contextmanager
    def cancel_when_silent(
        self, node: NodeId, cancel: Callable[[], None], *, begun: bool
    ) -> Iterator[None]:
        """A context in which `cancel` is called, at most once, when the node has hung. After the
        answer has `begun` only the engine counts, not the kvd."""
        key = (node, begun)
        self._waiting.setdefault(key, set()).add(cancel)
        try:
            yield
        finally:
            waiting = self._waiting.get(key, set())
            waiting.discard(cancel)
            if not waiting:
                self._waiting.pop(key, None)

    def cancel_silent(self) -> None:
        """Cancels the calls that wait for nodes that have hung."""
        for key in [key for key, waiting in self._waiting.items() if waiting]:
            node, begun = key
            if self.has_hung(node, engine_only=begun):
                waiting = self._waiting.pop(key)
                log.warning(
                    "%s has been silent for %g s: cancelling %d calls that wait for it",
                    node,
                    self._members.timeouts.hung_s,
                    len(waiting),
                )
                for cancel in waiting:
                    cancel()
