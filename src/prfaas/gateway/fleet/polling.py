"""Looks at every member, again and again: its kvd's report, its engine's load, its cache events.

Tasks and timing only; what is seen goes to the router. A member that does not answer is asked again
at the next look; nothing here decides that it is dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from prfaas.clock import Clock
from prfaas.contracts.kvd_api import SNAPSHOT
from prfaas.errors import PeerError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.client.node_client import NodeClient
from prfaas.gateway.fleet.membership import Member
from prfaas.gateway.router import Router
from prfaas.http_client.client import HttpClient
from prfaas.types import BlockHash, NodeId

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
# Links change at once: what their senders say is half a second old at most when it is asked for
# (`kvd/process.py` samples so often), and is heard and acted upon as soon.
LINKS_EVERY_S = 0.5
EVENTS_WAIT_S = 30.0  # of one long poll


class Poller:
    """Every member has a task group of its own, which ends with it."""

    def __init__(
        self, router: Router, calls: HttpClient, clock: Clock, tasks: asyncio.TaskGroup
    ) -> None:
        self._router = router
        self._calls = calls
        self._clock = clock
        self._tasks = tasks
        self._watched: dict[str, asyncio.Task[None]] = {}

    def watch(self, member: Member) -> None:
        looking = self._look(member)
        try:
            self._watched[member.kvd_url] = self._tasks.create_task(looking)
        except RuntimeError:  # the gateway is shutting down, and its task group takes no more
            looking.close()

    def end(self) -> None:
        for task in self._watched.values():
            task.cancel()

    async def tick(self) -> None:
        """Until cancelled: the short-term loop, and who is gone for good."""
        while True:
            await asyncio.sleep(LINKS_EVERY_S)
            self._router.tick()
            for member in self._router.members.forgotten(self._clock.now()):
                log.info("%s is forgotten", member.kvd_url)
                self._watched.pop(member.kvd_url).cancel()
                self._router.forget(member)

    async def _look(self, member: Member) -> None:
        kvd = KvdClient(self._calls, member.kvd_url)
        async with asyncio.TaskGroup() as group:
            followed: set[NodeId] = set()

            async def report() -> None:
                said = await kvd.stats()
                self._router.heard(member, said)
                for name in {said.node, *said.next_seq} - followed:
                    followed.add(name)
                    group.create_task(self._follow(member, kvd, name))

            engine = self._again(lambda: self._engine(member), "engine", member, LOOK_EVERY_S)
            group.create_task(self._again(report, "kvd", member, LINKS_EVERY_S))
            group.create_task(engine)

    async def _engine(self, member: Member) -> None:
        url = member.engine_url
        if url is None:
            return
        node = NodeClient(self._calls, url)
        try:
            if member.card is None:
                member.card = await node.card()
                self._router.engine_came(member)
            asked_s = self._clock.now()
            own = self._router.own_prefills(member)
            load = await node.load()
            leaving = await node.draining()
        except PeerError:
            member.card = None  # whoever answers there next may serve something else
            raise
        if leaving and not member.leaving:
            log.info("the engine of %s is about to leave", member.kvd_url)
        member.leaving = leaving
        self._router.loaded(member, load, asked_s, own)

    async def _again(
        self,
        look: Callable[[], Coroutine[Any, Any, None]],
        what: str,
        member: Member,
        every_s: float,
    ) -> None:
        answers = True
        while True:
            try:
                await look()
                answers = True
            except PeerError as error:
                if answers:
                    log.warning("no word from the %s of %s: %s", what, member.kvd_url, error)
                answers = False
            await asyncio.sleep(every_s)

    async def _follow(self, member: Member, kvd: KvdClient, name: NodeId) -> None:
        """Cache events, from a snapshot on; a snapshot again after a gap or a restart."""
        manager = self._router.manager
        instance, since = "", SNAPSHOT
        while True:
            try:
                page = await kvd.events(name, since, EVENTS_WAIT_S)
            except PeerError:
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            if page.instance != instance or page.snapshot is not None:
                if page.snapshot is None:
                    since = SNAPSHOT  # another process: its numbers mean something else
                    instance = page.instance
                    continue
                if not self._router.indexed(member, name):
                    since = SNAPSHOT
                    await asyncio.sleep(LOOK_EVERY_S)  # until an engine has registered
                    continue
                instance = page.instance
                held = {g: [BlockHash(h) for h in names] for g, names in page.snapshot.items()}
                manager.snapshot(name, held, page.next_seq)
            for event in page.events:
                manager.apply(event)
            since = page.next_seq
