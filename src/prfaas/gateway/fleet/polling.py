"""Polls every member: its kvd's report, its engine's load, its cache events.

Tasks and timing only; the results go to the fleet. A member that does not answer is polled again
after the usual interval; whether it is dead is decided by `membership`. A member that calls wait
for is asked more often, see `liveness`. Every poll is a loop of
`supervision`: what one member sends never ends another member's task, nor the gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any, NamedTuple

from prfaas.clock import Clock
from prfaas.contracts.kvd_api import KvdReport
from prfaas.errors import PeerError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.client.node_client import NodeClient
from prfaas.gateway.fleet.event_following import EventFollower
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.liveness import CHECK_S, PROBE_S
from prfaas.gateway.fleet.member import Contact, Member, member_fields
from prfaas.http_client.client import HttpClient
from prfaas.supervision import repeat
from prfaas.types import Compat, NodeId

log = logging.getLogger(__name__)

# A stream that has begun is asked for only where the usual polls do not.
_PROBE_BEGUN_S = 2.0
_MOST_PROBES = 3  # of one process at the same time: one of them may meet a lossy path
MOST_FOLLOWED = 32  # event names of one member: its kvd's pools and the engines beside it


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
        self._probes = _Probes(fleet, http, clock)

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
            log.info(
                "removing kvd %s: silent for %g s",
                member.kvd_url,
                self._timeouts.forget_s,
                extra=member_fields("removed", member),
            )
            task = self._polled.pop(member.kvd_url, None)
            if task is not None:
                task.cancel()
            self._fleet.remove(member)

    async def watch(self) -> None:
        """Judges which members are silent, and asks those that calls wait for, until cancelled."""
        fleet = self._fleet

        async def step() -> None:
            cancel = fleet.liveness.cancel_silent
            for part in (self._listen, self._judge, cancel, self._probes.start):
                fleet.failures.contain("liveness", part)

        try:
            await repeat(step, CHECK_S, fleet.failures, loop="liveness")
        finally:
            self._probes.stop()

    def _listen(self) -> None:
        for member in self._fleet.members:
            member.engine.url = member.engine_url or member.engine.url
            for part in (member.kvd, member.engine):
                if part.url is not None:
                    part.hear(self._http.heard_s(part.url))

    def _judge(self) -> None:
        changed = self._fleet.liveness.changed_verdicts()
        for member, silent in changed:
            for part in (member.kvd, member.engine):
                if silent and part.url is not None:
                    # Its host may come back without knowing them.
                    self._http.close_idle(part.url)
        if changed:
            self._fleet.refresh()

    async def _poll_member(self, member: Member) -> None:
        kvd = KvdClient(self._http, member.kvd_url, self._timeouts)
        async with asyncio.TaskGroup() as group:
            following = _Following(self._fleet, member, kvd, group)

            async def poll_kvd() -> None:
                member.kvd.ask(self._clock.now())
                report = await kvd.stats()
                self._fleet.record_report(member, report)
                # Another member may have its name; then the report was ignored.
                following.follow(report if member.report is report else None)

            # `kvd_poll_s` is short because links change at once: a sender samples its figures every
            # half second (`kvd/process.py`), and the gateway acts on them within another.
            failures, at = self._fleet.failures, member.kvd_url
            group.create_task(
                repeat(
                    poll_kvd,
                    self._timeouts.kvd_poll_s,
                    failures,
                    loop="poll_kvd",
                    peer=f"the kvd of {at} does not answer as it should",
                    on_failure=partial(self._fleet.record_problem, member, "kvd"),
                )
            )
            group.create_task(
                repeat(
                    partial(self._poll_engine, member),
                    self._timeouts.node_poll_s,
                    failures,
                    loop="poll_engine",
                    peer=f"the engine of {at} does not answer as it should",
                    on_failure=partial(self._fleet.record_problem, member, "engine"),
                )
            )

    async def _poll_engine(self, member: Member) -> None:
        url = member.engine_url
        if url is None:
            return
        node = NodeClient(self._http, url, self._timeouts)
        member.engine.ask(self._clock.now())
        if member.card is None:
            self._fleet.record_card(member, await node.card())
        asked_s = self._clock.now()
        own = self._fleet.work.prefills_at(member.node)
        load = await node.load()
        leaving = await node.draining()
        self._fleet.record_load(member, load, leaving=leaving, asked_s=asked_s, own=own)


class _Probes:
    """Asks the processes that calls wait for, when nothing has arrived from them for a while."""

    def __init__(self, fleet: Fleet, http: HttpClient, clock: Clock) -> None:
        self._fleet = fleet
        self._http = http
        self._clock = clock
        self._started_s: dict[str, float] = {}  # by URL: the latest probe under way
        self._under_way: dict[str, set[asyncio.Task[None]]] = {}  # by URL

    def start(self) -> None:
        now_s = self._clock.now()
        for member, begun in self._fleet.liveness.awaited():
            after_s = _PROBE_BEGUN_S if begun else PROBE_S
            self._ask(member.engine, NodeClient, now_s, after_s)
            if not begun:
                self._ask(member.kvd, KvdClient, now_s, after_s)

    def stop(self) -> None:
        for tasks in self._under_way.values():
            for task in tasks:
                task.cancel()

    def _ask(
        self,
        part: Contact,
        client: type[NodeClient] | type[KvdClient],
        now_s: float,
        after_s: float,
    ) -> None:
        url = part.url
        if url is None or now_s - max(part.heard_s, self._started_s.get(url, 0.0)) < after_s:
            return
        under_way = self._under_way.setdefault(url, set())
        if len(under_way) >= _MOST_PROBES:
            return
        part.ask(now_s)
        self._started_s[url] = now_s
        timeouts = self._fleet.timeouts
        probe = client(self._http, url, timeouts).probe(timeouts.unresponsive_s)
        task = asyncio.create_task(self._run(probe))
        under_way.add(task)
        task.add_done_callback(partial(self._end, url))

    async def _run(self, probe: Coroutine[Any, Any, None]) -> None:
        try:
            await probe
        except PeerError:
            pass  # the silence counts, not the probe
        except Exception as error:
            self._fleet.failures.record("liveness", error)

    def _end(self, url: str, task: asyncio.Task[None]) -> None:
        under_way = self._under_way[url]
        under_way.discard(task)
        if not under_way:
            del self._under_way[url], self._started_s[url]


class _Followed(NamedTuple):
    name: NodeId
    second: Compat | None = None  # of a second pool; an engine may have had the name before


class _Following:
    """One task for each event name of one member."""

    def __init__(
        self, fleet: Fleet, member: Member, kvd: KvdClient, group: asyncio.TaskGroup
    ) -> None:
        self._fleet = fleet
        self._member = member
        self._kvd = kvd
        self._group = group
        self._tasks: dict[_Followed, tuple[EventFollower, asyncio.Task[None]]] = {}

    def follow(self, report: KvdReport | None) -> None:
        """Follows the kvd's pools and the engines that are registered with it now, and no other
        name: an engine that has exited has no cache."""
        names: list[_Followed] = []
        if report is not None:
            second = [_Followed(NodeId(pool.name), pool.compat) for pool in report.more_pools]
            pools = {report.node, *(pool.name for pool in second)}
            engines = sorted({NodeId(engine.engine_id) for engine in report.engines})
            named = [name for name in engines if name in report.next_seq and name not in pools]
            own = [_Followed(name) for name in named]
            names = [_Followed(report.node), *second, *own][:MOST_FOLLOWED]
        for followed in set(self._tasks) - set(names):
            follower, task = self._tasks.pop(followed)
            task.cancel()
            follower.stop()
        for followed in names:
            if followed not in self._tasks:
                self._tasks[followed] = self._start(followed.name)

    def _start(self, name: NodeId) -> tuple[EventFollower, asyncio.Task[None]]:
        follower = EventFollower(self._fleet, self._member, self._kvd, name)
        following = repeat(
            follower.step,
            0.0,
            self._fleet.failures,
            loop="follow_events",
            peer=f"the kvd of {self._member.kvd_url} does not send the cache events of {name}",
            retry_s=self._fleet.timeouts.node_poll_s,
            on_failure=follower.handle_failure,
        )
        return follower, self._group.create_task(following)
