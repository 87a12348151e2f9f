"""Clients as they are: each has a gateway, goes to the other one when it cannot be reached or has
ended the connection before the first token, and may hang up. Every request is accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from prfaas.faults.deployment import GATEWAYS, FaultDeployment
from prfaas.faults.questions import Question, Verdict, body, judged
from prfaas.measure.client import TimedResponse

ATTEMPTS = 4  # of a client whose connections end before the first token
_UNREACHED = "cannot connect"  # a gateway that is being started again: nobody has accepted it


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as its client remembers it."""

    id: str
    gateway: str  # that had it last
    verdict: Verdict
    answer: TimedResponse

    def __str__(self) -> str:
        seen = f"{len(self.answer.token_ids)} tokens, {self.answer.error or 'no error'}"
        return f"{self.id} at {self.gateway}: {self.verdict} ({seen})"


class Clients:
    def __init__(self, stage: FaultDeployment, name: str) -> None:
        self._stage = stage
        self._name = name
        self._numbers = count()

    async def ask(
        self,
        question: Question,
        *,
        gateway: int = 0,
        stream: bool = True,
        salt: str = "",
        leaves_after_s: float | None = None,
    ) -> Asked:
        stage, request_id = self._stage, f"{self._name}-{next(self._numbers)}"
        for attempt in range(ATTEMPTS):
            number = (gateway + attempt) % len(GATEWAYS)
            target, name = stage.targets[number], GATEWAYS[number]
            killed = stage.killed[name]
            sent = body(target.model, question, stream=stream, salt=salt)
            named = f"{request_id}.{attempt}"
            answer = await target.complete(sent, leaves_after_s, named)
            died = stage.killed[name] > killed or name not in stage.processes
            verdict = judged(question, answer, left=leaves_after_s is not None, gateway_died=died)
            lost = verdict is Verdict.LOST and not answer.token_ids
            if not (lost or answer.error == _UNREACHED):
                break
        return Asked(named, name, verdict, answer)
