"""One span: a piece of work of one process for one request. Plain data, as gateways, kvds and nodes
exchange it and as `/prfaas/v1/requests/ID` returns it.

Names of spans and of attributes are listed here, once. Attributes have the names of OpenTelemetry's
GenAI conventions where those have one, and begin with `prfaas.` otherwise.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["server", "client", "internal"]
Value: TypeAlias = str | int | float | bool
Service: TypeAlias = Literal["gateway", "kvd", "node"]

# Of the gateway. REQUEST is the whole request; ATTEMPT is one of its attempts, and the parent of
# the spans after it.
REQUEST: Final = "request"
READ: Final = "read body"
TOKENIZE: Final = "tokenize"
WAIT: Final = "wait for a node"  # routing, and the time for which the router holds the request
BACK_OFF: Final = "back off"  # between two attempts
ATTEMPT: Final = "attempt"
GRANT: Final = "grant"  # client: the kvd's has the same name
COPIES: Final = "copy prefixes"
PREFILL: Final = "prefill"  # client: until the prefill node has answered
COMMIT: Final = "wait for commit"  # from the grant until the receiver has committed the state
DECODE: Final = "decode"  # client: from the call to the decode node until the answer has ended

# Of a kvd.
KVD_GRANT: Final = "kvd grant"  # server
KVD_RECEIVE: Final = "kvd receive"  # from the grant until the commit or the failure
KVD_SEND: Final = "kvd send"  # from the engine's first call until the last byte is acknowledged
KVD_PULL: Final = "kvd pull"  # server: a copy of a prefix

# Of a node.
NODE_REQUEST: Final = "node request"  # server
NODE_LEASE: Final = "node lease"  # until the kvd has reserved pages, or attached the state
NODE_QUEUE: Final = "node queue"  # until the engine computes the first token of the prompt
NODE_PREFILL: Final = "node prefill"
NODE_DECODE: Final = "node decode"  # from the first token to the last

# Attributes.
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
MODEL: Final = "gen_ai.request.model"
TTFT: Final = "gen_ai.server.time_to_first_token"  # seconds
REQUEST_ID: Final = "prfaas.request.id"
OUTCOME: Final = "prfaas.outcome"
ROUTE: Final = "prfaas.route"
REASON: Final = "prfaas.route.reason"
HOME: Final = "prfaas.home"
CLUSTER: Final = "prfaas.cluster"
TARGET: Final = "prfaas.peer.node"  # the node that a call goes to
TRANSFER_ID: Final = "prfaas.transfer.id"
NBYTES: Final = "prfaas.transfer.bytes"
FORM: Final = "prfaas.transfer.form"
STATELESS_TOKENS: Final = "prfaas.stateless_tokens"  # cached blocks without a state to resume from
PREDICTED: Final = "prfaas.predicted_seconds"  # by the route, for the same piece of work
ATTEMPTS: Final = "prfaas.attempts"
# Why an attempt has failed: one of `FAILURES`.
FAILURE: Final = "prfaas.attempt.failure"
SILENT, LOST, CUT = "silent node", "lost node", "cut link"
NO_STATE, NO_MEMORY, OTHER = "lost state", "no memory", "other"
FAILURES: Final = (SILENT, LOST, CUT, NO_STATE, NO_MEMORY, OTHER)

MOST_TEXT = 300  # characters of an attribute or an error
MOST_SPANS = 64  # of one trace in one process
_Id: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16,32}$")]
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    name: _Text
    trace_id: _Id
    span_id: _Id
    start_s: float  # since the epoch, on the clock of the process
    end_s: float
    service: Service
    node: _Text = ""  # that the process serves; empty: a gateway
    parent_id: _Id | None = None
    kind: Kind = "internal"
    error: _Text = ""
    attributes: dict[_Text, Value] = msgspec.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def shown(text: str) -> str:
    """A text that fits into a span. Half a surrogate pair, which UTF-8 lacks, becomes an escape."""
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."
