"""Sessions of agents: every prompt is the one before, its answer, and the result of a tool.

    shared by a kind of agent      a session's own, in its order
    ┌──────────────────────────┐┌──────┬────────┬─────────────┬────────┬─────────────┬ ...
    │ instructions and tools   ││ task │ answer │ tool result │ answer │ tool result │
    └──────────────────────────┘└──────┴────────┴─────────────┴────────┴─────────────┴ ...

The rows are those of a Mooncake trace, with the ids of the blocks that answers complete. Lengths
and times are drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from prfaas.config.trace import TRACE_BLOCK_TOKENS, TraceRow


@dataclass(frozen=True, slots=True)
class AgentTraffic:
    """With the defaults, a prompt has about 80,000 tokens, of which 95% were seen before."""

    sessions: int = 200
    turns: int = 30  # mean
    kinds: int = 4  # of agents, each with its own instructions
    shared_tokens: int = 16_000
    task_tokens: int = 5_000  # mean
    answer_tokens: int = 700  # mean
    result_tokens: int = 3_300  # mean, of a tool
    spread: float = 0.8  # sigma of the logarithm of these lengths
    pause_s: float = 45.0  # mean, from one prompt to the next: decoding, and the tool
    longest_tokens: int = 240_000  # a session ends before its prompts are longer


class _Session:
    """The block ids of one growing text."""

    def __init__(self, shared: Sequence[int], ids: Iterator[int]) -> None:
        self._ids = ids
        self._blocks = list(shared)

    def blocks(self, tokens: int) -> list[int]:
        """Of the whole blocks of the first `tokens` tokens."""
        whole = tokens // TRACE_BLOCK_TOKENS
        while len(self._blocks) < whole:
            self._blocks.append(next(self._ids))
        return self._blocks[:whole]

    def row(self, at_s: float, prompt_tokens: int, answer_tokens: int) -> TraceRow:
        known = self.blocks(prompt_tokens)
        # The last block of a prompt is not whole: no cache keeps it, and nothing has its id.
        partial = [next(self._ids)] if prompt_tokens % TRACE_BLOCK_TOKENS else []
        completed = self.blocks(prompt_tokens + answer_tokens)[len(known) :]
        return TraceRow(at_s * 1e3, prompt_tokens, answer_tokens, known + partial, completed)


def agent_rows(traffic: AgentTraffic, sessions_per_s: float, seed: int) -> list[TraceRow]:
    """Ascending in time. A seed gives the same sessions at every rate."""
    starts = np.random.default_rng((seed, 0)).exponential(1.0, traffic.sessions).cumsum()
    ids = count()
    whole = traffic.shared_tokens // TRACE_BLOCK_TOKENS
    shared = [[next(ids) for _ in range(whole)] for _ in range(traffic.kinds)]
    rows: list[TraceRow] = []
    for number, start in enumerate((starts / sessions_per_s).tolist()):
        rng = np.random.default_rng((seed, 1, number))
        session = _Session(shared[int(rng.integers(traffic.kinds))], ids)
        rows += _turns(traffic, session, start, rng)
    return sorted(rows, key=lambda row: row.timestamp)


def _turns(
    traffic: AgentTraffic, session: _Session, at_s: float, rng: np.random.Generator
) -> Iterator[TraceRow]:
    def tokens(mean: int) -> int:
        located = np.log(mean) - traffic.spread**2 / 2
        return max(1, round(float(rng.lognormal(located, traffic.spread))))

    prompt = traffic.shared_tokens + tokens(traffic.task_tokens)
    for _ in range(int(rng.poisson(traffic.turns - 1)) + 1):
        answer = tokens(traffic.answer_tokens)
        if prompt + answer > traffic.longest_tokens:
            return
        yield session.row(at_s, prompt, answer)
        prompt += answer + tokens(traffic.result_tokens)
        at_s += float(rng.exponential(traffic.pause_s))


def seen_share(rows: Sequence[TraceRow]) -> float:
    """The share of prompt tokens in blocks that an earlier prompt or answer had. Answers count as
    seen with the prompt that they answer: the next prompt comes after both."""
    seen: set[int] = set()
    known_tokens = 0
    for row in rows:
        for block in row.hash_ids:
            if block not in seen:
                break
            known_tokens += TRACE_BLOCK_TOKENS
        seen.update(row.hash_ids)
        seen.update(row.answer_hash_ids)
    return known_tokens / sum(row.input_length for row in rows)
