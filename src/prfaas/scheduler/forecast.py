"""Predicts when a request would have its first token, if it took one option now. Pure.

Every policy that compares options compares these predictions: `adaptive` for each request, `paper`
where its threshold is raised. The bandwidths of links are those that `adjust` estimates.
"""

from __future__ import annotations

from typing import NamedTuple

from prfaas.scheduler.options import (
    Option,
    alone_steps,
    choose_decode_node,
    handoff_bps,
    slot_wait_s,
)
from prfaas.scheduler.request import Request
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import View


class Forecast(NamedTuple):
    """An option's time to first token, in its parts."""

    wait_s: float
    prefill_s: float
    transfer_s: float  # exposed transfer time, with the round trip
    decode_s: float  # wait for a slot, and one step

    @property
    def ttft_s(self) -> float:
        return sum(self)


def forecast(request: Request, option: Option, view: View, state: ShortTermState) -> Forecast:
    """Predicts the time to first token if the request takes this option now."""
    costs, now = view.costs, view.now_s
    if option.alone:
        node = view.local.node(option.node)
        uncached = request.prompt_tokens - option.cached_tokens
        steps = alone_steps(uncached, state.rules.alone.chunk_tokens) if node.active else 1
        decode_s = slot_wait_s(node, view) + steps * costs.t_decode_s
        return Forecast(option.start_s - now, option.prefill_s, 0.0, decode_s)
    bps = handoff_bps(option, view, state)
    placed = choose_decode_node(request, view, bps)
    held = 0
    slot_s = 0.0
    if placed is not None:
        decode, held = placed
        slot_s = slot_wait_s(decode, view)
    transfer_tokens = request.prompt_tokens - held
    end = option.end_s
    exposed = costs.exposed_s(request.prompt_tokens, transfer_tokens, option.prefill_s, bps)
    if option.cluster != view.local.cluster:
        link = view.links[option.cluster, view.local.cluster]
        # The bytes already dispatched to the link go first, or share it.
        nbytes = costs.handoff_bytes(request.prompt_tokens, transfer_tokens)
        drained = now + (link.pending_bytes + nbytes) * 8 / bps
        exposed = max(exposed, drained - end) + link.rtt_s
    return Forecast(option.start_s - now, option.prefill_s, exposed, slot_s + costs.t_decode_s)
