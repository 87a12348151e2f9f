"""Log-probabilities of a prompt's tokens, collected chunk by chunk while it is computed.

The logits of a chunk take a row of the vocabulary per token, so chunks of such a job are short
(`chunk_limit`). What is kept of them is in the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from prfaas.engine.api import PromptLogprobs

MAX_LOGITS = 1 << 25  # of one chunk: 128 MiB in float32, and a few copies of them


def chunk_limit(vocab_size: int) -> int:
    """Tokens of a chunk whose logits are all needed."""
    return max(1, MAX_LOGITS // vocab_size)


class PromptLogprobsCollector:
    def __init__(self, prompt: Sequence[int], alternatives: int) -> None:
        self._prompt = prompt
        self._alternatives = alternatives
        self._parts: list[PromptLogprobs] = []

    def add(self, start: int, logits: torch.Tensor) -> None:
        """`logits` [tokens, vocab] are those of the prompt's tokens from `start` on. Each row is
        about the next token; the last row of the prompt is about the first token of the answer."""
        following = self._prompt[start + 1 : start + 1 + len(logits)]
        if not len(following):
            return
        targets = torch.tensor(list(following), dtype=torch.int64, device=logits.device)[:, None]
        logprobs = torch.log_softmax(logits[: len(following)].float(), dim=-1)
        chosen = logprobs.gather(-1, targets)
        # As in vLLM: equally likely tokens count as well.
        ranks = (logprobs >= chosen).sum(dim=-1)
        top, ids = torch.topk(logprobs, min(self._alternatives, logprobs.shape[-1]), dim=-1)
        self._parts.append(
            PromptLogprobs(
                chosen[:, 0].cpu().numpy(),
                ranks.to(torch.int32).cpu().numpy(),
                ids.to(torch.int32).cpu().numpy(),
                top.cpu().numpy(),
            )
        )

    def result(self) -> PromptLogprobs:
        if not self._parts:  # a prompt of one token
            empty = np.zeros((0, self._alternatives), np.float32)
            return PromptLogprobs(
                np.zeros(0, np.float32), np.zeros(0, np.int32), empty.astype(np.int32), empty
            )
        return PromptLogprobs(*map(np.concatenate, zip(*self._parts, strict=True)))
