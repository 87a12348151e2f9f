"""Where the time to the first token goes. Pure."""

from __future__ import annotations

from typing import NamedTuple

from prfaas.gateway.request import RequestTrace


class TtftSplit(NamedTuple):
    """The parts add up to the time from the arrival to the first token."""

    wait_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


def split_ttft(trace: RequestTrace) -> TtftSplit | None:
    """Splits the time to the first token of one prompt; None: it has no first token, or it is not
    known when it was routed.

    With a hand-off, of the attempt that succeeded:

        wait       from the arrival until its prefill began: queues of the gateway and of the
                   prefill node, the grant, copies of prefixes, and attempts that have failed. Where
                   the prefill node has not reported yet when its prefill began: until the grant.
        prefill    from then until the prefill node has answered. The state travels meanwhile, piece
                   by piece. A prefill whose answer arrives after the commit ends with the commit:
                   the answer of a remote node takes a round trip.
        transfer   from then until the receiver has committed the state: the part of the transfer
                   that the prefill does not hide.
        decode     from then until the first token.

    Without a hand-off one node prefills and decodes, and the gateway sees only its first token:

        wait       from the arrival until the request was sent to the node. Its queue is not known.
        prefill    from then until the first token: the node's queue, the prefill and the first step
                   of decoding. Transfer and decode are 0.
    """
    if trace.first_token_s is None or trace.routed_s is None:
        return None
    arrived_s, first_s = trace.arrived_s, trace.first_token_s
    sent_s = _between(trace.routed_s, arrived_s, first_s)
    if trace.committed_s is None:
        return TtftSplit(sent_s - arrived_s, first_s - sent_s, 0.0, 0.0)
    committed_s = _between(trace.committed_s, sent_s, first_s)
    began_s = sent_s if trace.granted_s is None else trace.granted_s
    ended_s = committed_s
    if trace.prefilled_s is not None:
        began_s, ended_s = arrived_s + trace.waited_s, trace.prefilled_s
    began_s = _between(began_s, sent_s, committed_s)
    ended_s = _between(ended_s, began_s, committed_s)
    return TtftSplit(
        began_s - arrived_s, ended_s - began_s, committed_s - ended_s, first_s - committed_s
    )


def _between(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
