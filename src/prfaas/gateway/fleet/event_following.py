"""Follows the cache events under one name of one member, starting from a snapshot, and again from a
snapshot after a gap or a restart.

A page that is malformed, or of another node, empties what the index has under the name. The number
of blocks and the rate of hashes are bounded, so that one member cannot fill the gateway's memory or
keep its event loop busy.
"""

from __future__ import annotations

import asyncio

from prfaas.contracts.kvd_api import SNAPSHOT, EventPage
from prfaas.errors import MalformedResponse, PeerError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.types import BlockHash, NodeId

MOST_BLOCKS = 2_000_000  # under one name: twice the blocks of a pool of 64 million tokens
EVERY_S = 0.02  # the least time between two pages
HASHES_PER_S = 100_000  # a page with more than this delays the next one


class EventFollower:
    def __init__(self, fleet: Fleet, member: Member, kvd: KvdClient, name: NodeId) -> None:
        self._fleet = fleet
        self._member = member
        self._kvd = kvd
        self._name = name
        self._instance = ""
        self._since = SNAPSHOT
        self._blocks = 0  # stored less removed since the snapshot, and those in it

    async def step(self) -> None:
        """Waits for one page of events and applies it. Returns when the next page may be requested.
        Raises `PeerError`."""
        fleet, timeouts = self._fleet, self._fleet.timeouts
        pool = self._member.second_pool(self._name)
        compat = None if pool is None else pool.compat
        if not fleet.members.formats.has_indexed_blocks(self._member, compat):
            # No request can use these blocks, and prompts need not be hashed for them.
            self._restart()
            await asyncio.sleep(timeouts.node_poll_s)
            return
        page = await self._kvd.events(self._name, self._since, timeouts.event_poll_s)
        if self._apply(page):
            hashes = sum(len(event.hashes) for event in page.events)
            hashes += sum(map(len, (page.snapshot or {}).values()))
            await asyncio.sleep(max(EVERY_S, hashes / HASHES_PER_S))
        else:
            await asyncio.sleep(timeouts.node_poll_s)

    def handle_failure(self, error: Exception) -> None:
        """A kvd that is silent keeps its blocks: it may be back in a moment. After any other
        failure the index starts anew."""
        if isinstance(error, MalformedResponse) or not isinstance(error, PeerError):
            self._restart()

    def stop(self) -> None:
        """The name is not the member's any more."""
        self._restart()

    def _apply(self, page: EventPage) -> bool:
        """Returns False when the page cannot be applied yet."""
        fleet = self._fleet
        if page.snapshot is not None:
            if not fleet.prefixes.add(self._member, self._name):
                self._since = SNAPSHOT
                return False  # no engine has registered yet, or the name is another member's
            held = {g: [BlockHash(h) for h in names] for g, names in page.snapshot.items()}
            self._count(sum(map(len, held.values())) - self._blocks)
            if not fleet.manager.snapshot(self._name, held, page.next_seq):
                raise MalformedResponse("malformed page of events: snapshot: an unknown group")
            self._instance = page.instance
        elif page.instance != self._instance:
            self._since = SNAPSHOT  # another process, whose sequence numbers start anew
            self._instance = page.instance
            return True
        elif not fleet.prefixes.owns(self._member, self._name):
            self._since = SNAPSHOT
            return False
        elif page.next_seq != self._since + len(page.events):
            self._since = SNAPSHOT  # events are missing, and a snapshot replaces them
            return True
        for event in page.events:
            number = len(event.hashes)
            self._count(number if event.action == "stored" else -number)
            fleet.manager.apply(event)
        self._since = page.next_seq
        return True

    def _count(self, more: int) -> None:
        self._blocks = max(0, self._blocks + more)
        if self._blocks > MOST_BLOCKS:
            raise MalformedResponse(f"{self._name} claims more than {MOST_BLOCKS} blocks")

    def _restart(self) -> None:
        self._instance, self._since, self._blocks = "", SNAPSHOT, 0
        self._fleet.prefixes.forget(self._member, self._name)
