"""Names the causes of a request's time to first token, from its spans. Pure.

Every instant up to the first token counts for one cause (`time_shares.py`); the cause with the most
seconds comes first. The time of an attempt that failed counts for what made it fail. Where the
spans of nodes are missing, as with vLLM, the gateway's own calls are all that there is: then the
time of a prefill contains the wait in the engine's queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from prfaas.tracing import sentences
from prfaas.tracing.failures import failure_kind
from prfaas.tracing.family import Family
from prfaas.tracing.prefill_time import PrefillTime, split_prefill
from prfaas.tracing.spans import (
    ATTEMPT,
    BACK_OFF,
    CLUSTER,
    COMMIT,
    COPIES,
    DECODE,
    GRANT,
    NODE_DECODE,
    NODE_LEASE,
    NODE_PREFILL,
    NODE_QUEUE,
    PREDICTED,
    PREFILL,
    READ,
    REASON,
    STATELESS_TOKENS,
    TOKENIZE,
    WAIT,
    Span,
)
from prfaas.tracing.summary import Cause, CauseKind, RequestSummary
from prfaas.tracing.time_shares import Piece, divide

# A cause is named where it has this part of the time, and this many seconds.
LEAST_PART = 0.1
LEAST_S = 0.01
# A call that a node leaves unanswered for less is explained by the network and a busy machine.
LEAST_HANG_S = 1.0

# Ranks of spans that overlap. Ranks and shares that depend on nothing else are in `_PLAIN`.
_FAILED, _OWN, _CALL, _NODE, _DECODE, _PREFILL, _COMMIT = 90, 80, 70, 60, 50, 40, 20
_PLAIN = {
    READ: (_OWN, READ),
    TOKENIZE: (_OWN, TOKENIZE),
    GRANT: (_CALL, GRANT),
    COPIES: (_CALL, COPIES),
    COMMIT: (_COMMIT, "transfer"),
}
# A wait for a node counts as the wait in a queue, for want of any node, or as routing.
_QUEUED, _UNSERVED = "queued", "unserved"


class _Timed(NamedTuple):
    """Seconds of the time to first token, and what they count as."""

    kind: CauseKind
    seconds: float
    text: str


def find_causes(
    request: RequestSummary, spans: Sequence[Span], explanation: Mapping[str, Any] | None
) -> tuple[Cause, ...]:
    """The causes of the time to first token, or of the whole time where there was no first token:
    the one with the most seconds first, and at least one."""
    family = Family(spans)
    start_s, end_s = _span_of_time(request, family)
    total_s = max(0.0, end_s - start_s)
    shares = divide(_pieces(request, family), start_s, end_s)
    found = [
        *_of_gateway(shares, request, family),
        *_of_failures(shares, family, end_s),
        *_of_prefill(shares, request, family, explanation),
        *_of_handoff(shares, request, family),
    ]
    notable = [one for one in found if one.seconds >= max(LEAST_S, LEAST_PART * total_s)]
    notable.sort(key=lambda one: -one.seconds)
    if not notable:
        return (_nothing_unusual(request, total_s),)
    return tuple(Cause(one.kind, round(one.seconds, 6), one.text) for one in notable)


def _span_of_time(request: RequestSummary, family: Family) -> tuple[float, float]:
    root = family.root
    start_s = request.at_s if root is None else root.start_s
    if request.ttft_s is not None:
        return start_s, start_s + request.ttft_s
    return start_s, start_s + request.total_s if root is None else root.end_s


# The time, divided -------------------------------------------------------------------------------


def _pieces(request: RequestSummary, family: Family) -> list[Piece]:
    pieces: list[Piece] = []
    for span in family.spans:
        piece = _piece(request, family, span)
        if piece is not None:
            rank, share = piece
            pieces.append(Piece(span.start_s, _end_s(family, span), rank, share))
    return pieces


def _piece(request: RequestSummary, family: Family, span: Span) -> tuple[int, str] | None:
    """The rank of a span and what its time counts as."""
    if span.name == ATTEMPT:
        return (_FAILED, f"failed {failure_kind(span)}") if span.error else None
    if family.is_lost(span):
        return None  # the attempt has all of its time
    if span.name == BACK_OFF:
        return _OWN, _backed_off(family, span)
    if span.name == WAIT:
        return _OWN, _wait_share(span)
    if span.name == PREFILL:
        return _PREFILL, "call" if _node_prefill(family, span) else "compute"
    if span.name == DECODE:
        return _DECODE, _decode_share(request, family, span)
    if span.name in (NODE_LEASE, NODE_QUEUE, NODE_PREFILL, NODE_DECODE):
        return _node_piece(family, span)
    return _PLAIN.get(span.name)


def _node_piece(family: Family, span: Span) -> tuple[int, str] | None:
    if span.name == NODE_DECODE:
        return _NODE, "answer"
    call = family.call_of(span)
    if call is None:
        return None
    if call.name == DECODE and _has_handoff(family, call):
        return None  # the decode call has this time: its node had nothing to prefill
    return _NODE, "compute" if span.name == NODE_PREFILL else span.name


def _end_s(family: Family, span: Span) -> float:
    """What a prefill call still waits for, after the node has computed, is the transfer."""
    if span.name == PREFILL:
        computed = _node_prefill(family, span)
        if computed is not None:
            return min(span.end_s, computed.end_s)
    return span.end_s


def _node_prefill(family: Family, call: Span) -> Span | None:
    for span in family.named(NODE_PREFILL):
        if family.call_of(span) is call:
            return span
    return None


def _has_handoff(family: Family, call: Span) -> bool:
    attempt = family.attempt_of(call)
    return any(family.attempt_of(one) is attempt for one in family.named(PREFILL))


def _decode_share(request: RequestSummary, family: Family, call: Span) -> str:
    if request.ttft_s is None and not call.error:
        return "answer"  # it did not stream: nothing tells when its first token came
    if _has_handoff(family, call) or _node_prefill(family, call) is not None:
        return DECODE
    return "compute"


def _wait_share(span: Span) -> str:
    """A request that is held waits for a cluster whose nodes are busy, or for none, where no node
    may take it. One that is not held is routed at once, but for a gateway that is busy."""
    if REASON not in span.attributes:
        return WAIT
    return _QUEUED if CLUSTER in span.attributes else _UNSERVED


def _backed_off(family: Family, span: Span) -> str:
    """A pause counts for the failure that it follows."""
    before = [
        attempt
        for attempt in family.named(ATTEMPT)
        if attempt.error and attempt.start_s <= span.start_s
    ]
    latest = max(before, key=lambda attempt: attempt.end_s, default=None)
    return WAIT if latest is None else f"failed {failure_kind(latest)}"


# The shares, named -------------------------------------------------------------------------------


def _of_gateway(
    shares: Mapping[str, float], request: RequestSummary, family: Family
) -> list[_Timed]:
    read_s, tokenize_s = shares.get(READ, 0.0), shares.get(TOKENIZE, 0.0)
    queued_s, queue_s = shares.get(_QUEUED, 0.0), shares.get(NODE_QUEUE, 0.0)
    unserved_s, routing_s = shares.get(_UNSERVED, 0.0), shares.get(WAIT, 0.0)
    node = request.prefill or request.decode
    lease_s = shares.get(NODE_LEASE, 0.0)
    queue = _longest_wait(family, _QUEUED)
    full = sentences.full_queue(queued_s, queue_s, node, queue)
    unserved = sentences.unserved(unserved_s, _longest_wait(family, _UNSERVED))
    return [
        _Timed("big body", read_s + tokenize_s, sentences.big_body(read_s, tokenize_s)),
        _Timed("full queue", queued_s + queue_s, full),
        _Timed("not served", unserved_s, unserved),
        _Timed("busy gateway", routing_s, sentences.busy_gateway(routing_s)),
        _Timed("no memory", lease_s, sentences.slow_lease(lease_s, node)),
    ]


def _longest_wait(family: Family, share: str) -> Span | None:
    waits = [span for span in family.named(WAIT) if _wait_share(span) == share]
    return max(waits, key=lambda span: span.seconds, default=None)


def _of_failures(shares: Mapping[str, float], family: Family, end_s: float) -> list[_Timed]:
    found: list[_Timed] = []
    failed = [one for one in family.named(ATTEMPT) if one.error and one.start_s < end_s]
    for kind in dict.fromkeys(failure_kind(attempt) for attempt in failed):
        errors = [one.error for one in failed if failure_kind(one) == kind]
        seconds = shares.get(f"failed {kind}", 0.0)
        found.append(_Timed(kind, seconds, sentences.failed(kind, seconds, errors)))
    return found


def _of_prefill(
    shares: Mapping[str, float],
    request: RequestSummary,
    family: Family,
    explanation: Mapping[str, Any] | None,
) -> list[_Timed]:
    computed_s = shares.get("compute", 0.0)
    if not computed_s:
        return []
    time = PrefillTime(
        seconds=computed_s,
        predicted_s=_predicted_s(family, explanation),
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        stateless_tokens=_stateless_tokens(family),
    )
    node = request.prefill or request.decode
    return [
        _Timed(part.kind, part.seconds, sentences.prefill(part, time, node))
        for part in split_prefill(time)
    ]


def _of_handoff(
    shares: Mapping[str, float], request: RequestSummary, family: Family
) -> list[_Timed]:
    copies_s, transfer_s = shares.get(COPIES, 0.0), shares.get("transfer", 0.0)
    decode_s = shares.get(DECODE, 0.0)
    found = [
        _Timed("prefix copies", copies_s, sentences.prefix_copies(copies_s, request.prefill)),
        _Timed("slow link", transfer_s, sentences.slow_link(transfer_s, request, family)),
        _Timed("busy decode", decode_s, sentences.busy_decode(decode_s, request.decode)),
    ]
    for share, text in ((GRANT, sentences.slow_grant), ("call", sentences.slow_call)):
        waited_s = shares.get(share, 0.0)
        if waited_s >= LEAST_HANG_S:
            node = request.decode if share == GRANT else request.prefill
            found.append(_Timed("hung node", waited_s, text(waited_s, node)))
    return found


def _predicted_s(family: Family, explanation: Mapping[str, Any] | None) -> float | None:
    """Of the prefill, by the route of the attempt that was successful."""
    for span in family.named(PREFILL, DECODE, NODE_PREFILL, ATTEMPT):
        value = span.attributes.get(PREDICTED)
        if isinstance(value, int | float) and not family.is_lost(span):
            return float(value)
    chosen = (explanation or {}).get("chosen")
    value = chosen.get("prefill_s") if isinstance(chosen, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _stateless_tokens(family: Family) -> int:
    values = [
        span.attributes[STATELESS_TOKENS]
        for span in family.spans
        if STATELESS_TOKENS in span.attributes and not family.is_lost(span)
    ]
    return max((int(value) for value in values if isinstance(value, int | float)), default=0)


def _nothing_unusual(request: RequestSummary, total_s: float) -> Cause:
    if request.outcome == "shed":
        return Cause("refused", round(total_s, 6), sentences.refused(request.error))
    return Cause("nothing unusual", round(total_s, 6), sentences.nothing_unusual(request, total_s))
