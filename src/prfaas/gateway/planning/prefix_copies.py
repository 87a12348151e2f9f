"""Prefix copies: one kvd pulls a prefix from another, with lower priority than its hand-offs.

Routes request copies before a prefill; so do replication and evacuation. Each copy is bounded in
time, made once when several callers request the same one, counted and logged. After a failure no
copy is made between the two kvds for `REST_S`. A copy that fails is a cache miss and nothing else.
Paper: section 3.2.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from prometheus_client.core import Metric

from prfaas.cache.manager import CopyProposal
from prfaas.clock import Clock
from prfaas.contracts.kvd_api import PULL_S, PrefixPulled, PullPrefix
from prfaas.errors import PeerError, TransferFailed
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.exposition.families import counter, gauge
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.http_client.client import HttpClient
from prfaas.supervision import one_line
from prfaas.types import BlockHash, Compat, NodeId, NotNow

log = logging.getLogger(__name__)

REST_S = 10.0  # after a failed copy, none is made between the same two kvds for this long
Why: TypeAlias = Literal["route", "replicate", "evacuate"]
_Key: TypeAlias = tuple[NodeId, Compat, BlockHash]  # a copy's target, format and last block


class PrefixCopy(NamedTuple):
    why: Why
    source: NodeId
    target: NodeId
    hashes: tuple[BlockHash, ...]
    tokens: int
    compat: Compat | None = None  # of the pools that are meant; None: of the target's first one

    def __str__(self) -> str:
        form = "" if self.compat is None else f" in the {self.compat.form} form"
        return (
            f"{self.why}: prefix of {self.tokens} tokens from {self.source} to {self.target}{form}"
        )


def copy_of(why: Why, proposal: CopyProposal) -> PrefixCopy:
    return PrefixCopy(
        why,
        proposal.source,
        proposal.target,
        proposal.hashes,
        proposal.tokens,
        proposal.compat,
    )


@dataclass(slots=True)
class Tally:
    """Counts of the copies with one reason."""

    made: int = 0
    failed: int = 0
    tokens: int = 0  # of the prefixes that were copied
    nbytes: int = 0  # of them, what the targets lacked


class PrefixCopies:
    def __init__(
        self, fleet: Fleet, http: HttpClient, background_calls: BackgroundCalls, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._http = http
        self._background_calls = background_calls
        self._clock = clock
        self._under_way: dict[_Key, tuple[PrefixCopy, asyncio.Future[Any]]] = {}
        self._rests_until_s: dict[tuple[NodeId, NodeId], float] = {}
        self.tallies: dict[Why, Tally] = {why: Tally() for why in get_args(Why)}

    @property
    def under_way(self) -> list[PrefixCopy]:
        return [copy for copy, _ in self._under_way.values()]

    @property
    def under_way_without_request(self) -> list[PrefixCopy]:
        """The copies that no request waits for."""
        return [copy for copy in self.under_way if copy.why != "route"]

    def start(
        self, copy: PrefixCopy, within_s: float, traceparent: str | None = None
    ) -> asyncio.Future[Any] | None:
        """Returns a future that ends when the copy is made or has failed, or after `within_s`; the
        future never fails. Returns None when the copy cannot be made now. `traceparent`: of the
        request that needs the copy first."""
        source = self._fleet.members.named(copy.source)
        target = self._fleet.members.named(copy.target)
        if source is None or target is None or not copy.hashes:
            return None
        compat = copy.compat or target.compat
        if compat is None or not (compat in source.compats and compat in target.compats):
            return None  # equal hashes name the same tokens, and not the same state
        key = (copy.target, compat, copy.hashes[-1])
        if key in self._under_way:
            return self._under_way[key][1]
        if self._clock.now() < self._rests_until_s.get((copy.source, copy.target), -math.inf):
            return None
        within_s = min(within_s, PULL_S)
        copying = self._make(copy._replace(compat=compat), source, target, within_s, traceparent)
        timeout_s = within_s + self._fleet.timeouts.kvd_call_s
        task: asyncio.Future[Any] = self._background_calls.run(copying, timeout_s)
        self._under_way[key] = (copy, task)
        task.add_done_callback(lambda _: self._under_way.pop(key))
        return task

    async def _make(
        self,
        copy: PrefixCopy,
        source: Member,
        target: Member,
        within_s: float,
        traceparent: str | None,
    ) -> None:
        began_s = self._clock.now()
        relay = self._fleet.links.relay_between(source, target)
        pull = PullPrefix(source.kvd_url, copy.hashes, relay, within_s, copy.compat)
        tally = self.tallies[copy.why]
        try:
            async with asyncio.timeout(within_s):
                kvd = KvdClient(self._http, target.kvd_url, self._fleet.timeouts)
                answer = await kvd.pull(pull, traceparent)
            if isinstance(answer, NotNow):
                raise TransferFailed(f"{copy.target} refused: {answer.reason}")
        except (PeerError, TimeoutError) as error:
            tally.failed += 1
            self._rest(copy)
            why = one_line(str(error)) or f"not copied within {within_s:g} s"
            log.warning("%s failed: %s", copy, why)
            return
        self._count(tally, answer)
        took_s = self._clock.now() - began_s
        log.info("%s: %d bytes in %.3f s", copy, answer.granted_bytes, took_s)

    def _rest(self, copy: PrefixCopy) -> None:
        now = self._clock.now()
        resting = {pair: until_s for pair, until_s in self._rests_until_s.items() if now < until_s}
        self._rests_until_s = {**resting, (copy.source, copy.target): now + REST_S}

    def _count(self, tally: Tally, answer: PrefixPulled) -> None:
        tally.made += 1
        tally.tokens += answer.tokens
        tally.nbytes += answer.granted_bytes

    def metrics(self) -> Iterator[Metric]:
        copies = counter(
            "prefix_copies", "Copies of prefixes between nodes that have ended.", "why", "outcome"
        )
        tokens = counter("prefix_copied_tokens", "Tokens of the prefixes that were copied.", "why")
        nbytes = counter(
            "prefix_copied_bytes", "Bytes of copied prefixes that the targets lacked.", "why"
        )
        for why, tally in self.tallies.items():
            copies.add_metric([why, "made"], tally.made)
            copies.add_metric([why, "failed"], tally.failed)
            tokens.add_metric([why], tally.tokens)
            nbytes.add_metric([why], tally.nbytes)
        yield from (copies, tokens, nbytes)
        yield gauge(
            "prefix_copies_in_progress",
            "Copies of prefixes that are being made.",
            value=len(self._under_way),
        )
