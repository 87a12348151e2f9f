"""Clients of a deployment with several gateways.

A client goes to another gateway when its gateway cannot be reached or ends the connection before
the first token. A client may also hang up. Every request gets a verdict, and a failure is excused
only by what was down at the time of the attempt that failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from prfaas.measure.client import TimedResponse
from prfaas_lab.faults.credentials import ORDINARY_TENANTS
from prfaas_lab.faults.deployment import FaultDeployment
from prfaas_lab.faults.downtimes import Downtimes, is_excused
from prfaas_lab.faults.questions import Question, Verdict, body, judge

ATTEMPTS = 4  # of a client whose connections end before the first token
_UNREACHED = "cannot connect"  # the gateway does not listen: it is down, or restarting


@dataclass(frozen=True, slots=True)
class ClientResult:
    """One request as its client saw it."""

    id: str
    gateway: str  # of the last attempt
    verdict: Verdict
    answer: TimedResponse  # to the last attempt
    asked_s: float  # when the client sent its first attempt
    # Gateways that refused a connection although they were not down: no fault explains that.
    unreached: tuple[str, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """From the first attempt to the first token; None without a token."""
        times_s = self.answer.event_times_s
        return times_s[0] - self.asked_s if times_s else None

    def __str__(self) -> str:
        seen = f"{len(self.answer.token_ids)} tokens, {self.answer.error or 'no error'}"
        refused = f", after {', '.join(self.unreached)} did not listen" if self.unreached else ""
        return f"{self.id} at {self.gateway}: {self.verdict} ({seen}{refused})"


def is_explained(asked: ClientResult, decode_node: str | None, down: Downtimes) -> bool:
    """Whether the request may have ended so, given what was down during its last attempt, and
    whether all its gateways listened unless they were down. `decode_node`: where its answer was
    generated; None: not known."""
    during = (asked.answer.sent_s, asked.answer.ended_s)
    return not asked.unreached and is_excused(
        asked.verdict,
        gateway_was_down=down.include(asked.gateway, *during),
        decode_node_was_down=decode_node is not None and down.include(decode_node, *during),
    )


class Clients:
    def __init__(self, deployment: FaultDeployment, name: str) -> None:
        self._deployment = deployment
        self._name = name
        self._numbers = count()

    async def ask(
        self,
        question: Question,
        *,
        gateway: int = 0,
        tenant: str = ORDINARY_TENANTS[0],
        stream: bool = True,
        salt: str = "",
        leaves_after_s: float | None = None,
    ) -> ClientResult:
        deployment, request_id = self._deployment, f"{self._name}-{next(self._numbers)}"
        asked_s = deployment.clock.now()
        unreached = []
        for attempt in range(ATTEMPTS):
            number = (gateway + attempt) % len(deployment.gateways)
            target, name = deployment.targets_of[tenant][number], deployment.gateways[number]
            sent = body(target.model, question, stream=stream, salt=salt)
            named = f"{request_id}.{attempt}"
            answer = await target.complete(sent, leaves_after_s, named)
            died = deployment.downtimes.include(name, answer.sent_s, answer.ended_s)
            verdict = judge(question, answer, left=leaves_after_s is not None, gateway_died=died)
            lost = verdict is Verdict.LOST and not answer.token_ids
            if answer.error == _UNREACHED and not died:
                unreached.append(name)
            if not (lost or answer.error == _UNREACHED):
                break
        return ClientResult(named, name, verdict, answer, asked_s, tuple(unreached))
