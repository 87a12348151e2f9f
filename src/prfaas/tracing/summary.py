"""One request in a few numbers, and the causes of its time to first token. Plain data, as
`/prfaas/v1/requests` returns it (`contracts/trace_api.py`)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

CauseKind: TypeAlias = Literal[
    "big body",  # it took long to arrive, or to be tokenised
    "full queue",  # it waited for a busy node, at the router or in the engine's queue
    "not served",  # it waited while no node could take it, such as after the loss of all
    "busy gateway",  # it was not held, and yet the gateway was slow to choose nodes
    "refused",  # by a limit, at once
    "no memory",  # the decode node's kvd refused a grant
    "prefix copies",
    "cold cache",  # most of its prompt had to be computed, at the expected pace
    "lost state",  # blocks were cached, but not the state to resume from; or it was lost later
    "slow prefill",  # slower than the route predicted
    "slow link",
    "cut link",
    "busy decode",  # the state had arrived, and the first token came late
    "retry",  # attempts that failed for another reason than those below
    "hung node",  # a node did not answer any more
    "lost node",  # a node died
    "nothing unusual",
]


class Cause(msgspec.Struct, frozen=True):
    kind: CauseKind
    seconds: float  # of the time to first token, or of the whole where there is no first token
    text: str  # one sentence, with the names of nodes and clusters


class RequestSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a list of requests."""

    id: str
    trace_id: str
    at_s: float  # its arrival, since the epoch
    outcome: str  # "in progress" while it has not ended
    route: str
    home: str = ""
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 1
    ttft_s: float | None = None  # of an answer that streams
    total_s: float = 0.0
    tenant: str = ""
    error: str = ""
