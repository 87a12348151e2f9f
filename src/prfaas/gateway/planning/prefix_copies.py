"""Copies of prefixes between pools, carried out: one kvd pulls from another, behind its hand-offs.

A route asks for them before its prefill, replication, and nodes that are about to leave. Here each
is bounded in time, made once when several ask for the same, counted and logged. A pair of kvds that
has just failed is left alone for a while. A copy that fails is a miss and nothing else. Paper:
section 3.2.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from prfaas.cache.manager import CopyProposal
from prfaas.clock import Clock
from prfaas.contracts.kvd_api import PULL_S, PrefixPulled, PullPrefix
from prfaas.errors import PeerError, TransferFailed
from prfaas.gateway.client.kvd_client import ASK_S, KvdClient
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.fleet.membership import Member
from prfaas.gateway.router import Router
from prfaas.http_client.client import HttpClient
from prfaas.types import BlockHash, NodeId, NotNow

log = logging.getLogger(__name__)

REST_S = 10.0  # a pair of kvds between which a copy has failed makes none for so long
Why: TypeAlias = Literal["route", "replicate", "evacuate"]


class PrefixCopy(NamedTuple):
    why: Why
    source: NodeId
    target: NodeId
    hashes: tuple[BlockHash, ...]
    tokens: int

    def __str__(self) -> str:
        return f"{self.why}: prefix of {self.tokens} tokens from {self.source} to {self.target}"


def move_of(why: Why, proposal: CopyProposal) -> PrefixCopy:
    return PrefixCopy(why, proposal.source, proposal.target, proposal.hashes, proposal.tokens)


@dataclass(slots=True)
class Tally:
    """Of what was asked for by one of them."""

    made: int = 0
    failed: int = 0
    tokens: int = 0  # of the prefixes that are there now
    nbytes: int = 0  # that the target lacked of them


class PrefixCopies:
    def __init__(
        self, router: Router, calls: HttpClient, errands: BackgroundCalls, clock: Clock
    ) -> None:
        self._router = router
        self._calls = calls
        self._errands = errands
        self._clock = clock
        self._under_way: dict[tuple[NodeId, BlockHash], tuple[PrefixCopy, asyncio.Future[Any]]] = {}
        self._rests_until_s: dict[tuple[NodeId, NodeId], float] = {}
        self.tallies: dict[Why, Tally] = {why: Tally() for why in get_args(Why)}

    @property
    def under_way(self) -> list[PrefixCopy]:
        return [move for move, _ in self._under_way.values()]

    @property
    def of_hot_ones(self) -> list[PrefixCopy]:
        """Those that no request waits for."""
        return [move for move in self.under_way if move.why != "route"]

    def start(self, move: PrefixCopy, within_s: float) -> asyncio.Future[Any] | None:
        """Ends when the copy is there, has failed, or after `within_s`, and never fails. None: it
        cannot be made now."""
        source = self._router.members.named(move.source)
        target = self._router.members.named(move.target)
        if source is None or target is None or not move.hashes:
            return None
        key = (move.target, move.hashes[-1])
        if key in self._under_way:
            return self._under_way[key][1]
        if self._clock.now() < self._rests_until_s.get((move.source, move.target), -math.inf):
            return None
        within_s = min(within_s, PULL_S)
        making = self._make(move, source, target, within_s)
        task: asyncio.Future[Any] = self._errands.run(making, within_s + ASK_S)
        self._under_way[key] = (move, task)
        task.add_done_callback(lambda _: self._under_way.pop(key))
        return task

    async def _make(
        self, move: PrefixCopy, source: Member, target: Member, within_s: float
    ) -> None:
        began_s = self._clock.now()
        via = self._router.way(source, target)
        asked = PullPrefix(source.kvd_url, move.hashes, via, within_s)
        tally = self.tallies[move.why]
        try:
            async with asyncio.timeout(within_s):
                answer = await KvdClient(self._calls, target.kvd_url).pull(asked)
            if isinstance(answer, NotNow):
                raise TransferFailed(f"{move.target} says: {answer.reason}")
        except (PeerError, TimeoutError) as error:
            tally.failed += 1
            self._rests_until_s[move.source, move.target] = self._clock.now() + REST_S
            log.warning("%s failed: %s", move, error or f"not there within {within_s:g} s")
            return
        self._count(tally, answer)
        took_s = self._clock.now() - began_s
        log.info("%s: %d bytes in %.3f s", move, answer.granted_bytes, took_s)

    def _count(self, tally: Tally, answer: PrefixPulled) -> None:
        tally.made += 1
        tally.tokens += answer.tokens
        tally.nbytes += answer.granted_bytes

    def metrics(self) -> Iterator[Metric]:
        copies = _counter("moves", "Copies of prefixes between nodes.", "why", "outcome")
        tokens = _counter("moved_tokens", "Of prefixes that were copied.", "why")
        nbytes = _counter("moved_bytes", "That the targets lacked of them.", "why")
        for why, tally in self.tallies.items():
            copies.add_metric([why, "made"], tally.made)
            copies.add_metric([why, "failed"], tally.failed)
            tokens.add_metric([why], tally.tokens)
            nbytes.add_metric([why], tally.nbytes)
        yield from (copies, tokens, nbytes)
        under_way = "Copies of prefixes that are being made."
        yield GaugeMetricFamily("prfaas_gateway_moves_under_way", under_way, len(self._under_way))


def _counter(name: str, says: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"prfaas_gateway_{name}", says, labels=labels)
