"""Which token comes next, from one row of logits."""

from __future__ import annotations

import torch

from prfaas.engine.api import Sampling


class Sampler:
    """Holds one sequence's random numbers, so that a seed gives the same tokens in any batch."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def pick(self, logits: torch.Tensor) -> int:
        """`logits` [vocab]. The smallest set of tokens that makes up `top_p` is drawn from."""
        if self._sampling.temperature == 0.0:
            return int(logits.argmax())
        chances = torch.softmax(logits.float() / self._sampling.temperature, dim=-1)
        chances, ids = chances.sort(descending=True)
        # A token stays when what comes before it is less than top_p: the first always does.
        before = chances.cumsum(dim=-1) - chances
        chances = chances.masked_fill(before >= self._sampling.top_p, 0.0)
        drawn = torch.multinomial(chances, 1, generator=self._generator)
        return int(ids[drawn])
