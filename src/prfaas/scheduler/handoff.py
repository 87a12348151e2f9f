"""How much of a prompt the prefill side hands off, and where it saves a state on the way.

The decode side must compute at least the last token, and a linear state is usable only at exactly
the length it was saved at. A hand-off at a block boundary can be kept as a prefix; one at N - 1
leaves the least to compute again.

    |==== block ====|==== block ====|== tail ==|
    0                            boundary      N
"""

from __future__ import annotations

from typing import NamedTuple

# Computing so many tokens again costs one decode-sized step; a reusable state is worth that.
MAX_TAIL_TOKENS = 128


class Handoff(NamedTuple):
    handoff_tokens: int  # the prefill's length; 0: nothing to hand off, the decode node does it all
    checkpoint_tokens: int | None  # states wanted at this boundary as well


def choose_handoff(prompt_tokens: int, block_tokens: int, *, resumable: bool) -> Handoff:
    """`resumable`: this prefix was seen before, or the request belongs to a conversation, so that
    somebody is likely to resume at its last boundary."""
    latest = prompt_tokens - 1
    boundary = latest // block_tokens * block_tokens
    if boundary and prompt_tokens - boundary <= MAX_TAIL_TOKENS:
        return Handoff(boundary, None)
    return Handoff(latest, boundary if resumable and boundary else None)
