"""Random weights under which a model's output depends on its whole state.

A freshly initialised small model repeats one token whatever its prompt is: its layers add next to
nothing to the embedding of the last token, and its recurrent states decay within a few tokens. Here
every matrix is drawn with a standard deviation of 1.5 / sqrt(fan-in), so that each layer matters,
and the heads of a linear layer decay over some ten to some thousand tokens.
"""

from __future__ import annotations

import math

import torch

GAIN = 1.5
# A linear layer's head decays by exp(-rate * softplus(input + bias)) per token. Inputs are about
# GAIN in size, so that softplus is around 0.1 with this bias.
DECAY_RATES = (0.01, 1.0)
DECAY_BIAS = -3.0


def draw(
    model: torch.nn.Module, *, seed: int, embedding_std: float, experts_input_first: bool
) -> None:
    """Draws every matrix. Norms, biases and other vectors keep the model's initialisation."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        # Sorted: the order of modules is not part of a model's format. Tied weights occur once.
        for name, weight in sorted(model.named_parameters()):
            if id(weight) in embeddings:
                weight.normal_(0.0, embedding_std, generator=generator)
            elif name.endswith(".A_log"):
                slow, fast = (math.log(rate) for rate in DECAY_RATES)
                weight.copy_(torch.linspace(slow, fast, weight.numel()).view(weight.shape))
            elif name.endswith(".dt_bias"):
                weight.fill_(DECAY_BIAS)
            elif weight.ndim >= 2 and not name.endswith("bias"):
                stacked = weight.ndim == 3 and experts_input_first
                fan_in = weight.shape[-2 if stacked else -1]
                weight.normal_(0.0, GAIN / fan_in**0.5, generator=generator)
