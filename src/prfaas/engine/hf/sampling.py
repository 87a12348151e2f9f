"""Chooses the next token from one row of logits."""

from __future__ import annotations

import torch

from prfaas.engine.api import Sampling


class Sampler:
    """One sequence's random generator, so that a seed gives the same tokens in any batch."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def pick(self, logits: torch.Tensor) -> int:
        """`logits` is [vocab]. Draws from the smallest set of tokens that makes up `top_p`."""
        if self._sampling.temperature == 0.0:
            return int(logits.argmax())
        chances = torch.softmax(logits.float() / self._sampling.temperature, dim=-1)
        chances, ids = chances.sort(descending=True)
        # A token stays when the tokens before it make up less than top_p; the first always stays.
        before = chances.cumsum(dim=-1) - chances
        chances = chances.masked_fill(before >= self._sampling.top_p, 0.0)
        drawn = torch.multinomial(chances, 1, generator=self._generator)
        return int(ids[drawn])
