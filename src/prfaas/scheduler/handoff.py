"""How much of a prompt the prefill side hands off, and where it saves a checkpoint on the way.

The decode side must compute at least the last token, and a linear state is usable only at exactly
the length it was saved at. A hand-off at a block boundary can be kept as a prefix; one at N - 1
leaves the least to recompute.

    |==== block ====|==== block ====|== tail ==|
    0                            boundary      N
"""

from __future__ import annotations

from typing import NamedTuple

# To recompute this many tokens costs one decode-sized step. A reusable state is worth that.
MAX_TAIL_TOKENS = 128


class Handoff(NamedTuple):
    handoff_tokens: int  # length of the prefill; 0: no hand-off, the decode node does it all
    checkpoint_tokens: int | None  # states are also saved at this boundary


def choose_handoff(prompt_tokens: int, block_tokens: int, *, resumable: bool) -> Handoff:
    """`resumable`: the prefix was seen before, or the request belongs to a conversation, so that
    another request is likely to resume at its last boundary."""
    latest = prompt_tokens - 1
    boundary = latest // block_tokens * block_tokens
    if boundary and prompt_tokens - boundary <= MAX_TAIL_TOKENS:
        return Handoff(boundary, None)
    return Handoff(latest, boundary if resumable and boundary else None)
