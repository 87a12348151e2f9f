"""Polls every member: its kvd's report, its engine's load, its cache events.

Tasks and timing only; the results go to the fleet. A member that does not answer is polled again
after the usual interval; whether it is dead is decided by `membership`.
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
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.membership import Member
from prfaas.http_client.client import HttpClient
from prfaas.types import BlockHash, NodeId

log = logging.getLogger(__name__)


class Poller:
    """Every member has its own task group, which ends with it."""

    def __init__(
        self, fleet: Fleet, http: HttpClient, clock: Clock, tasks: asyncio.TaskGroup
    ) -> None:
        self._fleet = fleet
        self._timeouts = fleet.timeouts
        self._http = http
        self._clock = clock
        self._tasks = tasks
        self._polled: dict[str, asyncio.Task[None]] = {}  # by the kvd's address

    def start(self, member: Member) -> None:
        polling = self._poll_member(member)
        try:
            self._polled[member.kvd_url] = self._tasks.create_task(polling)
        except RuntimeError:  # the gateway is shutting down, and its task group takes no more
            polling.close()

    def stop(self) -> None:
        for task in self._polled.values():
            task.cancel()

    def drop_expired(self) -> None:
        """Removes members that have been silent for so long that they are not expected back."""
        for member in self._fleet.members.expired(self._clock.now()):
            log.info("removing kvd %s: silent for %g s", member.kvd_url, self._timeouts.forget_s)
            self._polled.pop(member.kvd_url).cancel()
            self._fleet.remove(member)

    async def _poll_member(self, member: Member) -> None:
        kvd = KvdClient(self._http, member.kvd_url, self._timeouts)
        async with asyncio.TaskGroup() as group:
            followed: set[NodeId] = set()

            async def poll_kvd() -> None:
                report = await kvd.stats()
                self._fleet.record_report(member, report)
                for name in {report.node, *report.next_seq} - followed:
                    followed.add(name)
                    group.create_task(self._follow_events(member, kvd, name))

            async def poll_engine() -> None:
                await self._poll_engine(member)

            # `kvd_poll_s` is short because links change at once: a sender samples its figures every
            # half second (`kvd/process.py`), and the gateway acts on them within another.
            kvd_s, node_s = self._timeouts.kvd_poll_s, self._timeouts.node_poll_s
            group.create_task(self._poll_every(kvd_s, poll_kvd, "kvd", member))
            group.create_task(self._poll_every(node_s, poll_engine, "engine", member))

    async def _poll_engine(self, member: Member) -> None:
        url = member.engine_url
        if url is None:
            return
        node = NodeClient(self._http, url, self._timeouts)
        try:
            if member.card is None:
                self._fleet.record_card(member, await node.card())
            asked_s = self._clock.now()
            own = self._fleet.prefills_at(member)
            load = await node.load()
            leaving = await node.draining()
        except PeerError:
            self._fleet.clear_card(member)
            raise
        self._fleet.record_load(member, load, leaving=leaving, asked_s=asked_s, own=own)

    async def _poll_every(
        self,
        every_s: float,
        poll: Callable[[], Coroutine[Any, Any, None]],
        what: str,
        member: Member,
    ) -> None:
        answers = True
        while True:
            try:
                await poll()
                answers = True
            except PeerError as error:
                if answers:
                    log.warning("the %s of %s does not answer: %s", what, member.kvd_url, error)
                answers = False
            await asyncio.sleep(every_s)

    async def _follow_events(self, member: Member, kvd: KvdClient, name: NodeId) -> None:
        """Applies cache events, starting from a snapshot, and again from a snapshot after a gap or
        a restart."""
        manager = self._fleet.manager
        instance, since = "", SNAPSHOT
        while True:
            try:
                page = await kvd.events(name, since, self._timeouts.event_poll_s)
            except PeerError:
                await asyncio.sleep(self._timeouts.node_poll_s)
                continue
            if page.instance != instance or page.snapshot is not None:
                if page.snapshot is None:
                    since = SNAPSHOT  # another process, whose sequence numbers start anew
                    instance = page.instance
                    continue
                if not self._fleet.prefixes.add(member, name):
                    since = SNAPSHOT
                    # No engine has registered yet.
                    await asyncio.sleep(self._timeouts.node_poll_s)
                    continue
                instance = page.instance
                held = {g: [BlockHash(h) for h in names] for g, names in page.snapshot.items()}
                manager.snapshot(name, held, page.next_seq)
            for event in page.events:
                manager.apply(event)
            since = page.next_seq
