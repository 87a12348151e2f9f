"""Predicts when a request would have its first token, if it took one option now. Pure.

Every policy that compares options compares these predictions: `adaptive` for each request, `paper`
where its threshold is raised. The bandwidths of links are those that `adjust` estimates.
"""

from __future__ import annotations

from typing import NamedTuple

from prfaas.scheduler.options import (
    Option,
    choose_decode_node,
    handoff_bps,
    remainder_steps,
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
    if option.decodes:
        uncached = request.prompt_tokens - option.cached_tokens
        steps = remainder_steps(uncached, state.rules.remainders.chunk_tokens)
        wait_s = option.start_s - now
        return Forecast(wait_s, option.prefill_s, 0.0, steps * costs.t_decode_s)
    bps = handoff_bps(option, view, state)
    placed = choose_decode_node(request, view, bps)
    held = 0
    slot_s = 0.0
    if placed is not None:
        decode, held = placed
        if decode.active >= decode.slots:
            slot_s = (decode.active - decode.slots + 1) / decode.slots * costs.mean_hold_s
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
