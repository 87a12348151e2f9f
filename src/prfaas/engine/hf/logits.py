"""Changes to one row of logits before a token is chosen from it, and log-probabilities. Pure.

The semantics are vLLM's. Functions change `logits` in place: float32 [vocab], a copy of the model's
row. A token with the logit -inf is never chosen.

    grammar ─► allowed ids ─► bad words ─► min_tokens ─► bias ─► penalties
                                  ─► greedy: the largest logit
                                  ─► temperature ─► min_p ─► top_k ─► top_p ─► draw
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from prfaas.engine.api import TokenLogprobs

_NEVER = float("-inf")


def banned_tokens(
    allowed_bits: npt.NDArray[np.uint8], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """bool [vocab]: the tokens whose bit is not set, and those without a bit."""
    allowed = np.unpackbits(allowed_bits, count=vocab_size, bitorder="little")
    return torch.from_numpy(allowed == 0).to(device, non_blocking=True)


def ban_masked(logits: torch.Tensor, banned: torch.Tensor) -> None:
    """`banned` is bool [vocab]."""
    logits.masked_fill_(banned, _NEVER)


def allow_only(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """`allowed` is int64 [n]."""
    kept = logits[allowed]
    logits.fill_(_NEVER)
    logits[allowed] = kept


def ban(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """`tokens` is int64 [n]."""
    logits[tokens] = _NEVER


def ends_of_words(words: Sequence[Sequence[int]], generated: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the words after what has been generated."""
    ends = []
    for *begin, last in words:
        first = len(generated) - len(begin)
        if first >= 0 and list(generated[first:]) == begin:
            ends.append(last)
    return ends


def add_bias(logits: torch.Tensor, tokens: torch.Tensor, biases: torch.Tensor) -> None:
    """`tokens` is int64 [n] without duplicates, `biases` float32 [n]."""
    logits[tokens] += biases


def penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> None:
    """`seen` is bool [vocab]: the tokens of the prompt and of the answer so far."""
    weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
    torch.where(seen, weaker, logits, out=logits)


def penalise_occurrences(
    logits: torch.Tensor, counts: torch.Tensor, *, frequency: float, presence: float
) -> None:
    """`counts` is float32 [vocab]: occurrences in the answer so far."""
    logits -= frequency * counts
    logits -= presence * (counts > 0)


def keep_min_p(logits: torch.Tensor, min_p: float) -> None:
    chances = torch.softmax(logits, dim=-1)
    logits.masked_fill_(chances < min_p * chances.max(), _NEVER)


def keep_top_k(logits: torch.Tensor, top_k: int) -> None:
    """Tokens that are as likely as the last one of `top_k` stay, too."""
    if top_k < len(logits):
        least = torch.topk(logits, top_k).values[-1]
        logits.masked_fill_(logits < least, _NEVER)


def keep_top_p(logits: torch.Tensor, top_p: float) -> None:
    """Keeps the smallest set of the likeliest tokens that makes up `top_p`."""
    ordered, ids = logits.sort(descending=True)
    chances = torch.softmax(ordered, dim=-1)
    # A token stays when the tokens before it make up less than top_p; the first always stays.
    before = chances.cumsum(dim=-1) - chances
    before[0] = 0.0
    logits[ids] = ordered.masked_fill(before >= top_p, _NEVER)


def draw(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token. Dividing by exponential noise draws as torch.multinomial does, but neither waits
    for the device nor fails there when no token has a probability."""
    chances = torch.softmax(logits, dim=-1)
    noise = torch.empty_like(chances).exponential_(generator=generator)
    return (chances / noise).argmax()


def token_logprobs(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Of the model's own row [vocab], with `count` alternatives."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best, ids = torch.topk(logprobs, min(count, len(logprobs)))
    chosen = float(logprobs[token])
    return TokenLogprobs(chosen, tuple(zip(ids.tolist(), best.tolist(), strict=True)))


def bias_tensors(
    bias: Mapping[int, float], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
    return ids, torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
