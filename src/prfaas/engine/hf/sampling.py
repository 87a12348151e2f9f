"""Chooses the next token of one sequence from its row of logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from prfaas.engine.api import Sampling, TokenLogprobs
from prfaas.engine.hf import logits as rows
from prfaas.errors import EngineError

# A smaller temperature would overflow float32. vLLM uses the same limit.
MIN_TEMPERATURE = 0.01


class Sampler:
    """One sequence's random generator and tokens, so that a seed gives the same tokens in any
    batch."""

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device,
        prompt: Sequence[int] = (),
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._sampling = sampling
        self._device = device
        self._generated: list[int] = []
        # Whether the largest logit is the choice: the caller may take it for the whole batch.
        self.is_plain_greedy = sampling.temperature == 0.0 and sampling.logit_fields in (
            (),
            ("logprobs",),
        )
        if self.is_plain_greedy:
            return
        self._generator = torch.Generator(device)
        if sampling.seed is None or sampling.seed == -1:  # as in vLLM
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        # vLLM bans the end of the text even where the answer would continue after it.
        self._ends = self._ids(sampling.stop_token_ids | eos_token_ids)
        self._allowed = self._ids(sampling.allowed_token_ids or ())
        self._bias = rows.bias_tensors(sampling.logit_bias, device)
        self._prompt = prompt
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._matcher = (
            sampling.grammar.matcher(sampling.stop_token_ids)
            if sampling.grammar is not None
            else None
        )
        self._banned: torch.Tensor | None = None  # by the grammar, in the latest row

    def is_ready(self, within_s: float) -> bool:
        """Whether `pick` need not wait for the grammar, now or after at most this time."""
        if self.is_plain_greedy or self._matcher is None:
            return True
        return self._matcher.is_ready(within_s)

    def pick(self, logits: torch.Tensor) -> int:
        """`logits` is [vocab]. EngineError when the request allows no token."""
        if self.is_plain_greedy:
            return int(logits.argmax())
        row = logits.to(torch.float32, copy=True)
        self._process(row)
        chosen = self._drawn(row) if self._sampling.temperature > 0.0 else row.argmax()
        token = int(chosen)
        if not float(row[token]) > float("-inf"):
            raise EngineError(
                "no token can be chosen: the grammar, allowed_token_ids, bad_words and min_tokens "
                "together exclude every token, or the model computed no numbers"
            )
        self._note(token)
        return token

    def logprobs(self, logits: torch.Tensor, token: int) -> TokenLogprobs | None:
        """None when the request does not ask for them."""
        count = self._sampling.logprobs
        if count is None:
            return None
        if self._sampling.grammar is not None and self._banned is not None:
            logits = logits.to(torch.float32, copy=True)
            rows.ban_masked(logits, self._banned)
        return rows.token_logprobs(logits, token, count)

    def _process(self, row: torch.Tensor) -> None:
        sampling = self._sampling
        if self._matcher is not None:
            bits = self._matcher.allowed_bits()
            self._banned = None
            if bits is not None:
                self._banned = rows.banned_tokens(bits, len(row), self._device)
                rows.ban_masked(row, self._banned)
        if sampling.allowed_token_ids is not None:
            rows.allow_only(row, self._allowed)
        ends = rows.ends_of_words(sampling.bad_words_token_ids, self._generated)
        if ends:
            rows.ban(row, self._ids(ends))
        if len(self._generated) < sampling.min_tokens:
            rows.ban(row, self._ends)
        if sampling.logit_bias:
            rows.add_bias(row, *self._bias)
        if sampling.repetition_penalty != 1.0:
            if self._seen is None:
                self._seen = torch.zeros(len(row), dtype=torch.bool, device=self._device)
                self._seen[self._ids(set(self._prompt))] = True
            rows.penalise_repetition(row, self._seen, sampling.repetition_penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            if self._counts is None:
                self._counts = torch.zeros_like(row)
            rows.penalise_occurrences(
                row,
                self._counts,
                frequency=sampling.frequency_penalty,
                presence=sampling.presence_penalty,
            )

    def _drawn(self, row: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        row /= max(sampling.temperature, MIN_TEMPERATURE)
        if sampling.min_p > 0.0:
            rows.keep_min_p(row, sampling.min_p)
        if sampling.top_k:
            rows.keep_top_k(row, sampling.top_k)
        if sampling.top_p < 1.0:
            rows.keep_top_p(row, sampling.top_p)
        return rows.draw(row, self._generator)

    def _note(self, token: int) -> None:
        self._generated.append(token)
        if self._matcher is not None:
            self._matcher.consume(token)
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def _ids(self, tokens: Iterable[int]) -> torch.Tensor:
        return torch.tensor(sorted(tokens), dtype=torch.int64, device=self._device)
