"""The election of the gateway that plans, among the gateways of a deployment: sends the claims that
`candidacy.py` decides on to all kvds, and keeps their answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from prfaas.clock import Clock
from prfaas.contracts.kvd_api import ClaimPlanning, PlanningLease
from prfaas.errors import PeerError
from prfaas.gateway.planning.candidacy import RENEW_S, Candidacy
from prfaas.service.logging import with_fields

log = logging.getLogger(__name__)
CLAIM_S = 1.0  # in which a kvd answers a claim


class Election:
    def __init__(
        self,
        instance: str,
        kvd_urls: Callable[[], Sequence[str]],
        claim: Callable[[str, ClaimPlanning], Awaitable[PlanningLease]],
        clock: Clock,
        seen_epoch: Callable[[], int],
        stated: int = 0,
    ) -> None:
        """`stated`: the number of kvds where the deployment file lists none of them
        (`candidacy.has_majority`)."""
        self._kvd_urls = kvd_urls
        self._claim = claim
        self._clock = clock
        self._seen_epoch = seen_epoch
        self._candidacy = Candidacy(instance, stated)
        self._calls: dict[str, asyncio.Task[None]] = {}  # by kvd; one at a time
        self._planned = False

    @property
    def plans(self) -> bool:
        """Whether this gateway plans now. It ends by itself when no renewal succeeds."""
        return self._candidacy.plans(self._clock.now())

    @property
    def epoch(self) -> int:
        """With which this gateway plans, or has planned last; 0 when it never has."""
        return self._candidacy.epoch

    @property
    def first_epoch(self) -> int:
        """With which that planning began. It is another one when planning has lapsed since."""
        return self._candidacy.first_epoch

    @property
    def majority_epoch(self) -> int:
        """The highest that a majority of the kvds has promised, as far as this gateway knows."""
        return self._candidacy.majority_epoch

    async def step(self) -> None:
        """One round. Comes every RENEW_S."""
        urls = tuple(dict.fromkeys(self._kvd_urls()))
        claim = self._candidacy.begin_round(self._clock.now(), urls, self._seen_epoch())
        # A kvd that does not answer must not delay the next renewal at the others.
        await self._send(claim, urls, RENEW_S if self.plans else None)
        given_up = self._candidacy.end_round(self._clock.now())
        if given_up is not None:
            await self._send(given_up, urls)
        self._log_change()

    async def give_up(self) -> None:
        """For a clean stop, after the last step: another gateway plans at once. This one does not
        plan again."""
        given_up = self._candidacy.end()
        self._cancel_calls()
        if given_up is not None:
            await self._send(given_up, tuple(dict.fromkeys(self._kvd_urls())))
        self._log_change()

    async def _send(
        self, claim: ClaimPlanning, urls: Sequence[str], within_s: float | None = None
    ) -> None:
        """Returns when all kvds have answered or their time is up; or after `within_s`, and then
        the calls that are left go on."""
        for url in urls:
            if url not in self._calls:
                self._calls[url] = asyncio.create_task(self._ask(url, claim))
        if not self._calls:
            return
        try:
            await asyncio.wait(self._calls.values(), timeout=within_s)
        except asyncio.CancelledError:
            self._cancel_calls()
            raise
        done = [url for url, call in self._calls.items() if call.done()]
        for call in [self._calls.pop(url) for url in done]:
            call.result()  # raises what is a defect

    async def _ask(self, url: str, claim: ClaimPlanning) -> None:
        sent_s = self._clock.now()
        try:
            async with asyncio.timeout(CLAIM_S):
                lease = await self._claim(url, claim)
        except (PeerError, TimeoutError):
            return  # a kvd that does not answer grants nothing
        self._candidacy.receive(url, claim, sent_s, lease, self._clock.now())

    def _cancel_calls(self) -> None:
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()

    def _log_change(self) -> None:
        planned, self._planned = self._planned, self.plans
        if self._planned and not planned:
            fields = with_fields(event="planning", plans=True, epoch=self.epoch)
            log.info("this gateway plans from now on, with epoch %d", self.epoch, extra=fields)
        elif planned and not self._planned:
            fields = with_fields(event="planning", plans=False, epoch=self.epoch)
            log.warning(
                "this gateway no longer plans: its lease of epoch %d has ended",
                self.epoch,
                extra=fields,
            )
