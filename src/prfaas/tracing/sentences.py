"""What a diagnosis says: one sentence for each cause, with its seconds and the names of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.tracing.family import Family
from prfaas.tracing.prefill_time import PrefillPart, PrefillTime
from prfaas.tracing.spans import CLUSTER, COMMIT, KVD_RECEIVE, KVD_SEND, NBYTES, REASON, Span, shown
from prfaas.tracing.summary import CauseKind, RequestSummary

_FAILED: dict[CauseKind, str] = {
    "hung node": "a node that did not answer",
    "lost node": "a node that was lost",
    "cut link": "a link that was cut",
    "lost state": "a state that was lost",
    "no memory": "a kvd that had no memory for the hand-off",
    "retry": "an error",
}
_WORTH_TELLING = 0.1  # a part of a cause that is at least this part of its largest one


def duration(seconds: float) -> str:
    """With three digits: 0.33 ms, 12.3 ms, 1.23 s, 123 s."""
    value, unit = (seconds, "s") if round(seconds, 4) >= 1 else (seconds * 1e3, "ms")
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def big_body(read_s: float, tokenize_s: float) -> str:
    return f"The body took {duration(read_s)} to arrive and {duration(tokenize_s)} to be tokenised."


def full_queue(wait_s: float, queue_s: float, node: str, longest: Span | None) -> str:
    """`longest`: of the waits at the gateway for a busy node."""
    at_gateway = f"waited {duration(wait_s)} at the gateway for a node"
    if longest is not None:
        at_gateway += f" of {longest.attributes[CLUSTER]} ({longest.attributes[REASON]})"
    at_node = f"waited {duration(queue_s)} in the queue of the engine of {node}"
    if min(wait_s, queue_s) >= _WORTH_TELLING * max(wait_s, queue_s):
        return shown(f"The request {at_gateway}, and {at_node}.")
    return shown(f"The request {at_node if queue_s > wait_s else at_gateway}.")


def unserved(seconds: float, longest: Span | None) -> str:
    why = "no node could take it" if longest is None else longest.attributes[REASON]
    return shown(f"The request waited {duration(seconds)} and could not be served: {why}.")


def busy_gateway(seconds: float) -> str:
    return f"The gateway took {duration(seconds)} to choose nodes, though none was waited for."


def slow_lease(seconds: float, node: str) -> str:
    return f"The engine of {node} waited {duration(seconds)} until its kvd had reserved memory."


def failed(kind: CauseKind, seconds: float, errors: Sequence[str]) -> str:
    count = "One attempt" if len(errors) == 1 else f"{len(errors)} attempts"
    why = _FAILED.get(kind, "an error")
    last = errors[-1].rstrip(".")
    return shown(f"{count} failed after {duration(seconds)} because of {why}: {last}.")


def prefill(part: PrefillPart, time: PrefillTime, node: str) -> str:
    new, prompt = f"{time.new_tokens:,}", f"{time.prompt_tokens:,}"
    if part.kind == "slow prefill":
        assert time.predicted_s is not None
        return (
            f"{node} took {duration(time.seconds)} to prefill {new} tokens, "
            f"and the route predicted {duration(time.predicted_s)}."
        )
    if part.kind == "lost state":
        return (
            f"{node} computed {time.stateless_tokens:,} of {prompt} prompt tokens again: their "
            "blocks were cached, but no node had a state to resume from."
        )
    return (
        f"{node} computed {new} of {prompt} prompt tokens, because they were not cached; "
        f"that took {duration(time.seconds)}."
    )


def prefix_copies(seconds: float, node: str) -> str:
    return f"The prefill waited {duration(seconds)} for copies of cached prefixes to {node}."


def slow_link(seconds: float, request: RequestSummary, family: Family) -> str:
    way = f"from {request.prefill} to {request.decode}"
    text = f"The state arrived {duration(seconds)} after the prefill had ended"
    sent = _transfer(family)
    if sent is None:
        return f"{text}: the way {way} was slow."
    nbytes = sent.attributes[NBYTES]
    rate = f", which is {float(nbytes) * 8 / sent.seconds / 1e6:.3g} Mbit/s" if sent.seconds else ""
    return f"{text}: the way {way} took {duration(sent.seconds)} for {_size(float(nbytes))}{rate}."


def _transfer(family: Family) -> Span | None:
    """The span that tells most about the bytes."""
    for name in (KVD_SEND, KVD_RECEIVE, COMMIT):
        for span in family.named(name):
            if not family.is_lost(span) and isinstance(span.attributes.get(NBYTES), int | float):
                return span
    return None


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


def busy_decode(seconds: float, node: str) -> str:
    return f"{node} had the state, and took {duration(seconds)} until its first token."


def slow_grant(seconds: float, node: str) -> str:
    return f"The kvd of {node} took {duration(seconds)} to answer the request for memory."


def slow_call(seconds: float, node: str) -> str:
    return f"{node} left the prefill unanswered for {duration(seconds)} before it began."


def refused(error: str) -> str:
    return shown(f"The gateway refused the request: {error or 'it was overloaded'}.")


def nothing_unusual(request: RequestSummary, total_s: float) -> str:
    if request.error:
        return shown(f"The request ended after {duration(total_s)} with an error: {request.error}.")
    if request.ttft_s is None:
        return f"Nothing unusual: the answer, which did not stream, took {duration(total_s)}."
    return f"Nothing unusual: the first token came after {duration(total_s)}."
