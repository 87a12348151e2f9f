"""Questions with known answers, and verdicts on the answers that clients got.

The known answers come from a single node before any fault. A verdict states whether a client could
have been misled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from prfaas.errors import PeerError
from prfaas.measure.client import TIMED_OUT, Target, TimedResponse
from prfaas.measure.prompts import TEXT_IDS

REFUSALS = ("HTTP 429", "HTTP 503")


@dataclass(frozen=True, slots=True)
class Question:
    ids: tuple[int, ...]
    expected: tuple[int, ...]  # tokens of the answer; a request asks for as many


class Verdict(StrEnum):
    RIGHT = "right"  # every token equals the single node's
    REFUSED = "refused"  # 429 or 503, before the first token
    BROKEN = "broken"  # right tokens, then an error event
    LOST = "lost"  # the gateway was killed, and the connection ended
    LEFT = "left"  # the client hung up
    WRONG = "wrong"  # another token, another end, or no response: must never happen


def prompt(tokens: int, seed: str) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(TEXT_IDS, k=tokens))


def body(model: str | None, question: Question, *, stream: bool, salt: str = "") -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": question.ids,
            "max_tokens": len(question.expected),
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
            "cache_salt": salt,
        }
    )


async def learn_answer(single_node: Target, ids: Sequence[int], output_tokens: int) -> Question:
    """A question with the answer of a single node, computed without the shared caches. Raises
    `PeerError`."""
    unknown = Question(tuple(ids), (0,) * output_tokens)
    answer = await single_node.complete(
        body(single_node.model, unknown, stream=False, salt="alone")
    )
    if answer.error is not None or len(answer.token_ids) != output_tokens:
        raise PeerError(f"{single_node.url}: {answer.error}, {len(answer.token_ids)} tokens")
    return Question(unknown.ids, tuple(answer.token_ids))


def judge(question: Question, answer: TimedResponse, *, left: bool, gateway_died: bool) -> Verdict:
    """`left`: the client hung up on purpose. `gateway_died`: its gateway was killed meanwhile."""
    tokens = tuple(answer.token_ids)
    if tokens != question.expected[: len(tokens)]:
        return Verdict.WRONG
    if answer.error is None:
        return Verdict.RIGHT if tokens == question.expected else Verdict.WRONG
    if answer.error == TIMED_OUT and left:
        return Verdict.LEFT
    if answer.error.startswith(REFUSALS):
        return Verdict.REFUSED
    if answer.error.startswith("stream failed"):
        return Verdict.BROKEN if tokens else Verdict.WRONG
    ended = answer.error.startswith(("connection lost", "cannot connect", "stream cut short"))
    return Verdict.LOST if ended and gateway_died else Verdict.WRONG
