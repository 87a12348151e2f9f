"""What became of every request, from the lines in which a gateway tells it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import msgspec

KEPT = 1000  # the latest, for quantiles


class Told(msgspec.Struct, frozen=True):
    """One line of the gateway's log; fields as there."""

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


class RequestOutcomes:
    def __init__(self) -> None:
        self.latest: deque[Told] = deque(maxlen=KEPT)
        self.outcomes: Counter[tuple[str, str]] = Counter()  # route, outcome
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._decoder = msgspec.json.Decoder(Told)
        self._expected: dict[str, asyncio.Future[Told]] = {}

    def heard(self, line: str) -> None:
        """Lines about other things are passed over."""
        start = line.find('{"id":')
        if start < 0:
            return
        try:
            told = self._decoder.decode(line[start:])
        except msgspec.MsgspecError:
            return
        self.latest.append(told)
        self.outcomes[told.route, told.outcome] += 1
        if told.ttft_s is not None:
            self.prompt_tokens += told.prompt_tokens
            self.cached_tokens += told.cached_tokens
        expected = self._expected.pop(told.id, None)
        if expected is not None and not expected.done():
            expected.set_result(told)

    async def of(self, request_id: str) -> Told:
        """Waits for it: a client may have its answer before the line has arrived here."""
        for told in self.latest:
            if told.id == request_id:
                return told
        expected: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._expected[request_id] = expected
        return await expected

    def ttfts_s(self, route: str) -> list[float]:
        return [t.ttft_s for t in self.latest if t.route == route and t.ttft_s is not None]
