"""Outcomes of requests, read from the lines that a gateway logs about them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import msgspec

KEPT = 1000  # latest outcomes, for quantiles


class RequestOutcome(msgspec.Struct, frozen=True):
    """One line of the gateway's log; the fields are named as there."""

    id: str
    outcome: str
    route: str
    reason: str
    prefill: str
    decode: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int | None
    bytes: int
    attempts: int
    ttft_s: float | None
    total_s: float
    error: str = ""
    failures: list[str] = []
    form: str = ""  # of the hand-off; empty: none was made


_DECODER = msgspec.json.Decoder(RequestOutcome)


def parse_outcome(line: str) -> RequestOutcome | None:
    """The outcome that a line of a gateway's output reports; None: it is another line. A gateway
    that logs JSON has the same fields after the time, the logger and the message."""
    start = 0 if line.startswith('{"time":') else line.find('{"id":')
    if start < 0:
        return None
    try:
        return _DECODER.decode(line[start:])
    except msgspec.MsgspecError:
        return None


class RequestOutcomes:
    def __init__(self) -> None:
        self.latest: deque[RequestOutcome] = deque(maxlen=KEPT)
        self.counts: Counter[tuple[str, str]] = Counter()  # by route and outcome
        self.forms: Counter[tuple[str, str]] = Counter()  # hand-offs, by route and form
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._awaited: dict[str, asyncio.Future[RequestOutcome]] = {}

    def read_line(self, line: str) -> None:
        """Takes one line of the gateway's output. Other lines than those of requests are
        ignored."""
        outcome = parse_outcome(line)
        if outcome is None:
            return
        self.latest.append(outcome)
        self.counts[outcome.route, outcome.outcome] += 1
        if outcome.form:
            self.forms[outcome.route, outcome.form] += 1
        if outcome.ttft_s is not None:
            self.prompt_tokens += outcome.prompt_tokens
            self.cached_tokens += outcome.cached_tokens
        awaited = self._awaited.pop(outcome.id, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(outcome)

    async def of(self, request_id: str) -> RequestOutcome:
        """Waits for the request's line: a client may receive its response before the line arrives
        here."""
        for outcome in self.latest:
            if outcome.id == request_id:
                return outcome
        awaited: asyncio.Future[RequestOutcome] = asyncio.get_running_loop().create_future()
        self._awaited[request_id] = awaited
        return await awaited

    def ttfts_s(self, route: str) -> list[float]:
        return [one.ttft_s for one in self.latest if one.route == route and one.ttft_s is not None]
